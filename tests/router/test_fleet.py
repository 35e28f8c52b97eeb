"""What routers learn of gangs over the data plane, and where their sequences go therefore."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import msgspec
import pytest

from motet.router.fleet.admission import TimeLimit
from motet.router.fleet.dispatch import MAX_STORE_FAILURES, FleetDispatcher
from motet.router.fleet.open_sequence import OpenSequence
from motet.tests.rigs.part_configs import admission_config, leader_config
from motet.tests.rigs.patience import PATIENCE_S
from motet.tests.rigs.patience import eventually_in_loop as eventually
from motet.tests.rigs.stand_in_engine import INFO, StandInEngine, adapter_pages
from motet.workers.leader.frame_server import FrameServer
from motet.workers.wire.messages import AdapterRef, SamplingParams, SequenceRequest

TOKEN = "a secret"
ADAPTERS = [AdapterRef(f"digest-{number}", {"q_proj": 8}) for number in range(24)]


class Gangs:
    """Stand-ins, and the routers that know them."""

    def __init__(self) -> None:
        self.engines: dict[str, StandInEngine] = {}
        self.servers: dict[str, FrameServer] = {}
        self.addresses: dict[str, str] = {}
        self.routers: list[FleetDispatcher] = []

    async def add(self, key: str) -> None:
        self.engines[key] = StandInEngine()
        info = msgspec.structs.replace(INFO, gang_id=f"gang {key}")
        self.servers[key] = FrameServer(self.engines[key], info, TOKEN, leader_config())
        self.addresses[key] = await self.servers[key].start("127.0.0.1")

    async def add_router(self, keys: str = "abc") -> FleetDispatcher:
        """One that is connected to these gangs."""
        router = FleetDispatcher(
            TOKEN, gang_wait_s=PATIENCE_S, adapter_pages=adapter_pages, admission=admission_config()
        )
        self.routers.append(router)
        router.update({key: self.addresses[key] for key in keys})
        await eventually(lambda: len(router.gangs()) == len(keys))
        return router

    def where(self, adapter: AdapterRef | None) -> list[str]:
        """Keys of the gangs that got a sequence with this adapter, once for each."""
        return [
            key
            for key, engine in self.engines.items()
            for request in engine.submitted
            if (request.adapter and request.adapter.digest) == (adapter and adapter.digest)
        ]

    @property
    def num_steps(self) -> int:
        return sum(engine._num_steps for engine in self.engines.values())

    def num_submitted(self) -> int:
        return sum(len(engine.submitted) for engine in self.engines.values())


@pytest.fixture
async def gangs() -> AsyncIterator[Gangs]:
    gangs = Gangs()
    for key in "abc":
        await gangs.add(key)
    yield gangs
    for router in gangs.routers:
        await router.close()
    for server in gangs.servers.values():
        await server.stop()


def submit(
    router: FleetDispatcher,
    adapter: AdapterRef | None,
    max_tokens: int | None = 1,
    limit: TimeLimit | None = None,
) -> OpenSequence:
    return router.submit(
        SequenceRequest(
            prompt_token_ids=[1, 2], sampling=SamplingParams(max_tokens=max_tokens), tenant="acme", adapter=adapter
        ),
        limit=limit,
    )


async def finish(sequence: OpenSequence) -> None:
    async with asyncio.timeout(PATIENCE_S):
        async for _ in sequence:
            pass


async def test_an_adapters_sequences_stay_together_and_adapters_are_spread(gangs: Gangs) -> None:
    router = await gangs.add_router()
    for _ in range(2):
        for adapter in ADAPTERS:
            await finish(submit(router, adapter))
    homes = [gangs.where(adapter) for adapter in ADAPTERS]
    assert all(len(home) == 2 and len(set(home)) == 1 for home in homes)
    assert {home[0] for home in homes} == set("abc")


async def test_a_new_router_receives_what_is_resident(gangs: Gangs) -> None:
    first = await gangs.add_router("b")  # so adapters are where no router that knows all gangs would put them
    for adapter in ADAPTERS:
        await finish(submit(first, adapter))
    second = await gangs.add_router()
    for adapter in ADAPTERS:
        await finish(submit(second, adapter))
    assert all(gangs.where(adapter) == ["b", "b"] for adapter in ADAPTERS)


async def test_an_evicted_adapter_is_no_reason_to_go_there(gangs: Gangs) -> None:
    first = await gangs.add_router("b")
    for adapter in ADAPTERS:
        await finish(submit(first, adapter))
    second = await gangs.add_router()
    for adapter in ADAPTERS:
        gangs.engines["b"].evict(adapter.digest)
    num_steps = second.load().counters.num_steps  # type: ignore[union-attr]
    await finish(submit(first, None))  # causes a step, whose frame reaches the other router too
    await eventually(lambda: second.load().counters.num_steps > num_steps)  # type: ignore[union-attr]
    for adapter in ADAPTERS:
        await finish(submit(second, adapter))
    assert {key for adapter in ADAPTERS for key in gangs.where(adapter)} == set("abc")


async def test_what_this_router_sent_counts_before_the_gang_reports_it(gangs: Gangs) -> None:
    router = await gangs.add_router()
    for engine in gangs.engines.values():
        engine.paused = True
    sequences = [submit(router, None) for _ in range(30)]
    await eventually(lambda: gangs.num_submitted() == 30)
    assert sorted(gangs.where(None)) == ["a"] * 10 + ["b"] * 10 + ["c"] * 10
    sequences += [submit(router, ADAPTERS[0]) for _ in range(2)]
    await eventually(lambda: gangs.num_submitted() == 32)
    assert len(set(gangs.where(ADAPTERS[0]))) == 1
    for sequence in sequences:
        sequence.cancel()


async def test_a_crowded_home_is_left_for_another(gangs: Gangs) -> None:
    router = await gangs.add_router()
    for engine in gangs.engines.values():
        engine.paused = True
    sequences = [submit(router, ADAPTERS[0]) for _ in range(300)]
    await eventually(lambda: gangs.num_submitted() == 300)
    assert set(gangs.where(ADAPTERS[0])) == set("abc")
    for sequence in sequences:
        sequence.cancel()


def ask(router: FleetDispatcher, prompt: list[int], tenant: str = "acme") -> OpenSequence:
    return router.submit(SequenceRequest(prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=1), tenant=tenant))


async def test_who_begins_alike_goes_where_the_beginning_is(gangs: Gangs) -> None:
    first, second = await gangs.add_router(), await gangs.add_router()
    homes = {}
    for number in range(30):
        prompt = [number] * 100
        await finish(ask(first, prompt))
        homes[number] = next(
            key
            for key, engine in gangs.engines.items()
            if engine.submitted and engine.submitted[-1].prompt_token_ids == prompt
        )
    # It has received all changes.
    await eventually(lambda: second.load().counters.num_steps == gangs.num_steps)  # type: ignore[union-attr]
    third = await gangs.add_router()  # learns it from the greetings
    for router in (second, third):
        for number, home in homes.items():
            before = len(gangs.engines[home].submitted)
            await finish(ask(router, [number] * 100 + [1, 2, 3]))
            assert len(gangs.engines[home].submitted) == before + 1
    assert set(homes.values()) == set("abc")


async def test_samples_of_one_prompt_that_come_together_stay_together(gangs: Gangs) -> None:
    router = await gangs.add_router()
    for engine in gangs.engines.values():
        engine.paused = True
    sequences = [ask(router, [7] * 200) for _ in range(8)]
    await eventually(lambda: gangs.num_submitted() == 8)
    assert len(set(gangs.where(None))) == 1
    others = [ask(router, [7] * 200, tenant) for tenant in map(str, range(30))]  # no tenant follows another
    await eventually(lambda: gangs.num_submitted() == 38)
    assert set(gangs.where(None)) == set("abc")
    for sequence in (*sequences, *others):
        sequence.cancel()


async def test_a_stream_whose_adapter_cannot_be_read_goes_on_at_another_gang(
    gangs: Gangs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("motet.router.fleet.fleet.STORE_PAUSE_S", PATIENCE_S)
    router = await gangs.add_router("ab")
    sequence = submit(router, ADAPTERS[0], max_tokens=400)
    async with asyncio.timeout(PATIENCE_S):
        tokens = list((await anext(sequence)).token_ids)
        (first,) = gangs.where(ADAPTERS[0])
        (other,) = {"a", "b"} - {first}
        gangs.engines[first].cannot_read = True
        async for update in sequence:
            assert update.error is None
            tokens += update.token_ids
    assert tokens == [token % INFO.vocab_size for token in range(3, 403)], "each token once"
    assert gangs.where(ADAPTERS[0]) == [key for key in "ab" if key in (first, other)]
    assert router.num_resumed == 1
    for adapter in ADAPTERS[1:]:  # while it is known that the gang cannot read, it is asked to read nothing
        await finish(submit(router, adapter))
        assert gangs.where(adapter) == [other]


async def test_the_only_gang_is_tried_again_and_then_its_answer_is_final(
    gangs: Gangs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("motet.router.fleet.dispatch.STORE_PAUSE_S", 0.05)
    router = await gangs.add_router("a")
    gangs.engines["a"].cannot_read = True
    sequence = submit(router, ADAPTERS[0], max_tokens=3)
    await eventually(lambda: gangs.num_submitted() >= 2)
    gangs.engines["a"].cannot_read = False
    async with asyncio.timeout(PATIENCE_S):
        tokens = [token async for update in sequence for token in update.token_ids]
    assert tokens == [3, 4, 5]
    gangs.engines["a"].cannot_read = True
    num_before = gangs.num_submitted()
    async with asyncio.timeout(PATIENCE_S):
        updates = [update async for update in submit(router, ADAPTERS[1], max_tokens=3)]
    assert [update.error and update.error.kind for update in updates] == ["store_unavailable"]
    assert gangs.num_submitted() - num_before == MAX_STORE_FAILURES
    await finish(submit(router, None))  # the base needs no store
    assert gangs.where(None) == ["a"]


async def test_a_store_that_cannot_be_read_lets_a_bounded_number_wait(
    gangs: Gangs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("motet.router.fleet.dispatch.STORE_PAUSE_S", PATIENCE_S)
    monkeypatch.setattr("motet.router.fleet.dispatch.MAX_AWAITING", 6)
    router = await gangs.add_router("a")
    gangs.engines["a"].cannot_read = True
    waiting = [submit(router, ADAPTERS[0], max_tokens=3) for _ in range(3)]
    await eventually(lambda: len(router._awaiting_store) == 3)
    async with asyncio.timeout(PATIENCE_S):
        updates = [update async for update in submit(router, ADAPTERS[0], max_tokens=3)]
    (error,) = (update.error for update in updates)
    assert error is not None
    assert (error.kind, error.reason) == ("overloaded", "tenant_full")
    assert "3 of your sequences" in error.message
    # What has begun is not refused.
    waiting += [submit(router, ADAPTERS[0], max_tokens=3, limit=TimeLimit(has_begun=True)) for _ in range(4)]
    await eventually(lambda: len(router._awaiting_store) == 7)
    for sequence in waiting:
        sequence.cancel()
    assert len(router._awaiting_store) == router._awaiting_store.num_of("acme") == 0


async def test_all_gangs_hear_which_adapters_no_name_points_to_any_more(gangs: Gangs) -> None:
    router = await gangs.add_router()
    router.outdate("digest-7")
    await eventually(lambda: all(engine.outdated == ["digest-7"] for engine in gangs.engines.values()))


async def test_what_was_brought_to_a_gang_ends_with_it(gangs: Gangs) -> None:
    router = await gangs.add_router()
    request = SequenceRequest(prompt_token_ids=[0], sampling=SamplingParams(max_tokens=None), tenant="acme")
    ((gang, stream),) = router.bring(request, 1, wait_s=PATIENCE_S).items()
    await eventually(lambda: gangs.num_submitted() == 1)
    await gangs.servers[gang.removeprefix("gang ")].stop()
    router.update({key: at for key, at in gangs.addresses.items() if f"gang {key}" != gang})
    async with asyncio.timeout(PATIENCE_S):
        async for update in stream:
            assert gangs.num_submitted() == 1
            last = update
    assert last.error is not None
    assert last.error.kind == "gang_lost"


async def test_what_is_brought_goes_to_different_gangs_and_their_tiers_are_reported(gangs: Gangs) -> None:
    routers = [await gangs.add_router() for _ in range(2)]
    ref = ADAPTERS[0]
    request = SequenceRequest(
        prompt_token_ids=[0], sampling=SamplingParams(max_tokens=1), tenant="acme", adapter=ref, is_background=True
    )
    brought = routers[0].bring(request, 2, wait_s=PATIENCE_S)
    assert len(brought) == 2
    for stream in brought.values():
        assert [update.finish_reason async for update in stream] == ["length"]
    holders = gangs.where(ref)
    assert len({*holders}) == 2
    assert all(engine.submitted[0].wait_s == PATIENCE_S for engine in gangs.engines.values() if engine.submitted)
    brought = routers[0].bring(request, 9, wait_s=PATIENCE_S)
    assert len(brought) == 3  # all that there are
    for stream in brought.values():
        await finish(stream)

    def tiers(tenant: str, router: FleetDispatcher, *known: str) -> list[str]:
        return [*router.residency(tenant, ref.digest, known).values()]

    async def reported(tiers: Callable[[], list[str]], expected: list[str]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while tiers() != expected:
                for stream in routers[0].bring(msgspec.structs.replace(request, adapter=None), 3, PATIENCE_S).values():
                    await finish(stream)  # a gang reports with its steps

    assert tiers("acme", routers[0]) == ["device"] * 3
    assert tiers("zenith", routers[0]) == tiers("acme", routers[1]) == []
    await reported(lambda: tiers("acme", routers[1], "gang a"), ["device"])
    for engine in gangs.engines.values():
        engine.host(ref.digest)
        engine.evict(ref.digest)
    await reported(lambda: tiers("acme", routers[0]), ["host"] * 3)
    await reported(lambda: tiers("acme", routers[1], "gang a", "gang b"), ["host"] * 2)
    assert tiers("zenith", routers[0]) == []
    assert tiers("acme", await gangs.add_router(), "gang a") == ["host"]  # the greeting reports it
    for engine in gangs.engines.values():
        engine.host(ref.digest, is_here=False)
    await reported(lambda: tiers("acme", routers[0]), [])
    assert [len(connection.known_gang._uses) for connection in routers[0]._fleet.connected] == [0] * 3
