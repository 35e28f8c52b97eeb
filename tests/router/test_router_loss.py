"""Routers that die while clients stream: over real gRPC, with another router at which the clients resume."""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from starlette.applications import Starlette

from motet.adapters.registry.registry_view import RegistryView
from motet.adapters.upload import UploadService
from motet.router.config import CurrentConfig
from motet.router.fleet import dispatch
from motet.router.fleet.dispatch import FleetDispatcher
from motet.router.rest_server import create_app
from motet.router.text.text import TextService
from motet.tests.rigs.part_configs import admission_config, leader_config, router_config
from motet.tests.rigs.patience import PATIENCE_S
from motet.tests.rigs.patience import eventually_in_loop as eventually
from motet.tests.rigs.router_rig import (
    BASE,
    EOS,
    OPERATOR_KEY,
    Event,
    FakeUploads,
    FakeView,
    encoded,
    events_of,
    text_service,
)
from motet.tests.rigs.stand_in_engine import INFO, StandInEngine, adapter_pages
from motet.tests.rigs.wire import Wire
from motet.workers.leader.frame_server import FrameServer
from motet.workers.wire.messages import SequenceRequest, SequenceUpdate, TokenLogprobs

TOKEN = "a secret"
PASSAGE = "the quick 你猫 brown fox jumps 🎉 over the lazy dog. héllo wörld "
ORPHAN_S = 3.0  # unless a test asks for one


class ReadingEngine(StandInEngine):
    """An engine whose tokens are a passage, repeated; the seed decides where a sequence begins and ends in it."""

    def __init__(self, token_ids: list[int]) -> None:
        super().__init__(step_s=0.002)
        self._passage = token_ids

    def _next(self, request: SequenceRequest, count: int) -> SequenceUpdate:
        seed = request.sampling.seed
        assert seed is not None
        token = self._passage[(seed + count) % len(self._passage)]
        if count >= 20 + seed % 60:
            token = EOS
        logprobs = None if request.sampling.num_logprobs is None else [TokenLogprobs(-float(count), [], [])]
        is_cut = count + 1 == request.sampling.max_tokens
        reason: Any = "stop" if token == EOS else "length" if is_cut else None
        return SequenceUpdate(request.sequence_id, [token], logprobs, reason)


class Gang:
    def __init__(self, engine: StandInEngine, server: FrameServer, address: str) -> None:
        self.engine, self.server, self.address = engine, server, address


class Router:
    """A router's app, its connections to the gangs, and the wires that are cut when it dies."""

    def __init__(self, dispatcher: FleetDispatcher, wires: list[Wire], app: Starlette) -> None:
        self.dispatcher, self.wires, self.app = dispatcher, wires, app
        self._is_dead = False

    async def stream(
        self, path: str, body: dict[str, Any], last_event_id: str, num_bytes: int | None, got: bytearray | None = None
    ) -> bytes:
        """The answer's body: as much of it as the client got before the router died, or all of it. Status 200.

        `num_bytes`: after which it dies; None: it does not. `got`: the body as it grows.
        """
        got = bytearray() if got is None else got
        is_enough = asyncio.Event()
        sent = [{"type": "http.request", "body": json.dumps({"model": BASE, "stream": True, **body}).encode()}]

        async def receive() -> dict[str, Any]:
            if sent:
                return sent.pop()
            await asyncio.Event().wait()  # the client stays
            raise AssertionError

        async def send(message: dict[str, Any]) -> None:
            if self._is_dead:
                return
            if message["type"] == "http.response.start":
                assert message["status"] == 200
            got.extend(message.get("body", b""))
            if num_bytes is not None and len(got) >= num_bytes:
                is_enough.set()

        headers = [(b"authorization", b"Bearer key-of-acme"), (b"last-event-id", last_event_id.encode())]
        scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}
        answer = asyncio.create_task(self.app(scope, receive, send))  # type: ignore[arg-type]
        enough = asyncio.create_task(is_enough.wait())
        try:
            async with asyncio.timeout(PATIENCE_S):
                await asyncio.wait((answer, enough), return_when=asyncio.FIRST_COMPLETED)
            if enough.done():
                await self.die()
            else:
                answer.result()
        finally:  # the client has gone
            enough.cancel()
            answer.cancel()
            await asyncio.wait((answer, enough))
        return bytes(got if num_bytes is None else got[:num_bytes])

    async def die(self) -> None:
        self._is_dead = True  # its clients receive nothing more
        for wire in self.wires:
            wire.cut()
        await self.dispatcher.close()


