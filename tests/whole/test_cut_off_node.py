"""Two nodes of one Ray cluster with a gang on each; the network of one node is cut, and no stream loses a token."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from typing import Any

import httpx
import psutil
import pytest

from motet.tests.rigs.namespaces import Network, why_not
from motet.tests.rigs.operators import PATHS
from motet.tests.rigs.patience import PATIENCE_S, eventually
from motet.tests.rigs.ray_nodes import KEY, OPERATOR_KEY, RayNodes
from motet.tests.rigs.running_motet import holds_nothing, slowed

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]

NUM_STREAMS = 8
NUM_TOKENS = 450  # the demo model's context is 512
LINE = 3  # of a stream, at which it has begun
# The cable is back before Ray gives the node up, however slow this machine is. Given up, it would be started anew.
PATIENCE = {"RAY_health_check_timeout_ms": "600000"}
# In which a vanished node must be noticed: that takes 10 s, on a busy machine more. gRPC's own limit is a minute.
NOTICED_S = 45.0
OPTIONS = ({"temperature": 0}, {"temperature": 1.3, "seed": 5}, {"temperature": 1, "seed": 6, "frequency_penalty": 0.3})


@dataclass(frozen=True)
class Received:
    """A completion as its client received it."""

    text: str
    token_ids: list[int]
    finish_reason: str | None
    num_tokens: int


@dataclass(frozen=True)
class Cluster:
    """Two machines, and a motet on both; its HTTP front is on the first."""

    network: Network
    nodes: RayNodes
    url: str
    clients: ThreadPoolExecutor  # threads on the first machine

    def call(self, method: str, path: str, **options: Any) -> httpx.Response:
        def call() -> httpx.Response:
            headers = {"Authorization": f"Bearer {OPERATOR_KEY if path in PATHS else KEY}"}
            return httpx.request(
                method, self.url + path, headers=headers, timeout=PATIENCE_S, trust_env=False, **options
            )

        return self.clients.submit(call).result()

    def num_gangs(self) -> int:
        return len(self.call("GET", "/status").json()["gangs"])

    def num_resumed(self) -> int:
        lines = self.call("GET", "/metrics").text.splitlines()
        return int(float(next(line for line in lines if line.startswith("motet_resumed_sequences_total")).split()[1]))

    def has_all_pages(self) -> bool:
        load = self.call("GET", "/status").json()["load"]
        return holds_nothing(load)

    def streams_cut_off(self) -> list[Received]:
        """Cuts the network of the second machine midway. Not slowed, so small a model would be through before."""
        gangs = [
            process
            for n in (0, 1)
            for process in self.network.processes(n)
            if "ServeReplica:motet:gang" in title(process)
        ]
        assert len(gangs) == 2
        is_cut = threading.Event()

        def cut() -> None:
            self.network.pull_cable(1)
            is_cut.set()

        with slowed(gangs, is_cut.is_set):
            return self.streams(cut)

    def ask(self, num_tokens: int = 5) -> httpx.Response:
        fields = {"model": "base", "prompt": "capital", "max_tokens": num_tokens, "ignore_eos": True}
        return self.call("POST", "/v1/completions", json=fields)

    def streams(self, midway: Callable[[], None]) -> list[Received]:
        """Runs all streams at once; calls `midway` when the last of them has begun."""
        num_begun = count(1)

        def begun() -> None:
            if next(num_begun) == NUM_STREAMS:
                midway()

        return list(
            self.clients.map(lambda number: self._stream(OPTIONS[number % len(OPTIONS)], begun), range(NUM_STREAMS))
        )

    def _stream(self, options: dict[str, Any], begun: Callable[[], None]) -> Received:
        fields = {"model": "base", "prompt": "capital", "max_tokens": NUM_TOKENS, "ignore_eos": True, **options}
        fields |= {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
        text, token_ids, finish_reason, num_tokens = "", list[int](), None, 0
        headers = {"Authorization": f"Bearer {KEY}"}
        with (
            httpx.Client(base_url=self.url, headers=headers, timeout=PATIENCE_S, trust_env=False) as http,
            http.stream("POST", "/v1/completions", json=fields) as answer,
        ):
            assert answer.status_code == 200
            events = (line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: "))
            for number, event in enumerate(events):
                if number == LINE:
                    begun()
                if event == "[DONE]":
                    break
                chunk = json.loads(event)
                for choice in chunk.get("choices", ()):
                    text += choice["text"]
                    token_ids += choice.get("token_ids") or []
                    finish_reason = choice["finish_reason"] or finish_reason
                num_tokens = (chunk.get("usage") or {}).get("completion_tokens", num_tokens)
        return Received(text, token_ids, finish_reason, num_tokens)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Network(2) as network, RayNodes(network.addresses, network.command, **PATIENCE) as nodes:
        nodes.start(0, place=1, front=1)
        nodes.start(1, place=1)
        options = ["--gangs", "2", "--resource", "place=1", "--router-resource", "front=1", "--dtype", "float32"]
        # One thread more, for requests that only observe.
        with nodes.motet(*options) as url, network.threads(0, NUM_STREAMS + 1) as clients:
            yield Cluster(network, nodes, url, clients)


def title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""


def test_streams_go_on_when_a_node_is_cut_off(cluster: Cluster) -> None:
    assert cluster.url == f"http://{cluster.network.addresses[0]}:8000"
    eventually(lambda: cluster.num_gangs() == 2)
    began_at = time.monotonic()
    undisturbed = cluster.streams(lambda: None)
    # What is left of all of them is computed by one gang, from the prompts on, beside what starts and ends then.
    streams_s = 3 * (time.monotonic() - began_at)
    assert all(len(received.token_ids) == received.num_tokens == NUM_TOKENS for received in undisturbed)
    assert cluster.num_resumed() == 0

    for _ in range(4):  # until there were streams on each of the gangs; which one serves which is the router's choice
        num_resumed, began_at = cluster.num_resumed(), time.monotonic()
        assert cluster.streams_cut_off() == undisturbed
        assert time.monotonic() - began_at < NOTICED_S + streams_s
        if 0 < cluster.num_resumed() - num_resumed < NUM_STREAMS:
            break
        cluster.network.plug_cable(1)
        eventually(lambda: cluster.num_gangs() == 2)
    else:
        pytest.fail("never were there streams on both gangs")

    eventually(lambda: cluster.num_gangs() == 1)
    assert cluster.ask().json()["usage"]["completion_tokens"] == 5

    cluster.network.plug_cable(1)
    eventually(lambda: cluster.num_gangs() == 2)
    assert cluster.streams(lambda: None) == undisturbed
    eventually(cluster.has_all_pages)  # those of the streams that were cut, too
