"""The scheduler driven by random arrivals, cancels and load times, on pools that are too small."""

from __future__ import annotations

import random
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from motet.tests.rigs.full_pool import fill_to_the_last_page
from motet.tests.rigs.scheduler_rig import (
    FeedingExecutor,
    Worker,
    WorkerExecutor,
    asking,
    limits,
    request,
    run,
    scheduler,
)
from motet.tests.rigs.stand_in_engine import INFO
from motet.workers.engine import Engine
from motet.workers.engine_messages import GiveUpWaiting
from motet.workers.fairness.prompt_budget import PromptBursts
from motet.workers.plan import INT32_BYTES
from motet.workers.scheduling import prefix_reuse
from motet.workers.scheduling.growing_sequence import GrowingSequence, refusal
from motet.workers.scheduling.page_reserve import PageReserve
from motet.workers.scheduling.running_sequences import RunningSequences
from motet.workers.scheduling.tier_traffic import TierSizes
from motet.workers.window_pages import GangLimits
from motet.workers.wire.messages import (
    Cancel,
    ResidencyChange,
    SamplingParams,
    SequenceError,
    SequenceRequest,
    SequenceUsage,
    Submit,
)
from motet.workers.wire.page_keys import is_state, short_key


@settings(deadline=None, max_examples=150)
@given(
    seed=st.integers(0, 2**32),
    num_pages=st.integers(6, 24),
    budget=st.integers(1, 20),
    tiers=st.sampled_from([TierSizes(), TierSizes(3), TierSizes(60), TierSizes(2, 9), TierSizes(6, 60)]),
    way=st.sampled_from(["one by one", "overlapping", "feeding"]),
    window=st.sampled_from([None, None, 1, 3, 4, 9, 17]),
    num_state_pages=st.sampled_from([0, 0, 1, 3]),
)
@example(seed=24, num_pages=20, budget=1, tiers=TierSizes(2, 9), way="one by one", window=3, num_state_pages=0)
@example(seed=6284, num_pages=8, budget=3, tiers=TierSizes(6, 60), way="overlapping", window=None, num_state_pages=0)
def test_random_workload_ends_with_every_page_accounted_for(
    seed: int, num_pages: int, budget: int, tiers: TierSizes, way: str, window: int | None, num_state_pages: int
) -> None:
    """No page that a sequence needs is given to others, and with a window no sequence holds more than that takes."""
    rng = random.Random(seed)
    with patch.object(prefix_reuse, "_ANSWER_PAGES", 1 + seed % 3):  # answers are short
        _run_a_random_workload(rng, seed, num_pages, budget, tiers, way, window, num_state_pages)