class Cluster:
    def __init__(self, text: TextService, spool_path: Path, orphan_s: float) -> None:
        self.text = text
        self._orphan_s = orphan_s
        self.gangs: list[Gang] = []
        self.routers: list[Router] = []
        self._spool_path = spool_path

    async def add_gang(self) -> Gang:
        engine = ReadingEngine(encoded(self.text, PASSAGE))
        server = FrameServer(
            engine, msgspec.structs.replace(INFO, vocab_size=320), TOKEN, leader_config(orphan_s=self._orphan_s)
        )
        self.gangs.append(Gang(engine, server, await server.start("127.0.0.1")))
        return self.gangs[-1]

    async def add_router(self) -> Router:
        dispatcher = FleetDispatcher(
            TOKEN, gang_wait_s=PATIENCE_S, adapter_pages=adapter_pages, admission=admission_config()
        )
        wires = [Wire(gang.address) for gang in self.gangs]
        dispatcher.update({str(number): await wire.start() for number, wire in enumerate(wires)})
        registry = FakeView()
        app = create_app(
            config=CurrentConfig(router_config(BASE, self._spool_path)),
            dispatcher=dispatcher,
            view=cast(RegistryView, registry),
            uploads=cast(UploadService, FakeUploads(registry)),
            text=self.text,
            operator_key=OPERATOR_KEY,
        )
        self.routers.append(Router(dispatcher, wires, app))
        await eventually(lambda: len(dispatcher.gangs()) == len(self.gangs))
        return self.routers[-1]

    @property
    def num_running(self) -> int:
        return sum(gang.engine.num_running for gang in self.gangs)

    @property
    def num_kept(self) -> int:
        """Sequences that the gangs keep for clients that resume, ended ones too."""
        return sum(len(gang.server._sequences._journal._entries) for gang in self.gangs)

    @property
    def submitted(self) -> list[SequenceRequest]:
        return [request for gang in self.gangs for request in gang.engine.submitted]

    async def close(self) -> None:
        for router in self.routers:
            await router.die()
        for gang in self.gangs:
            await gang.server.stop()


@pytest.fixture(scope="module")
def text() -> TextService:
    return text_service()


@pytest.fixture
async def cluster(request: pytest.FixtureRequest, text: TextService, tmp_path: Path) -> AsyncIterator[Cluster]:
    cluster = Cluster(text, tmp_path / "spool", orphan_s=getattr(request, "param", ORPHAN_S))
    for _ in range(2):
        await cluster.add_gang()
    yield cluster
    await cluster.close()


def received(events: list[Event]) -> dict[Any, Any]:
    """Text, token ids, log-probabilities and finish reasons of each choice, and the usage."""
    found: dict[Any, Any] = {}
    for event in events:
        if event.data == "[DONE]":
            continue
        chunk = event.chunk
        if not chunk["choices"]:
            found["usage"] = [*found.get("usage", []), chunk["usage"]]
        for choice in chunk["choices"]:
            index, delta = choice["index"], choice.get("delta", {})
            logprobs = choice.get("logprobs") or {}
            for name, value in (
                ("text", choice.get("text", "") + delta.get("content", "")),
                ("roles", [delta["role"]] if "role" in delta else []),
                ("token_ids", choice.get("token_ids", [])),
                ("logprobs", logprobs.get("token_logprobs", []) or []),
                ("content", [one["logprob"] for one in logprobs.get("content", [])]),
                ("reasons", [choice["finish_reason"]] if choice["finish_reason"] else []),
            ):
                found[index, name] = found.get((index, name), type(value)()) + value
    return found


HELLO = [{"role": "user", "content": "hello"}]
USAGE = {"stream_options": {"include_usage": True}}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "hello", "max_tokens": 60, "seed": 5, "logprobs": 0, "return_token_ids": True}),
    ("/v1/completions", {"prompt": ["hello", "fox"], "n": 2, "max_tokens": 50, "seed": 11, "logprobs": 1, **USAGE}),
    ("/v1/completions", {"prompt": "hello", "max_tokens": 90, "seed": 59, "stop": ["lazy d", "zzz"], **USAGE}),
    ("/v1/chat/completions", {"messages": HELLO, "n": 3, "seed": 100, "logprobs": True, "stop": "🎉 o", **USAGE}),
]


async def stream_through_deaths(
    cluster: Cluster, path: str, body: dict[str, Any], rng: random.Random, ends: list[int]
) -> list[Event]:
    """The events of a client whose routers die one after the other, each after this number of bytes."""
    events: list[Event] = []
    router = await cluster.add_router()
    while not events or events[-1].data != "[DONE]":
        last_id = next((event.id for event in reversed(events) if event.id), "")
        num_bytes = ends.pop() if ends else None
        successor = await cluster.add_router() if rng.random() < 0.5 else None  # there before the other dies, or not
        events += events_of(await router.stream(path, body, last_id, num_bytes))
        router = successor or await cluster.add_router()
    return events


