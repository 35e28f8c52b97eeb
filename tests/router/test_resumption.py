"""Sequences that outlive their gangs: over real gRPC, through connections that are cut at any byte."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from motet.router.fleet import dispatch, open_sequence
from motet.router.fleet.dispatch import FleetDispatcher, SequenceStream
from motet.router.fleet.open_sequence import OpenSequence
from motet.tests.rigs.part_configs import admission_config, leader_config
from motet.tests.rigs.patience import PATIENCE_S
from motet.tests.rigs.patience import eventually_in_loop as eventually
from motet.tests.rigs.stand_in_engine import INFO, StandInEngine, adapter_pages
from motet.tests.rigs.wire import Wire
from motet.workers.leader.frame_server import FrameServer
from motet.workers.wire.messages import AdapterRef, SamplingParams, SequenceError, SequenceRequest, TokenLogprobs

TOKEN = "a secret"


class Gang:
    def __init__(self, key: str, engine: StandInEngine, server: FrameServer, wire: Wire, address: str) -> None:
        self.key, self.engine, self.server, self.wire, self.address = key, engine, server, wire, address


class Cluster:
    """Gangs, and the directory from which a dispatcher knows them."""

    def __init__(self) -> None:
        self.dispatcher = FleetDispatcher(
            TOKEN, gang_wait_s=PATIENCE_S, adapter_pages=adapter_pages, admission=admission_config()
        )
        self.gangs: list[Gang] = []  # those in the directory
        self.ever: list[Gang] = []

    async def add(self) -> Gang:
        engine = StandInEngine()
        server = FrameServer(engine, INFO, TOKEN, leader_config())
        wire = Wire(await server.start("127.0.0.1"))
        gang = Gang(str(len(self.ever)), engine, server, wire, await wire.start())
        self.ever.append(gang)
        self.gangs.append(gang)
        self._notify()
        return gang

    def remove(self, gang: Gang) -> None:
        self.gangs = [other for other in self.gangs if other is not gang]
        self._notify()

    async def kill(self, gang: Gang) -> None:
        gang.wire.cut()
        self.remove(gang)
        await gang.server.stop()

    async def close(self) -> None:
        await self.dispatcher.close()
        for gang in self.ever:
            gang.wire.cut()
            await gang.server.stop()

    def submit(
        self,
        last_token: int,
        max_tokens: int | None,
        adapter: AdapterRef | None = None,
        key: str = "",
        **sampling: int,
    ) -> OpenSequence:
        params = SamplingParams(max_tokens=max_tokens, num_logprobs=0, **sampling)  # type: ignore[arg-type]
        return self.dispatcher.submit(
            SequenceRequest(prompt_token_ids=[1, last_token], sampling=params, tenant="acme", adapter=adapter, key=key)
        )

    @property
    def all_arrived(self) -> bool:
        """Whether the router has learned that everything it sent has reached the gangs."""
        return all(leader._last_arrived == leader._last_id for leader in self.dispatcher._fleet.connected)

    def _notify(self) -> None:
        self.dispatcher.update({gang.key: gang.address for gang in self.gangs})


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    cluster = Cluster()
    yield cluster
    await cluster.close()


class Reader:
    """Reads a stream to its end and checks that each token comes once, in order, with its own log-probabilities."""

    def __init__(self, stream: SequenceStream, last_token: int, pause_s: float = 0.0) -> None:
        self.stream, self.num_tokens = stream, 0
        self.finish_reason: str | None = None
        self.error: SequenceError | None = None
        self._last_token, self._pause_s = last_token, pause_s
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            async for update in self.stream:
                assert self.finish_reason is None, "an update after the last one"
                assert self.error is None, "an update after an error"
                start = self.num_tokens
                self.num_tokens += len(update.token_ids)
                assert update.token_ids == counted(self._last_token, self.num_tokens)[start:]
                expected = [TokenLogprobs(-float(n), [], []) for n in range(start, self.num_tokens)]
                assert (update.logprobs or []) == expected
                self.finish_reason, self.error = update.finish_reason, update.error
                await asyncio.sleep(self._pause_s)


def counted(last_token: int, num_tokens: int) -> list[int]:
    return [(last_token + 1 + n) % INFO.vocab_size for n in range(num_tokens)]


def begun(cluster: Cluster, last_token: int = 0) -> Reader:
    return Reader(cluster.submit(last_token, None), last_token)


async def drain(cluster: Cluster, gang: Gang) -> None:
    """Drains a gang as Serve does: the directory drops it, then it hands over its unfinished sequences."""
    cluster.remove(gang)
    await gang.server.drain(0.01)
    await gang.server.stop()


async def fail(cluster: Cluster, gang: Gang) -> None:
    """The engine's thread breaks, and Serve replaces the replica later."""
    gang.engine.fails = True
    await eventually(lambda: not gang.engine.alive)
    cluster.remove(gang)