def _run_a_random_workload(
    rng: random.Random,
    seed: int,
    num_pages: int,
    budget: int,
    tiers: TierSizes,
    way: str,
    window: int | None,
    num_state_pages: int,
) -> None:
    if num_state_pages:  # no base has them beside windows
        num_pages, window = num_pages + num_state_pages, None
    of = limits(num_pages, budget, window=window, num_state_pages=num_state_pages)
    s, worker = scheduler(of, tiers), Worker(of, slow_loads=rng)
    executor = FeedingExecutor(worker) if way == "feeding" else WorkerExecutor(worker)
    engine = Engine(s, executor, INFO, overlaps=way != "one by one")
    if rng.random() < 0.8:  # else a step takes no time here, so that no copy is worth its own
        s._costs.observe_step = lambda *_: None  # type: ignore[method-assign]
    if seed % 2 == 0:
        fill_to_the_last_page(s)
    failing = rng.choice([0.0, 0.0, 0.1])
    running: dict[int, GrowingSequence] = {}  # all that ever ran: a plan may be about one that was cancelled meanwhile
    worker.sequence_of = lambda sequence_id: running[sequence_id]
    expected: dict[int, int] = {}
    received: dict[int, list[int]] = {}
    finished: set[int] = set()
    failed: set[int] = set()
    cancelled: set[int] = set()  # those whose end was not reported yet
    versions = {"a": "a1", "b": "b2", "c": "y3", "d": "d4"}  # digest by name
    reported: set[str] = set()  # adapters that are there or coming, as a router would know
    reported_pages: set[int] = set()
    for step in range(3000):
        if step < 40 and rng.random() < 0.1:
            name = rng.choice(sorted(versions))
            versions[name] = f"{rng.choice('efxy')}{versions[name][1:]}"
        if step < 40 and rng.random() < 0.6:
            adapter = versions.get(rng.choice("-abcd"))
            num_prompt, max_tokens = rng.randint(1, 30), rng.randint(1, 20)
            prompt = [rng.choice([0, 0, 0, 1])] * num_prompt  # many begin alike
            prompt[rng.randrange(num_prompt)] = rng.choice([0, 1])
            stop, penalty = rng.choice([99, 99, rng.randrange(20)]), rng.choice([0.0, 1.0])
            tenant = rng.choice("tu")
            sampling: dict[str, object] = {"stop_token_ids": (stop,), "presence_penalty": penalty}
            sampling |= {"repetition_penalty": rng.choice([1.0, 1.5])}
            requested = asking(step, prompt, max_tokens, adapter, tenant, **sampling)
            before = list(range(rng.choice([0, 0, rng.randrange(max_tokens)])))
            if s.add(msgspec.structs.replace(requested, generated_token_ids=before), seed=1) is None:
                expected[step] = stop + 1 if len(before) <= stop < max_tokens else max_tokens
                received[step] = before
                if rng.random() < 0.05:
                    worker.broken.add(step)
            s.check_integrity()
        if expected and rng.random() < 0.05:
            gone = rng.choice(sorted(expected))
            engine.receive(Cancel(gone))
            s.check_integrity()
            del expected[gone]
            cancelled |= {gone} - finished - failed
        if expected and rng.random() < 0.05:
            late = rng.choice(sorted(expected))
            engine.receive(GiveUpWaiting(late, SequenceError("overloaded", "it waited")))
            s.check_integrity()
        if step >= 40 and not engine.has_work():
            break
        worker.failing_tiers = {tier for tier in ("host", "disk") if step % 20 < 10 and rng.random() < failing}
        worker.failing_adapters = {digest for digest in worker.coming if rng.random() < 0.05}
        running |= s._running.by_id | {waiting.sequence_id: waiting for waiting in s._waiting}
        for update in engine.step():
            if update.error is not None and update.error.kind == "cancelled":
                assert update.sequence_id in cancelled
                cancelled.remove(update.sequence_id)
                continue
            assert update.sequence_id in expected, "a cancelled sequence spoke"
            assert update.sequence_id not in finished | failed, "a sequence spoke after its end"
            received[update.sequence_id] += update.token_ids
            if update.finish_reason:
                finished.add(update.sequence_id)
            if update.error:
                failed.add(update.sequence_id)
                is_known = update.sequence_id in worker.broken or update.error.kind in ("overloaded", "adapter_failed")
                assert is_known, update.error
        s.check_integrity()
        if rng.random() < 0.3:
            worker.check_residence(s)
        change = s.take_residency_changes()
        reported = (reported - set(change.went)) | set(change.came)
        reported_pages = (reported_pages - set(change.pages_went)) | set(change.pages_came)
        load = s.load()
        kept = {key for key in s.memory.prefixes._pages if not is_state(key)}
        assert reported_pages == {*map(short_key, kept)}, "of states routers need not know"
        assert len(kept) == load.gauges.num_prefix_pages or num_state_pages
        assert len(reported) == load.gauges.num_resident_adapters + load.gauges.num_coming_adapters
        assert {digest for digest in worker.coming if digest not in reported} == set()
        assert load.gauges.num_waiting_for_adapters <= load.gauges.num_waiting
        assert load.gauges.num_queued_tokens >= load.gauges.num_running + load.gauges.num_waiting
    worker.check_residence(s)
    assert not engine.has_work()
    assert not s._uncommitted
    assert s.load().gauges.num_queued_tokens == 0
    assert finished | failed >= set(expected)
    assert not cancelled, "the end of a cancelled sequence was not reported"
    engine.step()  # an idle one, as between two requests
    assert not worker.deltas.tables, "workers keep tables of sequences that have ended"
    for sequence_id, num_tokens in expected.items():
        if sequence_id in failed:
            num_tokens = len(received[sequence_id])
        assert received[sequence_id] == list(range(num_tokens)), "a token twice, missing or out of order"
    load = s.load()
    assert load.gauges.num_free_pages + load.gauges.num_adapter_pages + load.gauges.num_prefix_pages == num_pages
    assert load.gauges.num_idle_adapter_pages == load.gauges.num_adapter_pages
    assert load.gauges.num_idle_prefix_pages == load.gauges.num_prefix_pages