@pytest.mark.parametrize("number", range(len(REQUESTS)))
async def test_every_token_once_whenever_routers_die(cluster: Cluster, number: int) -> None:
    path, body = REQUESTS[number]
    rng = random.Random(number)
    undisturbed = events_of(await (await cluster.add_router()).stream(path, body, "", None))
    num_bytes = sum(len(event.data) + len(event.id) for event in undisturbed)
    for _ in range(4):
        ends = [rng.randrange(1, num_bytes // 2) for _ in range(3)]
        events = await stream_through_deaths(cluster, path, body, rng, ends)
        assert received(events) == received(undisturbed)
        assert len({event.chunk["id"] for event in events[:-1]}) == 1
        assert [event.data for event in events].count("[DONE]") == 1
    await eventually(lambda: cluster.num_running == 0)  # sequences that were stopped or abandoned are cancelled


@pytest.mark.parametrize("cluster", [PATIENCE_S], indirect=True)
async def test_what_was_computed_is_not_computed_again(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gang that has the sequence continues with it for another router; other gangs stay idle."""
    monkeypatch.setattr(dispatch, "NEWS_WAIT_S", PATIENCE_S)  # the gang that holds it will say so
    body = {"prompt": "hello", "max_tokens": 70, "seed": 59}
    first, second = await cluster.add_router(), await cluster.add_router()
    events = events_of(await first.stream("/v1/completions", body, "", 1500))
    assert events
    events += events_of(await second.stream("/v1/completions", body, events[-1].id, None))
    assert len(cluster.submitted) == 1
    undisturbed = events_of(await second.stream("/v1/completions", body, "", None))
    assert received(events) == received(undisturbed)


async def test_without_a_seed_any_router_draws_alike(cluster: Cluster) -> None:
    """From the beginning, because no router asked in time for the sequence that the gang had kept."""
    body = {"prompt": "hello", "max_tokens": 70}
    events = events_of(await (await cluster.add_router()).stream("/v1/completions", body, "", 700))
    assert events
    await eventually(lambda: cluster.num_kept == 0)
    router = await cluster.add_router()
    events += events_of(await router.stream("/v1/completions", body, events[-1].id, None))
    seeds = [request.sampling.seed for request in cluster.submitted]
    assert len(seeds) == 2
    assert len(set(seeds)) == 1
    seed = seeds[0]
    undisturbed = events_of(await router.stream("/v1/completions", {**body, "seed": seed}, "", None))
    assert received(events) == received(undisturbed)
    other = events_of(await router.stream("/v1/completions", body, "", None))
    assert other[-1].data == "[DONE]"
    assert len({request.sampling.seed for request in cluster.submitted}) == 2


async def test_an_orphan_that_is_not_resumed_ends(cluster: Cluster) -> None:
    for gang in cluster.gangs:
        gang.engine.paused = True
    router = await cluster.add_router()
    body = {"prompt": "hello", "max_tokens": 70}
    lost = asyncio.create_task(router.stream("/v1/completions", body, "", 10**9))
    await eventually(lambda: cluster.num_running == 1)
    await router.die()
    await lost
    await eventually(lambda: all(gang.server.num_sequences == 0 for gang in cluster.gangs))  # no stream has it
    assert cluster.num_running == 1
    await eventually(lambda: cluster.num_running == 0)


async def test_a_client_that_leaves_leaves_no_orphan(cluster: Cluster) -> None:
    for gang in cluster.gangs:
        gang.engine.paused = True
    router = await cluster.add_router()
    reading = asyncio.create_task(router.stream("/v1/completions", {"prompt": "hello"}, "", None))
    await eventually(lambda: cluster.num_running == 1)
    reading.cancel()
    await asyncio.wait([reading])
    await eventually(lambda: cluster.num_running == 0)
    await router.die()


async def test_a_second_connection_takes_the_stream_over(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client resumes before its router knows that the connection is lost: the first answer ends with an error."""
    monkeypatch.setattr(dispatch, "NEWS_WAIT_S", 0.02)  # no gang will report an orphan in this time
    await cluster.gangs.pop().server.stop()
    router, other = await cluster.add_router(), await cluster.add_router()
    body = {"prompt": "hello", "max_tokens": 70, "seed": 59}
    whole = events_of(await router.stream("/v1/completions", body, "", None))
    engine = cluster.gangs[0].engine
    engine.most_tokens = 20  # the first answer has not ended when the second begins
    got = bytearray()
    first = asyncio.create_task(router.stream("/v1/completions", body, "", None, got))
    await eventually(lambda: len(events_of(bytes(got))) > 0)
    had = events_of(bytes(got))
    second = asyncio.create_task(other.stream("/v1/completions", body, had[-1].id, None))
    *_, last = events_of(await first)
    assert last.chunk["error"]["code"] == "taken_over"
    engine.most_tokens = math.inf
    assert received([*had, *events_of(await second)]) == received(whole)
    assert len(engine.submitted) == 2
