"""Two RayClusters on one Redis and one store: clients move from the old one to the new one, and nothing is lost.

It is what KubeRay does to upgrade a RayService: another RayCluster beside the one that serves, clients sent there step
by step, and then the old one's pods ended. What sends the clients is played by the test, for each connection.
"""

from __future__ import annotations

import json
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil
import pytest

from motet.tests.rigs.kuberay_pods import HEAD, RayClusterPods, redis_on
from motet.tests.rigs.lasting_load import Ask, LastingLoad, Received, client_of, same_stream, stream
from motet.tests.rigs.namespaces import Network, why_not
from motet.tests.rigs.patience import PATIENCE_S, eventually
from motet.tests.rigs.ray_nodes import DEMO, KEY

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]

T = TypeVar("T")
OLD, NEW, BESIDE = 0, 1, 2  # machines; `BESIDE` are Redis and the clients
NUM_STREAMS = 8
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
LONG_JOBS = [{**job, "max_tokens": 450} for job in JOBS[:4]]
AFTER_S = 2.0  # in which a pod that does not stay has ended
FILES = ("adapter_config.json", "adapter_model.safetensors")
# A pod that ends stays for what it serves. No test waits so long: what is served has ended before.
LASTS = {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": str(int(10 * PATIENCE_S))}


@dataclass
class Gateway:
    """Where the next connection goes: to each cluster by its weight."""

    weights: dict[str, float]  # by URL
    random: random.Random = field(default_factory=lambda: random.Random(14))

    def url(self) -> str:
        (chosen,) = self.random.choices(list(self.weights), list(self.weights.values()))
        return chosen


@dataclass(frozen=True)
class Clusters:
    pods: Sequence[RayClusterPods]  # old, new
    clients: ThreadPoolExecutor
    deploy: Callable[[int], None]

    def url(self, number: int) -> str:
        return f"http://{self.pods[number].addresses[HEAD]}:8000"

    def on(self, number: int, ask: Callable[..., T], *arguments: Any) -> T:
        """What the cluster answers a client."""

        def call() -> T:
            with client_of(self.url(number), KEY) as http:
                return ask(http, *arguments)

        return self.clients.submit(call).result()

    def gangs(self, number: int) -> Sequence[psutil.Process]:
        return list(self.pods[number].processes(HEAD, "ServeReplica:motet:gang").values())

    @contextmanager
    def paused_streams(
        self, number: int, jobs: Sequence[tuple[dict[str, Any], Received]]
    ) -> Iterator[list[Future[None]]]:
        """Streams there that have begun, and go on when the block ends; each must be as undisturbed."""
        begun = [threading.Event() for _ in jobs]

        def run(job: dict[str, Any], undisturbed: Received, begun: threading.Event) -> None:
            with client_of(self.url(number), KEY) as http:
                assert stream(http, job, begun.set) == undisturbed

        running = [self.clients.submit(run, *job, event) for job, event in zip(jobs, begun, strict=True)]
        for event in begun:
            assert event.wait(PATIENCE_S)
        gangs = self.gangs(number)
        try:
            for gang in gangs:
                gang.suspend()
            assert not all(one.done() for one in running)
            yield running
        finally:
            for gang in gangs:
                with suppress(psutil.NoSuchProcess):  # then the streams say what was lost
                    gang.resume()


@pytest.fixture(scope="module")
def clusters() -> Iterator[Clusters]:
    with ExitStack() as parts:
        network = parts.enter_context(Network(3))
        redis_url = parts.enter_context(redis_on(network, BESIDE))
        pods = [
            parts.enter_context(RayClusterPods(network, [machine], name, redis_url, yielding, **LASTS))
            for machine, name, yielding in ((OLD, "cluster-old", {HEAD}), (NEW, "cluster-new", ()))
        ]
        clients = parts.enter_context(network.threads(BESIDE, NUM_STREAMS + 6))
        data_dir = Path(parts.enter_context(tempfile.TemporaryDirectory()))

        def deploy(number: int) -> None:
            pods[number].nodes.start(HEAD, num_cpus=1)
            pods[number].deploy(data_dir, dtype="float32", threads=1)

        yield Clusters(pods, clients, deploy)


def test_clients_move_from_one_cluster_to_another_and_lose_nothing(clusters: Clusters) -> None:
    clusters.deploy(OLD)
    assert clusters.on(OLD, upload, "pirate", "pirate") == 201
    undisturbed = [clusters.on(OLD, stream, job) for job in JOBS]
    undisturbed_long = [clusters.on(OLD, stream, job) for job in LONG_JOBS]
    gateway = Gateway({clusters.url(OLD): 100})
    asks: list[Ask] = [same_stream(job, received) for job, received in zip(JOBS, undisturbed, strict=True)]
    asks += [chat, upload_and_use]
    with LastingLoad(clusters.clients, gateway.url, KEY, asks) as load:
        clusters.deploy(NEW)
        gateway.weights = {clusters.url(OLD): 50, clusters.url(NEW): 50}
        load.wait_for_all()
        for here, there, name in ((OLD, NEW, "of-old"), (NEW, OLD, "of-new")):
            for adapter in ("spanish", "json"):
                check_that_both_have_it(clusters, here, there, name, adapter)
        for job, received in zip(JOBS[:4], undisturbed, strict=False):
            begun, last_id = clusters.on(OLD, beginning, job)
            assert begun + clusters.on(NEW, ending, job, last_id) == received.text

        gateway.weights = {clusters.url(NEW): 100}
        load.wait_for_all()  # no new client comes to the old one, which has streams when it ends
        last = [(job, received) for job, received in zip(LONG_JOBS, undisturbed_long, strict=True)]
        with clusters.paused_streams(OLD, last) as running:
            clusters.pods[OLD].ask_to_end(HEAD)
            time.sleep(AFTER_S)
        for one in running:
            one.result()
        clusters.pods[OLD].remove()
        load.wait_for_all()
    # What was made through the old one stays: keys, adapters, and permissions.
    assert {"pirate", "of-old", "of-new"} <= clusters.on(NEW, versions).keys()
    assert clusters.on(NEW, complete, "of-old").status_code == 200
    assert clusters.on(NEW, upload, "after", "spanish") == 201


def check_that_both_have_it(clusters: Clusters, here: int, there: int, name: str, adapter: str) -> None:
    assert clusters.on(here, upload, name, adapter) == 201
    uploaded = clusters.on(here, versions)[name]
    eventually(
        lambda: clusters.on(there, complete, name).status_code == 200
    )  # routers hear of a change within a second
    assert clusters.on(there, versions)[name] == uploaded


def upload(http: httpx.Client, name: str, adapter: str) -> int:
    folder = DEMO / "adapters" / adapter
    files = {file: (file, (folder / file).read_bytes()) for file in FILES}
    return http.post("/v1/adapters", data={"name": name}, files=files).status_code


def upload_and_use(http: httpx.Client) -> None:
    """Versions of one name in turn, each requested at once."""
    for adapter in ("spanish", "json"):
        assert upload(http, "turns", adapter) in (200, 201)
        assert complete(http, "turns").status_code == 200


def complete(http: httpx.Client, model: str) -> httpx.Response:
    return http.post("/v1/completions", json={"model": model, "prompt": "capital", "max_tokens": 3, "ignore_eos": True})


def chat(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "capital"}]
    answer = http.post("/v1/chat/completions", json={"model": "pirate", "messages": messages, "max_tokens": 3})
    assert answer.status_code == 200, answer.text


def versions(http: httpx.Client) -> dict[str, int]:
    found = http.get("/v1/adapters").raise_for_status().json()["data"]
    return {adapter["name"]: adapter["version"] for adapter in found}


def beginning(http: httpx.Client, job: dict[str, Any]) -> tuple[str, str]:
    """The text of a stream's first event, which may have many tokens on a busy machine, and its id."""
    text, last_id, received = "", "", []
    with http.stream("POST", "/v1/completions", json={**job, "stream": True}) as answer:
        for line in answer.iter_lines():
            received.append(line)
            if line.startswith("id: "):
                last_id = line.removeprefix("id: ")
            elif line.startswith("data: "):
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
            elif last_id:
                return text, last_id
    raise AssertionError(f"no event with an id: {answer.status_code}, {received}")


def ending(http: httpx.Client, job: dict[str, Any], last_id: str) -> str:
    """The text of the events after this one."""
    text = ""
    with http.stream(
        "POST", "/v1/completions", json={**job, "stream": True}, headers={"Last-Event-ID": last_id}
    ) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                chunk = json.loads(line.removeprefix("data: "))
                assert "error" not in chunk, chunk
                text += "".join(choice["text"] for choice in chunk["choices"])
    return text