ENDS: dict[str, Callable[[Cluster, Gang], Awaitable[None]]] = {"kill": Cluster.kill, "drain": drain, "fail": fail}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("num_spares", [0, 1])
async def test_a_stream_goes_on_elsewhere(cluster: Cluster, end: str, num_spares: int) -> None:
    first = await cluster.add()
    first.engine.most_tokens = 20  # it has not ended when its gang does
    await eventually(lambda: cluster.dispatcher.gang() is not None)
    ref = AdapterRef("ab" * 32, {"q_proj": 4})
    reader = Reader(cluster.submit(7, 300, ref), 7)
    await eventually(lambda: reader.num_tokens > 5)
    for _ in range(num_spares):
        await cluster.add()
    await ENDS[end](cluster, first)
    if num_spares == 0:
        await eventually(lambda: cluster.dispatcher.gang() is None and cluster.dispatcher.num_waiting == 1)
        assert not reader.task.done()
        await cluster.add()
    await reader.task
    assert (reader.num_tokens, reader.finish_reason, reader.error) == (300, "length", None)
    (requested,), (resumed,) = (gang.engine.submitted for gang in cluster.ever)
    assert requested.generated_token_ids == []
    assert resumed.generated_token_ids == counted(7, len(resumed.generated_token_ids)) != []
    assert resumed.sampling == requested.sampling
    assert resumed.sampling.seed is not None  # drawn by the router, so that both gangs draw alike
    assert resumed.adapter == requested.adapter == ref
    assert resumed.prompt_token_ids == requested.prompt_token_ids == [1, 7]
    faults = {"kill": {"connection"}, "drain": set(), "fail": {"engine"}}
    assert set(cluster.dispatcher.num_gang_faults) == faults[end]


async def test_a_given_seed_is_kept_and_others_differ(cluster: Cluster) -> None:
    gang = await cluster.add()
    for _ in range(3):
        await Reader(cluster.submit(1, 1), 1).task
    await Reader(cluster.submit(1, 1, seed=5), 1).task
    seeds = [request.sampling.seed for request in gang.engine.submitted]
    assert seeds[3] == 5
    assert len(set(seeds)) == 4


async def test_without_a_gang_in_time_there_is_an_error(cluster: Cluster) -> None:
    cluster.dispatcher = FleetDispatcher(
        TOKEN, gang_wait_s=0.1, adapter_pages=adapter_pages, admission=admission_config()
    )
    gang = await cluster.add()
    await eventually(lambda: cluster.dispatcher.gang() is not None)
    reader = begun(cluster)
    await eventually(lambda: reader.num_tokens > 5)
    await cluster.kill(gang)
    await reader.task
    assert reader.error is not None
    assert reader.error.kind == "gang_lost"
    assert "0.1 s" in reader.error.message
    assert reader.num_tokens > 5


async def test_cancelled_while_it_waits(cluster: Cluster) -> None:
    gang = await cluster.add()
    stays, goes = begun(cluster), begun(cluster, 500)
    await eventually(lambda: min(stays.num_tokens, goes.num_tokens) > 0)
    await cluster.kill(gang)
    await eventually(lambda: cluster.dispatcher.gang() is None)
    goes.stream.cancel()
    await goes.task
    successor = await cluster.add()
    await eventually(lambda: len(successor.engine.submitted) > 0)
    assert [request.prompt_token_ids for request in successor.engine.submitted] == [[1, 0]]
    stays.stream.cancel()