@pytest.mark.parametrize("stop", [0, 2, 5])
def test_no_token_after_the_last_one_is_shown_or_computed(stop: int) -> None:
    """The plan was made before the scheduler knew that the sequence ends."""
    of = limits(num_pages=40, num_sequences=2)
    s, worker = scheduler(of), Worker(of)
    engine = Engine(s, WorkerExecutor(worker), INFO, overlaps=True)
    engine.receive(Submit(request(0, num_prompt=4, max_tokens=20, stop_token_ids=(stop,))))
    engine.receive(Submit(request(1, num_prompt=4, max_tokens=9)))
    reported: dict[int, list[int]] = {0: [], 1: []}
    while engine.has_work():
        for update in engine.step():
            reported[update.sequence_id] += update.token_ids
    assert reported == {0: [*range(stop + 1)], 1: [*range(9)]}
    assert worker.num_computed == s.load().counters.num_computed_tokens == 4 + stop + 4 + 8


@pytest.mark.parametrize("stop", [0, 2, 5])
def test_no_token_after_the_last_one_is_shown_where_they_are_fed(stop: int) -> None:
    """One more is computed, since the next step has begun when it is known that the sequence ends."""
    of = limits(num_pages=40, num_sequences=2)
    s, worker = scheduler(of), Worker(of)
    engine = Engine(s, FeedingExecutor(worker), INFO)
    engine.receive(Submit(request(0, num_prompt=4, max_tokens=20, stop_token_ids=(stop,))))
    engine.receive(Submit(request(1, num_prompt=4, max_tokens=9)))
    reported: dict[int, list[int]] = {0: [], 1: []}
    while engine.has_work():
        for update in engine.step():
            reported[update.sequence_id] += update.token_ids
        s.check_integrity()
    assert reported == {0: [*range(stop + 1)], 1: [*range(9)]}
    assert worker.num_fed == stop + 1 + 8
    assert worker.num_computed == 4 + stop + 1 + 4 + 8


def test_what_was_begun_elsewhere_goes_on_where_it_was() -> None:
    of = limits(num_pages=40, budget=8)
    s, worker = scheduler(of), Worker(of)
    requested = request(0, num_prompt=5, max_tokens=20, repetition_penalty=1.5)
    worker.sequence_of = s._running.by_id.__getitem__  # it checks what a penalty sees
    s.add(msgspec.structs.replace(requested, generated_token_ids=list(range(12))), seed=7)
    chunks = []
    while s.has_work():
        plan = s.schedule()
        (planned,) = plan.sequences
        chunks.append((planned.start, len(planned.token_ids), planned.sample and planned.sample.index))
        if planned.sample is not None:
            assert planned.sample.seed == 7
        for update in s.commit(plan, worker.execute(plan)):
            assert update.finish_reason == ("length" if update.token_ids == [19] else None)
    assert chunks == [(0, 8, None), (8, 8, None), (16, 1, 12), *((16 + n, 1, 12 + n) for n in range(1, 8))]
    assert s.load().counters.num_generated_tokens == 8


def test_a_plan_is_as_long_with_penalties_as_without() -> None:
    """All tokens travel with the first one that a run chooses; afterwards the worker has them."""
    of = GangLimits(4096, 5000, 16, 300, 4096, 4)
    sizes: list[list[int]] = []
    for penalty in (1.0, 1.3):
        s, worker = scheduler(of), Worker(of)
        s.add(request(0, num_prompt=2000, max_tokens=6, repetition_penalty=penalty), 0)
        sizes.append([])
        while s.has_work():
            plan = s.schedule()
            sizes[-1].append(len(msgspec.msgpack.encode(plan)))
            s.commit(plan, worker.execute(plan))
    (without, *later_without), (first, *later) = sizes
    assert first >= without + 2000 * INT32_BYTES
    assert all(size <= other + 30 for size, other in zip(later, later_without, strict=True))


def test_what_was_begun_elsewhere_comes_before_what_waits() -> None:
    of = limits(num_pages=40, num_sequences=1)
    s, worker = scheduler(of), Worker(of)
    for i in range(5):
        s.add(msgspec.structs.replace(request(i), generated_token_ids=[0] if i in (2, 4) else []), 0)
    assert [u.sequence_id for u in run(s, worker) if u.finish_reason] == [2, 4, 0, 1, 3]


def test_who_waits_can_be_forgotten_and_who_runs_cannot() -> None:
    of = limits(num_pages=20, num_sequences=1)
    s, worker = scheduler(of), Worker(of)
    for sequence_id in (1, 2):
        assert s.add(request(sequence_id), seed=0) is None
    plan = s.schedule()
    assert s.cancel_waiting(1) is None
    assert s.cancel_waiting(2) == SequenceUsage()
    assert s.cancel_waiting(2) is None
    updates = s.commit(plan, worker.execute(plan)) + run(s, worker)
    assert {update.sequence_id for update in updates} == {1}


