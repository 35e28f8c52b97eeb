"""Clients that do not read: what comes for them takes bounded memory, linear time, and no gang's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from motet.router.fleet import dispatch, open_sequence
from motet.router.fleet.admission import TimeLimit
from motet.router.fleet.dispatch import FleetDispatcher
from motet.router.fleet.open_sequence import MAX_UNREAD_VALUES, OpenSequence
from motet.router.generation.generation import Generation, GenerationRequest, Prompt
from motet.router.metrics import Metrics
from motet.router.text.stop_strings import StopStrings
from motet.tests.rigs.part_configs import admission_config, leader_config
from motet.tests.rigs.patience import PATIENCE_S
from motet.tests.rigs.patience import eventually_in_loop as eventually
from motet.tests.rigs.router_rig import text_service
from motet.tests.rigs.stand_in_engine import INFO, StandInEngine, adapter_pages
from motet.workers.leader.frame_server import FrameServer
from motet.workers.wire.messages import SamplingParams, SequenceRequest, SequenceUpdate, TokenLogprobs

TOKEN = "a secret"


class Rig:
    def __init__(self) -> None:
        self.engine = StandInEngine()
        self.server = FrameServer(self.engine, INFO, TOKEN, leader_config())
        self.dispatcher = FleetDispatcher(
            TOKEN, gang_wait_s=PATIENCE_S, adapter_pages=adapter_pages, admission=admission_config()
        )

    def submit(
        self,
        last_token: int,
        max_tokens: int | None,
        key: str = "",
        tenant: str = "acme",
        *,
        is_resumed: bool = False,
        limit: TimeLimit | None = None,
    ) -> OpenSequence:
        sampling = SamplingParams(max_tokens=max_tokens, num_logprobs=0)
        request = SequenceRequest(prompt_token_ids=[1, last_token], sampling=sampling, tenant=tenant, key=key)
        return self.dispatcher.submit(request, is_resumed=is_resumed, limit=limit)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    rig.dispatcher.update({"a": await rig.server.start("127.0.0.1")})
    await eventually(lambda: rig.dispatcher.gang() is not None)
    yield rig
    await rig.dispatcher.close()
    await rig.server.stop()


@pytest.mark.parametrize("key", ["", "k"])
async def test_what_is_not_read_is_not_computed(rig: Rig, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    """Its reader comes back to each token once; another one's stream goes on meanwhile."""
    monkeypatch.setattr(open_sequence, "MAX_UNREAD_VALUES", 50)
    quick, num_quick = rig.submit(20, None), 0

    async def read_quickly() -> None:
        nonlocal num_quick
        async for update in quick:
            num_quick += len(update.token_ids)

    reading = asyncio.create_task(read_quickly())
    slow = rig.submit(10, 600, key)
    tokens = (await anext(slow)).token_ids
    rows = [0.0] * len(tokens)
    await eventually(lambda: slow.is_overfull and rig.engine.num_running == 1)  # its place is free
    num_before = num_quick
    await eventually(lambda: num_quick > num_before + 20)
    assert rig.engine.num_running == 1
    last = None
    async with asyncio.timeout(PATIENCE_S):
        async for update in slow:
            tokens += update.token_ids
            rows += [-row.chosen for row in update.logprobs or ()]
            last = update
    assert tokens == [(11 + n) % INFO.vocab_size for n in range(600)]
    assert rows[10:] == list(range(10, 600))
    assert last is not None
    assert last.finish_reason == "length"
    quick.cancel()
    await reading
    await eventually(lambda: rig.engine.num_running == 0)


async def test_one_that_waits_for_its_reader_can_be_cancelled_and_closed(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_sequence, "MAX_UNREAD_VALUES", 20)
    slow = [rig.submit(10, None) for _ in range(2)]
    await eventually(lambda: all(sequence.is_overfull for sequence in slow) and rig.engine.num_running == 0)
    slow[0].cancel()
    assert [update async for update in slow[0]] == []
    await rig.dispatcher.close()
    last = [update async for update in slow[1]][-1]
    assert last.error is not None
    assert last.error.kind == "gang_lost"