async def test_who_has_begun_waits_even_in_a_crowd(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "MAX_AWAITING_GANG", 2)
    gang = await cluster.add()
    await eventually(lambda: cluster.dispatcher.gang() is not None)
    readers = [begun(cluster, 10 * n) for n in range(5)]
    await eventually(lambda: all(reader.num_tokens for reader in readers))
    await cluster.kill(gang)
    await eventually(lambda: cluster.dispatcher.gang() is None)
    await eventually(lambda: cluster.dispatcher.num_waiting == len(readers))
    late = Reader(cluster.submit(0, 1), 0)
    await late.task
    assert late.error is not None
    assert late.error.kind == "overloaded"
    await cluster.add()
    seen = [reader.num_tokens for reader in readers]
    await eventually(lambda: all(reader.num_tokens > n for reader, n in zip(readers, seen, strict=True)))
    for reader in readers:
        reader.stream.cancel()


async def test_what_kills_gangs_does_not_kill_them_all(cluster: Cluster) -> None:
    """A request that kills each gang before its first token is given up; requests that had tokens before survive."""
    gang = await cluster.add()
    innocent = begun(cluster)
    await eventually(lambda: innocent.num_tokens > 0)
    gang.engine.paused = True
    poison = Reader(cluster.submit(500, None), 500)
    await eventually(lambda: gang.engine.num_running == 2 and cluster.all_arrived)
    for num_left in (2, 1):
        await cluster.kill(gang)
        gang = await cluster.add()
        gang.engine.paused = True
        await eventually(lambda gang=gang, n=num_left: gang.engine.num_running == n and cluster.all_arrived)  # type: ignore[misc]
    await poison.task
    assert poison.error is not None
    assert poison.error.kind == "gang_lost"
    assert "2 gangs" in poison.error.message
    num_tokens = innocent.num_tokens
    gang.engine.paused = False
    await eventually(lambda: innocent.num_tokens > num_tokens)
    for _ in range(2):  # it had a token, so its losses count anew
        await cluster.kill(gang)
        gang = await cluster.add()
        gang.engine.paused = True
        await eventually(lambda gang=gang: gang.engine.num_running > 0 and cluster.all_arrived)  # type: ignore[misc]
    assert not innocent.task.done()
    await cluster.kill(gang)
    await innocent.task
    assert innocent.error is not None
    assert "3 gangs" in innocent.error.message


async def kill_as_it_arrives(cluster: Cluster, num_gangs: int) -> Reader:
    """Submits a sequence; each gang that it is sent to dies before it can have received it."""
    gangs = [await cluster.add() for _ in range(num_gangs)]
    await eventually(lambda: len(cluster.dispatcher.gangs()) == num_gangs)
    for gang in gangs:
        gang.wire.is_dumb = True
    reader = Reader(cluster.submit(3, 20), 3)
    for _ in gangs:
        (holder,) = (leader for leader in cluster.dispatcher._fleet.connected if leader.num_sequences)
        await cluster.kill(next(gang for gang in gangs if gang.address == holder.address))
        await eventually(lambda holder=holder: holder.info is None)  # type: ignore[misc]
    assert not any(gang.engine.submitted for gang in gangs)
    return reader


async def test_gangs_that_die_at_once_do_not_blame_a_request(cluster: Cluster) -> None:
    """The request was sent to gangs that were dead already, so it did not kill them."""
    reader = await kill_as_it_arrives(cluster, 4)
    await cluster.add()
    await reader.task
    assert (reader.num_tokens, reader.error) == (20, None)


async def test_what_kills_gangs_before_they_can_report_comes_to_an_end(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "MAX_FAILED_SENDS", 3)
    reader = await kill_as_it_arrives(cluster, 3)
    await reader.task
    assert reader.error is not None
    assert reader.error.kind == "gang_lost"
    assert "3 gangs were lost as this request was sent to them" in reader.error.message