def test_decodes_come_before_prompt_chunks() -> None:
    of = limits(num_pages=40, budget=8)
    s, worker = scheduler(of), Worker(of)
    s.add(request(0, num_prompt=5), 0)
    plan = s.schedule()
    s.commit(plan, worker.execute(plan))
    s.add(request(1, num_prompt=30), 0)
    plan = s.schedule()
    assert [(p.sequence_id, len(p.token_ids)) for p in plan.sequences] == [(0, 1), (1, 7)]


def test_the_newest_gives_way_and_comes_back() -> None:
    of = limits(num_pages=6, budget=64)
    s, worker = scheduler(of), Worker(of)
    for i in range(2):
        s.add(request(i, num_prompt=8, max_tokens=12), 0)
    updates = run(s, worker)
    assert s.load().counters.num_preemptions > 0
    finished = [u.sequence_id for u in updates if u.finish_reason]
    assert finished == [0, 1]


def test_idle_adapters_go_before_anyone_is_preempted() -> None:
    of = limits(num_pages=8, budget=64)
    s, worker = scheduler(of), Worker(of)
    s.add(request(0, adapter="a3"), 0)
    run(s, worker)
    assert s.load().gauges.num_resident_adapters == 1
    assert s.load().counters.num_loaded_pages == 3
    change = s.take_residency_changes()
    assert (change.came, change.went, len(change.pages_came)) == (["a3"], [], 1)
    s.add(request(1, num_prompt=20, max_tokens=12), 0)
    run(s, worker)
    assert s.take_residency_changes().went == ["a3"]
    assert s.take_residency_changes() == ResidencyChange()
    load = s.load()
    assert load.gauges.num_resident_adapters == 0
    assert (load.counters.num_adapter_evictions, load.counters.num_preemptions) == (1, 0)


def test_a_sequence_whose_adapter_comes_is_passed_over() -> None:
    of = limits(num_pages=20)
    s, worker = scheduler(of), Worker(of, slow_loads=random.Random(3))
    worker.slow_loads.random = lambda: 1.0  # type: ignore[union-attr, method-assign]
    s.add(request(0, adapter="a3"), 0)
    s.add(request(1), 0)
    plan = s.schedule()
    assert [p.sequence_id for p in plan.sequences] == [1]
    assert [load.residence.digest for load in plan.loads] == ["a3"]
    assert s.take_residency_changes().came == ["a3"]  # though it is only coming
    load = s.load()
    assert (load.gauges.num_waiting, load.gauges.num_waiting_for_adapters, load.gauges.num_coming_adapters) == (1, 1, 1)
    assert load.gauges.num_queued_tokens == 3 + 3


def test_a_sequence_without_finite_logits_fails_alone() -> None:
    of = limits(num_pages=20)
    s, worker = scheduler(of), Worker(of)
    s.add(request(0, adapter="a3"), 0)
    s.add(request(1), 0)
    updates = []
    while s.has_work():
        plan = s.schedule()
        result = worker.execute(plan)
        result.tokens.update({i: None for i in result.tokens if i == 0})
        updates += s.commit(plan, result)
        s.check_integrity()
    assert [u.error and u.error.kind for u in updates if u.sequence_id == 0] == ["adapter_overflow"]
    assert [u.finish_reason for u in updates if u.sequence_id == 1][-1] == "length"


def test_an_older_waiting_sequence_keeps_its_adapter_while_newer_ones_can_give_way() -> None:
    """It came back from the queue once: its adapter is idle, and newer sequences give way before it goes."""
    of = limits(num_pages=12, budget=64)
    s, worker = scheduler(of), Worker(of)
    s.add(request(0, num_prompt=1, max_tokens=40), 0)
    s.add(request(1, num_prompt=1, max_tokens=8, adapter="a4"), 0)
    for i in range(2, 5):
        s.add(request(i, num_prompt=4, max_tokens=12), 0)
    updates = run(s, worker)
    assert s.load().counters.num_adapter_loads <= 2
    assert sorted(u.sequence_id for u in updates if u.finish_reason) == [0, 1, 2, 3, 4]


def test_base_requests_pass_when_too_many_adapters_are_coming() -> None:
    of = limits(num_pages=40, num_sequences=30)
    s, worker = scheduler(of), Worker(of, slow_loads=random.Random(3))
    worker.slow_loads.random = lambda: 1.0  # type: ignore[union-attr, method-assign]
    for i in range(12):
        s.add(request(i, adapter=f"{chr(97 + i)}1"), 0)
    s.add(request(12), 0)
    plan = s.schedule()
    assert len(plan.loads) == 8
    assert [p.sequence_id for p in plan.sequences] == [12]


