"""Pods of RayClusters as KubeRay starts them, each in a network namespace of its own, and the Redis beside them.

The head has no CPUs, so nothing of motet runs on it but Serve's controller and proxy. Its GCS keeps what it knows in
the Redis, under a namespace that is the cluster's own.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
from redis.connection import parse_url

from motet.cluster.registry_server.redis_server import RedisServer
from motet.tests.rigs.namespaces import Network
from motet.tests.rigs.ray_nodes import RayNodes

HEAD = 0
# As KubeRay sets it in the pods of workers where the GCS is fault-tolerant: so long they wait for another head.
RECONNECT = {"RAY_gcs_rpc_server_reconnect_timeout_s": "600"}


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

    def __init__(self, network: Network, machines: Sequence[int], name: str, redis_url: str, **variables: str) -> None:
        """`name`: of the cluster, which is its namespace in Redis. `variables`: of each container."""
        self.addresses = [network.addresses[machine] for machine in machines]
        redis = parse_url(redis_url)
        self.nodes = RayNodes(
            self.addresses,
            lambda number, command: network.command(machines[number], command),
            {"RAY_REDIS_ADDRESS": f"{redis['host']}:{redis['port']}", "REDIS_PASSWORD": str(redis["password"])},
            RAY_external_storage_namespace=name,
            **RECONNECT,
            **variables,
        )

    def start_head(self) -> None:
        self.nodes.start(HEAD, num_cpus=0)

    def start_worker(self, number: int, **resources: float) -> None:
        self.nodes.start(number, num_cpus=1, **resources)

    def processes(self, number: int, part: str) -> Mapping[int, psutil.Process]:
        """Processes of a pod with this part in their titles, by id."""
        return {process.pid: process for process in self.nodes.processes_of(number) if part in _title(process)}

    def kill_head(self) -> None:
        self.nodes.kill(HEAD)

    def tell_to_end(self, number: int) -> None:
        """As the kubelet does with a pod that is deleted. It may stay for what it serves."""
        (main,) = self.processes(number, "/ray start --block").values()
        main.terminate()

    def __enter__(self) -> RayClusterPods:
        self.nodes.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.nodes.__exit__(*error)


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""
