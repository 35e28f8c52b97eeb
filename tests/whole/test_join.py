"""`motet serve --address` on a Ray cluster that others started and use: two nodes on this machine's loopback."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import httpx
import pytest

from motet.cluster.edge.serve_variables import LASTING_STREAMS, SERVE_FLAGS
from motet.cluster.launch.local_serve import free_ports
from motet.tests.rigs.patience import PATIENCE_S
from motet.tests.rigs.ray_nodes import KEY, RayNodes

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux has all of 127.0.0.0/8 for loopback"),
]

# Another's Serve, with an application of its own, and one that a motet left which was killed.
OTHERS = """
import json, sys
import ray
from ray import serve

@serve.deployment(ray_actor_options={"num_cpus": 0})
class Other:
    def __call__(self, request):
        return "other"

ray.init(address=sys.argv[1], runtime_env={"env_vars": json.loads(sys.argv[3])})
serve.start(proxy_location="HeadOnly", http_options={"host": "0.0.0.0", "port": int(sys.argv[2])})
serve.run(Other.bind(), name="other", route_prefix="/other")
serve.run(Other.bind(), name="motet", route_prefix="/")
"""


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    addresses = ["127.0.0.2", "127.0.0.3"]  # by 127.0.0.1 Ray understands the machine's address
    with RayNodes(addresses) as nodes:
        nodes.start(0, place=1, front=1)
        nodes.start(1, place=1)
        yield nodes


def test_a_gang_without_a_place_is_refused_with_the_reason(nodes: RayNodes) -> None:
    status, said = nodes.output(0, nodes.serve_command("--resource", "nvidia.com/mig-1g.10gb=1", "--gangs", "2"))
    assert status == 1
    assert "no node has room: a gang takes 1 CPU, 1 nvidia.com/mig-1g.10gb" in said
    assert "127.0.0.2 has 2 CPU, 0 nvidia.com/mig-1g.10gb; 127.0.0.3 has 2 CPU" in said


def test_a_serve_that_motet_starts_has_its_edge(nodes: RayNodes) -> None:
    port = free_ports(1)[0]
    options = ["--port", str(port), "--router-resource", "front=1", "--dtype", "float32"]
    with nodes.motet(*options) as url, httpx.Client(base_url=url, trust_env=False, timeout=PATIENCE_S) as http:
        for headers in ({"traceparent": b"\xff"}, {"a": "x" * 20_000}):
            answer = http.get("/v1/models", headers=headers)  # type: ignore[arg-type]
            assert answer.status_code in (400, 431)
            assert answer.json()["error"]["code"] in ("invalid_header", "headers_too_large")
        assert http.get("/status").json()["error"]["code"] == "invalid_api_key"


def test_the_doctor_looks_at_every_node(nodes: RayNodes) -> None:
    command = ["motet", "doctor", "--json", "--address", nodes.address, "--data-dir", str(nodes.path / "data")]
    status, said = nodes.output(0, command)
    document = json.loads(said[said.index("{") :])
    findings = {(one["node"], one["check"], one["found"]): one for one in document["findings"]}
    assert {node for node, _, _ in findings} == {"", "127.0.0.2", "127.0.0.3"}, said
    assert ("", "data folder", "a lock of 127.0.0.2 holds on 127.0.0.3") in findings
    assert [
        one for one in document["findings"] if one["check"] in ("cluster", "versions") and one["level"] != "ok"
    ] == []
    assert any(check == "kernels" and node == "127.0.0.3" for node, check, _ in findings)
    assert status == (1 if document["errors"] else 0)


def test_it_comes_and_goes_beside_the_applications_of_others(nodes: RayNodes) -> None:
    port = free_ports(1)[0]
    flags = [f"{name}={value}" for name, value in SERVE_FLAGS.items()]
    others = ["python", "-c", OTHERS, nodes.address, str(port), json.dumps(SERVE_FLAGS | LASTING_STREAMS)]
    status, said = nodes.output(0, ["env", *flags, *others])
    assert status == 0, said
    # A gang with a worker on each node.
    options = ["--port", str(port), "--router-resource", "front=1", "--dtype", "float32"]
    options += ["--tensor-parallel", "2", "--placement", "spread", "--resource", "place=1"]
    status, said = nodes.output(0, nodes.serve_command(*options))
    assert status == 1
    assert "an application motet runs on this cluster already" in said
    with (
        nodes.motet("--replace", *options) as url,
        httpx.Client(base_url=url, trust_env=False, timeout=PATIENCE_S) as http,
    ):
        assert url == f"http://127.0.0.2:{port}"
        fields = {"model": "base", "prompt": "capital", "max_tokens": 20, "ignore_eos": True}
        answer = http.post("/v1/completions", headers={"Authorization": f"Bearer {KEY}"}, json=fields)
        assert answer.json()["usage"]["completion_tokens"] == 20
        assert http.get("/other").text == "other"
    with httpx.Client(base_url=url, trust_env=False, timeout=PATIENCE_S) as http:
        assert http.get("/other").text == "other"
        assert http.get("/v1/models").status_code == 404