def test_a_failed_load_fails_its_sequences_and_no_other() -> None:
    of = limits(num_pages=20)
    s, worker = scheduler(of), Worker(of)
    s.add(request(0, adapter="a3"), 0)
    s.add(request(1, adapter="b3"), 0)
    plan = s.schedule()
    updates = s.commit(plan, worker.execute(plan, failing={"a3"}))
    assert [(u.sequence_id, u.error and u.error.kind) for u in updates] == [(0, "adapter_failed")]
    assert s.take_residency_changes() == ResidencyChange(["b3"], ["a3"])
    s.check_integrity()
    assert {u.sequence_id for u in run(s, worker)} == {1}


@pytest.mark.parametrize(
    ("requested", "part"),
    [
        (request(0, num_prompt=0), "empty"),
        (request(0, num_prompt=60, max_tokens=9), "5 over the context of 64"),
        (request(0, num_prompt=70, max_tokens=None), "7 over the context"),
        (request(0, num_prompt=40, max_tokens=10), "needs 13 pages"),
        (request(0, num_prompt=10, max_tokens=10, adapter="a9"), "9 of them for its adapter"),
        (
            request(0, num_prompt=10, max_tokens=10, adapter="a11"),
            "pool of 12: a shorter prompt, fewer max_tokens or a",
        ),
        (
            request(0, num_prompt=1, max_tokens=1, adapter="a12"),
            "an adapter of lower rank or with fewer token rows or a",
        ),
        (request(0, max_tokens=-1), "at least 0"),
        (msgspec.structs.replace(request(0), weight=0.0), "weight = 0: a positive number"),
        (msgspec.structs.replace(request(0), weight=float("nan")), "weight = nan"),
        (
            SequenceRequest(sequence_id=0, prompt_token_ids=[100], sampling=SamplingParams(), tenant="t"),
            "outside 0..99",
        ),
        (msgspec.structs.replace(request(0), generated_token_ids=[100]), "outside 0..99"),
        (msgspec.structs.replace(request(0, max_tokens=4), generated_token_ids=[1] * 4), "4 were generated before"),
        (
            msgspec.structs.replace(request(0, 3, None), generated_token_ids=[1] * 61),
            "3 prompt tokens and 62 to generate are 1 over the context of 64",
        ),
    ],
)
def test_what_can_never_be_served_is_refused_with_a_reason(requested: SequenceRequest, part: str) -> None:
    error = scheduler(limits(num_pages=12)).add(requested, 0)
    assert error is not None
    assert error.kind == "invalid_request"
    assert part in error.message


@given(st.integers(1, 60), st.integers(1, 60), st.integers(0, 12))
def test_what_is_admitted_fits_alone(num_prompt: int, max_tokens: int, num_adapter_pages: int) -> None:
    of = limits(num_pages=12, budget=64)
    adapter = f"a{num_adapter_pages}" if num_adapter_pages else None
    requested = request(0, num_prompt, max_tokens, adapter)
    if refusal(requested, num_adapter_pages, of) is None:
        s = scheduler(of)
        s.add(requested, 0)
        assert sum(len(u.token_ids) for u in run(s, Worker(of))) == max_tokens
        assert s.load().counters.num_preemptions == 0


def test_without_max_tokens_a_sequence_ends_where_pool_or_context_end() -> None:
    for num_pages, adapter, num_tokens in ((8, None, 33), (8, "a2", 25), (40, None, 64)):
        of = limits(num_pages)
        s = scheduler(of)
        s.add(request(0, 3, None, adapter), 0)
        updates = run(s, Worker(of))
        assert updates[-1].finish_reason == "length"
        assert 3 + sum(len(u.token_ids) for u in updates) == num_tokens


@given(st.lists(st.integers(0, 1000), unique=True, max_size=20), st.integers(0, 1000))
def test_no_older_sequence_ever_gives_way(arrivals: list[int], needy_arrival: int) -> None:
    def made(arrival: int) -> GrowingSequence:
        return GrowingSequence(request(arrival), arrival, 0, [1])

    running = RunningSequences(PageReserve(100, 4), PromptBursts())
    for number, arrival in enumerate(arrivals):
        running.add(
            GrowingSequence(request(number, num_prompt=1), arrival, 0, [1] * (1 + arrival % 2))
        )  # every other one is a prompt
    running.check_integrity()
    victim = running.victim_for(made(needy_arrival))
    newer = [arrival for arrival in arrivals if arrival > needy_arrival]
    assert (None if victim is None else victim.arrival) == max(newer, default=None)