async def test_so_many_wait_for_their_readers_and_no_more(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one of the tenant ends, with what has come; another tenant's may still wait."""
    monkeypatch.setattr(open_sequence, "MAX_UNREAD_VALUES", 20)
    monkeypatch.setattr(dispatch, "MAX_AWAITING", 4)
    unread = rig.dispatcher._unread
    slow = [rig.submit(10, None) for _ in range(2)]
    await eventually(lambda: len(unread) == 2)
    refused = rig.submit(10, None)
    await eventually(lambda: refused.closed)
    other = rig.submit(10, None, tenant="zenith")
    await eventually(lambda: len(unread) == 3)
    updates = [update async for update in refused]
    assert updates[-1].error is not None
    assert (updates[-1].error.kind, updates[-1].error.reason) == ("overloaded", "tenant_full")
    assert sum(len(update.token_ids) for update in updates) > 5
    for sequence in (*slow, other):
        sequence.cancel()
    assert len(unread) == unread.num_of("acme") == unread.num_of("zenith") == 0


async def test_so_many_wait_for_news_and_no_more(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "MAX_AWAITING", 4)
    taken_up = [rig.submit(10, 1, f"k{number}", is_resumed=True) for number in range(3)]
    assert len(rig.dispatcher._awaiting_news) == 2
    (update,) = [update async for update in taken_up[2]]
    assert update.error is not None
    assert update.error.kind == "overloaded"
    for sequence in taken_up[:2]:
        async with asyncio.timeout(PATIENCE_S):
            assert [update async for update in sequence][-1].finish_reason == "length"


async def test_all_clients_of_a_router_that_died_may_wait_for_news(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "MAX_AWAITING", 4)
    begun = TimeLimit(has_begun=True)
    taken_up = [rig.submit(10, 1, f"k{number}", is_resumed=True, limit=begun) for number in range(10)]
    assert len(rig.dispatcher._awaiting_news) == 10
    for sequence in taken_up:
        async with asyncio.timeout(PATIENCE_S):
            assert [update async for update in sequence][-1].finish_reason == "length"


def test_unread_tokens_cost_linear_time() -> None:
    def push(num_tokens: int) -> float:
        sampling = SamplingParams(num_logprobs=20)
        sequence = OpenSequence(SequenceRequest(prompt_token_ids=[1], sampling=sampling, tenant="acme"))
        row = TokenLogprobs(-1.0, [*range(20)], [-2.0] * 20)
        began_at = time.process_time()
        for token in range(num_tokens):
            sequence.push(SequenceUpdate(1, [token], [row]))
        return time.process_time() - began_at

    short, long = (min(push(count) for _ in range(3)) for count in (2_000, 16_000))
    assert long < 3 * 8 * short
    assert MAX_UNREAD_VALUES < 1 << 20


async def test_several_choices_are_held_back_as_one_is() -> None:
    """Their updates are not piled up on the way from the streams to the answer."""

    class Counted:
        def __init__(self) -> None:
            self.num_read = 0

        def __aiter__(self) -> Counted:
            return self

        async def __anext__(self) -> SequenceUpdate:
            self.num_read += 1
            return SequenceUpdate(1, [5])

        def cancel(self) -> None:
            pass

    streams: list[Counted] = []

    class Dispatcher:
        def submit(self, request: SequenceRequest, **options: object) -> Counted:
            streams.append(Counted())
            return streams[-1]

    request = GenerationRequest(
        prompts=[Prompt([1], SamplingParams())],
        n=3,
        tenant="acme",
        adapter=None,
        stop=StopStrings(()),
        keep_token_ids=False,
        keep_logprobs=False,
    )
    dispatcher: object = Dispatcher()
    generation = Generation(request, dispatcher, text_service(), Metrics(), time.perf_counter())  # type: ignore[arg-type]
    deltas = generation.deltas()
    await anext(deltas)
    for _ in range(100):  # the client reads nothing
        await asyncio.sleep(0)
    assert sum(stream.num_read for stream in streams) <= 10
    generation.cancel()
    await deltas.aclose()
