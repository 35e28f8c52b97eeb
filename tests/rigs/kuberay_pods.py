"""Pods of RayClusters as KubeRay starts them, each in a network namespace of its own, and the Redis beside them.

The head has no CPUs, so nothing of motet runs on it but Serve's controller and proxy. Its GCS keeps what it knows in
the Redis, under a namespace that is the cluster's own.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from motet.cluster.config import MotetConfig
from motet.cluster.edge.haproxy import write_haproxy
from motet.cluster.edge.serve_variables import BINARY_VARIABLE, LASTING_STREAMS, SERVE_FLAGS
from motet.cluster.launch.redis_server import RedisServer
from motet.tests.rigs.namespaces import Network
from motet.tests.rigs.ray_nodes import DEMO, RayNodes

HEAD = 0
# Where the kernel gives each session a share of the processor, `nice` counts only inside of one.
YIELDING = ("sh", "-c", 'echo 15 2>&- >/proc/self/autogroup; exec nice -n 15 "$@"', "sh")
# As KubeRay sets it in the pods of workers where the GCS is fault-tolerant: so long they wait for another head.
RECONNECT = {"RAY_gcs_rpc_server_reconnect_timeout_s": "600"}

# What Serve does when it is given the application over HTTP. The command's end is not the application's.
DEPLOY = """
import json, sys
import ray
from ray import serve
from motet.cluster.serve_application import build

ray.init(address=sys.argv[1], log_to_driver=False)
serve.start(proxy_location="EveryNode", http_options={"host": "0.0.0.0", "port": 8000})
serve.run(build(json.loads(sys.argv[2])), name="motet", route_prefix="/")
"""
# What KubeRay's job does for a cluster that was deleted.
CLEAN_UP = """
import sys
from ray._private.gcs_utils import cleanup_redis_storage

host, port, password, namespace = sys.argv[1:]
cleanup_redis_storage(host, int(port), password, False, namespace)
"""


@contextmanager
def redis_on(network: Network, machine: int) -> Iterator[str]:
    """The URL of a Redis on a machine of the network, with a password."""
    with tempfile.TemporaryDirectory() as folder, network.threads(machine, 1) as there:
        server = RedisServer(Path(folder), host=network.addresses[machine])
        try:
            yield there.submit(server.start).result()
        finally:
            server.stop()


class RayClusterPods:
    """One RayCluster on some machines of a network, the head's first. Its processes are ended with the context."""

    def __init__(
        self,
        network: Network,
        machines: Sequence[int],
        name: str,
        redis_url: str,
        yielding: Container[int] = (),
        **variables: str,
    ) -> None:
        """`name`: of the cluster, which is its namespace in Redis. `variables`: of each container.

        `yielding`: nodes whose processes run at the lowest priority. A node that starts has a machine of
        its own where it matters; here Ray would give it up beside others that serve: its parts have 15 to 30 s.
        """
        self.addresses = [network.addresses[machine] for machine in machines]
        redis = urlsplit(redis_url)
        self._clean_up = [
            sys.executable,
            "-c",
            CLEAN_UP,
            str(redis.hostname),
            str(redis.port),
            str(redis.password),
            name,
        ]
        self._folder = tempfile.TemporaryDirectory()
        edge = MotetConfig.of(model_path=DEMO / "base").edge
        haproxy = write_haproxy(Path(self._folder.name) / "haproxy", edge, None)
        self.nodes = RayNodes(
            self.addresses,
            lambda number, command: network.command(
                machines[number], [*(YIELDING if number in yielding else ()), *command]
            ),
            {"RAY_REDIS_ADDRESS": f"{redis.hostname}:{redis.port}", "REDIS_PASSWORD": str(redis.password)},
            RAY_external_storage_namespace=name,
            REDIS_URL=redis_url,
            **SERVE_FLAGS,
            **LASTING_STREAMS,
            **RECONNECT,
            **{BINARY_VARIABLE: str(haproxy)},
            **variables,
        )

    def deploy(self, data_dir: Path, **args: object) -> None:
        """motet of the demo model, which runs when this returns."""
        args = {"model": str(DEMO / "base"), "data-dir": str(data_dir), "pool-bytes": "32MiB", **args}
        command = [sys.executable, "-c", DEPLOY, self.nodes.address, json.dumps(args)]
        status, said = self.nodes.output(HEAD, command)
        assert status == 0, said

    def start_head(self) -> None:
        self.nodes.start(HEAD, num_cpus=0)

    def start_worker(self, number: int, front: float = 0) -> None:
        """`front`: how much of the resource of this name it has."""
        self.nodes.start(number, num_cpus=1, front=front)

    def processes(self, number: int, part: str) -> Mapping[int, psutil.Process]:
        """Processes of a pod with this part in their titles, by id."""
        return {process.pid: process for process in self.nodes.processes_of(number) if part in _title(process)}

    def kill_head(self) -> None:
        self.nodes.kill(HEAD)

    def remove(self) -> None:
        """What is left of it, and what its GCS has written into Redis."""
        self.nodes.kill(HEAD)
        status, said = self.nodes.output(HEAD, self._clean_up)
        assert status == 0, said

    def ask_to_end(self, number: int) -> None:
        """As the kubelet does with a pod that is deleted. It may stay for what it serves."""
        (main,) = self.processes(number, "/ray start --block").values()
        main.terminate()

    def __enter__(self) -> RayClusterPods:
        self.nodes.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.nodes.__exit__(*error)
        self._folder.cleanup()


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""
