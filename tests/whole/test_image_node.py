"""A Ray that was started with what the images say, and a Serve on it that knows nothing of motet: as under KubeRay."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from motet.cluster.edge.haproxy import write_edge_program
from motet.cluster.launch.local_serve import free_ports
from motet.tests.rigs.edge_front import error_of, raw_answer
from motet.tests.rigs.image_variables import image_variables
from motet.tests.rigs.ray_nodes import RayNodes

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(sys.platform != "linux", reason="HAProxy is for Linux"),
]

WITH_KEY = b"GET / HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer any\r\n"  # the edge refuses what has none
SERVE = """
import sys
import ray
from ray import serve

@serve.deployment(ray_actor_options={"num_cpus": 0})
class Any:
    def __call__(self, request):
        return "any"

ray.init(address=sys.argv[1])
serve.start(proxy_location="HeadOnly", http_options={"port": int(sys.argv[2])})
serve.run(Any.bind(), name="any", route_prefix="/")
"""


def test_a_serve_on_such_a_node_has_motets_edge(tmp_path: Path) -> None:
    variables = image_variables(str(write_edge_program(tmp_path / "motet-haproxy")))
    port = free_ports(1)[0]
    with RayNodes(["127.0.0.2"], **variables) as nodes:
        nodes.start(0)
        status, said = nodes.output(0, ["python", "-c", SERVE, nodes.address, str(port)])
        assert status == 0, said
        assert raw_answer(port, WITH_KEY + b"\r\n")[::2] == (200, b"any")
        # What a Serve without motet's edge answers with 500.
        assert raw_answer(port, WITH_KEY + b"x-request-id: \xff\r\n\r\n")[0] == 200
        answer = raw_answer(port, b"GARBAGE\r\n\r\n")
        assert answer[0] == 400
        error_of(answer)
        command = ["motet", "doctor", "--json", "--address", nodes.address, "--data-dir", str(tmp_path)]
        _, said = nodes.output(0, command)
        findings = json.loads(said[said.index("{") :])["findings"]
        assert [one["found"] for one in findings if one["check"] == "serve"] == [
            f"flags and edge are set ({tmp_path}/motet-haproxy)",
            "the running Serve has its flags and motet's edge",
        ]
