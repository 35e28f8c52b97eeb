"""How long sequences waited: from the scheduler's clock to the router's histogram."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from motet.router.fleet.open_sequence import OpenSequence
from motet.router.generation.generation import Generation, GenerationRequest, Prompt
from motet.router.metrics import Metrics
from motet.router.text.stop_strings import StopStrings
from motet.router.text.text import TextService
from motet.tests.rigs.engine_dispatcher import EngineDispatcher, client_of
from motet.tests.rigs.engine_rig import Stock
from motet.tests.rigs.full_pool import fill_to_the_last_page
from motet.tests.rigs.oracle import write_model
from motet.tests.rigs.router_rig import BASE, OPERATORS, FakeDispatcher, text_service
from motet.tests.rigs.scheduler_rig import EOS, Worker, limits, request
from motet.workers.scheduling.scheduler import Scheduler
from motet.workers.wire.messages import SamplingParams, SequenceRequest, SequenceUpdate

LONG_AGO_S = 1000.0


@pytest.fixture(scope="module")
def text() -> TextService:
    return text_service()


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_computing_begins_when_a_step_is_planned() -> None:
    """One place: the second sequence waits for the first one's end, and its prompt takes three steps of a second."""
    clock, of = Clock(), limits(num_pages=40, budget=4, num_sequences=1)
    scheduler, worker = Scheduler(of, frozenset({EOS}), lambda _: 1, clock=clock), Worker(of)
    assert scheduler.add(request(1, num_prompt=4, max_tokens=5), seed=1) is None
    assert scheduler.add(request(2, num_prompt=12, max_tokens=2), seed=2) is None
    reported: dict[int, list[float | None]] = {1: [], 2: []}
    while scheduler.has_work():
        plan = scheduler.schedule()
        clock.now += 1.0
        for update in scheduler.commit(plan, worker.execute(plan)):
            reported[update.sequence_id].append(update.computing_s)
    assert reported == {1: [1.0, None, None, None, None], 2: [3.0, None]}


def test_who_gave_way_began_before() -> None:
    clock, of = Clock(), limits(num_pages=6, budget=4, num_sequences=8)
    scheduler, worker = Scheduler(of, frozenset({EOS}), lambda _: 1, clock=clock), Worker(of)
    fill_to_the_last_page(scheduler)
    first_planned: dict[int, float] = {}
    first_reported: dict[int, tuple[float, float | None]] = {}
    scheduler.add(request(1, num_prompt=4, max_tokens=12), seed=1)
    scheduler.add(request(2, num_prompt=16, max_tokens=2), seed=2)
    while scheduler.has_work():
        plan = scheduler.schedule()
        for planned in plan.sequences:
            first_planned.setdefault(planned.sequence_id, clock.now)
        clock.now += 1.0
        for update in scheduler.commit(plan, worker.execute(plan)):
            first_reported.setdefault(update.sequence_id, (clock.now, update.computing_s))
    assert scheduler.load().counters.num_preemptions
    assert {i: now - (computing_s or 0.0) for i, (now, computing_s) in first_reported.items()} == first_planned


async def updated(text: TextService, *updates: SequenceUpdate, num_seen: int = 0) -> Metrics:
    """The metrics of a router that got a request long ago and gets its updates now."""
    metrics, dispatcher = Metrics(), FakeDispatcher(script=lambda _: updates)
    requested = GenerationRequest(
        prompts=[Prompt([1, 2], SamplingParams())],
        n=1,
        tenant="acme",
        adapter=None,
        stop=StopStrings(),
        keep_token_ids=False,
        keep_logprobs=False,
        num_seen=[num_seen] if num_seen else (),
    )
    generation = Generation(requested, dispatcher, text, metrics, time.perf_counter() - LONG_AGO_S)
    async for _ in generation.deltas():
        pass
    return metrics


def count_of(metrics: Metrics) -> float:
    return metrics.queue_wait_s.buckets()[-1][1]


async def test_a_wait_is_what_no_computing_took_of_the_time_to_the_first_token(text: TextService) -> None:
    first, last = SequenceUpdate(1, [5], computing_s=300.0), SequenceUpdate(1, [6], None, "length")
    metrics = await updated(text, first, last)
    assert count_of(metrics) == 1
    assert metrics.first_token_s.sum > LONG_AGO_S
    assert metrics.first_token_s.sum - metrics.queue_wait_s.sum == pytest.approx(300.0)


async def test_what_is_not_a_first_token_or_not_reported_is_not_counted(text: TextService) -> None:
    last = SequenceUpdate(1, [6], None, "length", computing_s=1.0)  # of a gang that went on with it
    once = await updated(text, SequenceUpdate(1, [5], computing_s=0.0), last)
    assert count_of(once) == 1
    assert count_of(await updated(text, SequenceUpdate(1, [5]), last)) == 0
    assert count_of(await updated(text, SequenceUpdate(1, [5], computing_s=1.0), last, num_seen=1)) == 0
    slow_clock = await updated(text, SequenceUpdate(1, [5], None, "length", computing_s=2 * LONG_AGO_S))
    assert (count_of(slow_clock), slow_clock.queue_wait_s.sum) == (1, 0.0)


async def test_updates_that_pile_up_keep_the_first_ones(text: TextService) -> None:
    for reported in ((4.0, None), (None, 4.0), (4.0, 9.0)):
        sequence = OpenSequence(
            SequenceRequest(sequence_id=3, prompt_token_ids=[1], sampling=SamplingParams(), tenant="acme")
        )
        for computing_s in reported:
            sequence.push(SequenceUpdate(3, [5], computing_s=computing_s))
        assert (await anext(sequence)).computing_s == 4.0


async def test_every_choice_of_an_engine_counts_and_beams_too(tmp_path: Path) -> None:
    stock = Stock.make(write_model("llama", tmp_path / "model"), {}, tmp_path / "store")
    body = {"model": BASE, "prompt": list(range(10, 31)), "max_tokens": 3, "ignore_eos": True, "n": 2}
    with stock.engine(num_pages=100) as rig:
        async with client_of(EngineDispatcher(rig), stock) as client:
            for number, fields in enumerate(({}, {"use_beam_search": True}), start=1):
                assert (await client.post("/v1/completions", json=body | fields)).status_code == 200
                page = (await client.get("/metrics", headers=OPERATORS)).text
                assert reported(page, "motet_queue_wait_seconds_count") == 2 * number
                assert (
                    0
                    <= reported(page, "motet_queue_wait_seconds_sum")
                    < reported(page, "motet_first_token_seconds_sum")
                )


def reported(page: str, name: str) -> float:
    return next(float(line.split()[1]) for line in page.splitlines() if line.startswith(f"{name} "))