@pytest.mark.parametrize("num_gangs", [1, 3])
async def test_a_broken_connection_costs_nothing_that_has_a_key(
    cluster: Cluster, num_gangs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gang still runs: it continues with the sequences that it has, and no other gang computes them again."""
    monkeypatch.setattr(open_sequence, "RECONNECT_WAIT_S", PATIENCE_S)  # it will be back, on a slow machine later
    gangs = [await cluster.add() for _ in range(num_gangs)]
    await eventually(lambda: len(cluster.dispatcher.gangs()) == num_gangs)
    readers = [Reader(cluster.submit(100 * n, 400, key=f"answer/{n}"), 100 * n) for n in range(6)]
    for _ in range(3):
        seen = [reader.num_tokens for reader in readers]
        await eventually(lambda: all(r.num_tokens > n or r.task.done() for r, n in zip(readers, seen, strict=True)))  # noqa: B023
        for gang in gangs:
            gang.wire.interrupt()
        await eventually(lambda: len(cluster.dispatcher.gangs()) < num_gangs)
        await eventually(lambda: len(cluster.dispatcher.gangs()) == num_gangs)
    for reader in readers:
        await reader.task
        assert (reader.num_tokens, reader.finish_reason, reader.error) == (400, "length", None)
    assert sum(len(gang.engine.submitted) for gang in gangs) == 6
    assert cluster.dispatcher.num_resumed == 0


async def test_a_gang_that_is_gone_is_not_waited_for_long(cluster: Cluster) -> None:
    gang = await cluster.add()
    gang.engine.most_tokens = 20  # it has not ended when its gang does
    reader = Reader(cluster.submit(7, 300, key="answer/0"), 7)
    await eventually(lambda: reader.num_tokens > 5)
    other = await cluster.add()
    await eventually(lambda: len(cluster.dispatcher.gangs()) == 2)
    await cluster.kill(gang)
    await reader.task
    assert (reader.num_tokens, reader.error) == (300, None)
    assert len(other.engine.submitted) == 1
    assert other.engine.submitted[0].generated_token_ids != []


async def test_being_handed_over_is_no_loss(cluster: Cluster) -> None:
    gang = await cluster.add()
    gang.engine.paused = True
    reader = Reader(cluster.submit(3, 20), 3)
    await eventually(lambda: gang.engine.num_running == 1)
    for _ in range(5):
        successor = await cluster.add()
        successor.engine.paused = True
        await drain(cluster, gang)
        gang = successor
        await eventually(lambda gang=gang: gang.engine.num_running == 1)  # type: ignore[misc]
    gang.engine.paused = False
    await reader.task
    assert (reader.num_tokens, reader.error) == (20, None)


async def cut(cluster: Cluster, gang: Gang, rng: random.Random) -> None:
    """The connection breaks within the next frames, in the middle of any of them."""
    gang.wire.num_bytes_left = rng.randrange(1, 2000)
    await asyncio.sleep(0.1)
    await cluster.kill(gang)


@pytest.mark.parametrize("seed", range(10))
async def test_any_ends_at_any_time(cluster: Cluster, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "MAX_LOSSES", 100)  # gangs die faster here than tokens come
    monkeypatch.setattr(dispatch, "MAX_LOSSES_BEFORE_BEGUN", 100)
    rng = random.Random(seed)
    for _ in range(rng.randint(1, 3)):
        await cluster.add()
    requested = [(rng.randrange(INFO.vocab_size), rng.randint(1, 400)) for _ in range(12)]
    readers: list[Reader] = []
    cancelled: list[Reader] = []
    ending: list[asyncio.Task[None]] = []
    for last_token, max_tokens in requested:
        key = rng.choice(["", f"answer/{len(readers)}"])
        sequence = cluster.submit(last_token, max_tokens, key=key)
        readers.append(Reader(sequence, last_token, rng.choice([0.0, 0.01])))
        await asyncio.sleep(rng.random() * 0.02)
        if rng.random() < 0.6 and cluster.gangs:
            gang, end = rng.choice(cluster.gangs), rng.choice([*ENDS, "cut"])
            ended = cut(cluster, gang, rng) if end == "cut" else ENDS[end](cluster, gang)
            ending.append(asyncio.create_task(ended))  # type: ignore[arg-type]
            await asyncio.sleep(rng.random() * 0.05)
            await asyncio.gather(*ending) if rng.random() < 0.8 else None
            await cluster.add()
        if rng.random() < 0.2:
            reader = rng.choice(readers)
            reader.stream.cancel()
            cancelled.append(reader)
    await asyncio.gather(*ending)
    await asyncio.gather(*(reader.task for reader in readers))
    for reader, (last_token, max_tokens) in zip(readers, requested, strict=True):
        if reader not in cancelled:
            assert (reader.num_tokens, reader.finish_reason, reader.error) == (max_tokens, "length", None), last_token
    for gang in cluster.ever:
        for request in gang.engine.submitted:
            so_far = request.generated_token_ids
            assert so_far == counted(request.prompt_token_ids[-1], len(so_far))
    await eventually(lambda: all(gang.engine.num_running == 0 for gang in cluster.gangs))
