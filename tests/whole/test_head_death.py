"""A cluster's head dies under 16 streams, and another one takes its place: what goes on, and what waits for it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import psutil
import pytest

from motet.tests.rigs.kuberay_pods import HEAD, RayClusterPods, redis_on
from motet.tests.rigs.lasting_load import LastingLoad, client_of, same_stream, stream
from motet.tests.rigs.namespaces import Network, why_not
from motet.tests.rigs.patience import eventually
from motet.tests.rigs.ray_nodes import DEMO, KEY, OPERATOR_KEY

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]

WORKER, OTHER_WORKER, BESIDE = 1, 2, 3  # `BESIDE` is no node: Redis and the clients are there
HELD_S = 45.0  # Ray would keep its callers waiting for twice as long
GANG = "ServeReplica:motet:gang"
NUM_STREAMS = 16
JOBS: list[dict[str, Any]] = [
    {
        "model": ("pirate", "base")[number % 2],
        "prompt": f"{number} capital",
        "max_tokens": 200,
        "ignore_eos": True,
        "temperature": (0, 1.1)[number // 2 % 2],
        "seed": number,
    }
    for number in range(NUM_STREAMS)
]


@dataclass(frozen=True)
class Cluster:
    pods: RayClusterPods
    url: str  # of the proxy on a worker
    clients: ThreadPoolExecutor

    def call(self, method: str, path: str, key: str = KEY, **options: Any) -> httpx.Response:
        def call() -> httpx.Response:
            with client_of(self.url, key) as http:
                return http.request(method, path, **options)

        return self.clients.submit(call).result()

    def upload(self, name: str, adapter: str) -> httpx.Response:
        folder = DEMO / "adapters" / adapter
        files = {file: (file, (folder / file).read_bytes()) for file in FILES}
        return self.call("POST", "/v1/adapters", data={"name": name}, files=files)

    def complete(self, model: str) -> httpx.Response:
        fields = {"model": model, "prompt": "capital", "max_tokens": 3, "ignore_eos": True}
        return self.call("POST", "/v1/completions", json=fields)

    def num_gangs(self) -> int:
        return len(self.call("GET", "/status", OPERATOR_KEY).raise_for_status().json()["gangs"])

    def num_resumed(self) -> int:
        return self.counted("motet_resumed_sequences_total")

    def counted(self, name: str) -> int:
        """By the router."""
        lines = self.call("GET", "/metrics", OPERATOR_KEY).raise_for_status().text.splitlines()
        return int(float(next(line for line in lines if line.startswith(name)).split()[1]))

    def gangs(self) -> Mapping[int, psutil.Process]:
        return {**self.pods.processes(WORKER, GANG), **self.pods.processes(OTHER_WORKER, GANG)}


FILES = ("adapter_config.json", "adapter_model.safetensors")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with (
        Network(4) as network,
        redis_on(network, BESIDE) as redis_url,
        RayClusterPods(network, [HEAD, WORKER, OTHER_WORKER], "cluster-1", redis_url, {WORKER, OTHER_WORKER}) as pods,
        network.threads(BESIDE, NUM_STREAMS + 2) as clients,
    ):
        pods.start_head()
        pods.start_worker(WORKER, front=1)
        pods.start_worker(OTHER_WORKER)
        args = {"dtype": "float32", "threads": 1, "gangs": 2, "router-resource": ["front=1"]}
        pods.deploy(pods.nodes.path / "data", **args)
        yield Cluster(pods, f"http://{pods.addresses[WORKER]}:8000", clients)


def test_streams_uploads_and_new_requests_go_on_without_a_head(cluster: Cluster) -> None:
    assert cluster.upload("pirate", "pirate").status_code == 201
    eventually(lambda: cluster.num_gangs() == 2)
    with client_of(cluster.url, KEY) as http:
        undisturbed = [cluster.clients.submit(stream, http, job).result() for job in JOBS]
    asks = [same_stream(job, received) for job, received in zip(JOBS, undisturbed, strict=True)]
    with LastingLoad(cluster.clients, lambda: cluster.url, KEY, asks) as load:
        routers = cluster.pods.processes(WORKER, "ServeReplica:motet:router")
        gangs = cluster.gangs()
        cluster.pods.kill_head()
        load.wait_for_all()
        assert cluster.upload("headless", "spanish").status_code == 201
        assert cluster.complete("headless").status_code == 200
        assert cluster.num_gangs() == 2
        eventually(lambda: cluster.counted("motet_head_connected") == 0)

        cluster.pods.start_head()
        eventually(lambda: cluster.pods.processes(HEAD, "ServeController.listen_for_change"))  # it knows what runs
        load.wait_for_all()
        # The same replicas serve, and no stream had to move.
        assert cluster.pods.processes(WORKER, "ServeReplica:motet:router").keys() == routers.keys()
        assert cluster.gangs().keys() == gangs.keys()
        assert cluster.num_resumed() == 0
        eventually(lambda: cluster.counted("motet_head_connected") == 1)

        next(iter(cluster.gangs().values())).kill()  # the head knows what runs, and replaces what dies
        load.wait_for_all()
        eventually(lambda: cluster.num_gangs() == 2)
        load.wait_for_all()


def test_a_gang_that_dies_without_a_head_is_replaced_when_there_is_one(cluster: Cluster) -> None:
    eventually(lambda: cluster.num_gangs() == 2)
    # First Serve's controller, so that its listeners look for the next one when there is no controller.
    for controller in cluster.pods.processes(HEAD, "ServeController").values():
        controller.kill()
    cluster.pods.kill_head()
    died = next(iter(cluster.gangs().values()))
    died.kill()
    eventually(lambda: cluster.num_gangs() == 1)
    assert cluster.counted("motet_wanted_gangs") == 2  # as the head said last
    requested_at = time.monotonic()
    assert cluster.complete("pirate").status_code == 200
    assert time.monotonic() - requested_at < HELD_S

    cluster.pods.start_head()
    eventually(lambda: cluster.num_gangs() == 2)
    assert cluster.complete("pirate").status_code == 200
