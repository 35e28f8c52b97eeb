"""Adapters and pages of KV are loaded while their sequences wait: the policy alone, and in the scheduler."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from motet.tests.rigs.full_pool import fill_to_the_last_page
from motet.tests.rigs.scheduler_rig import Worker, WorkerExecutor, asking, limits, request, run, scheduler
from motet.tests.rigs.stand_in_engine import INFO
from motet.workers.engine import Engine
from motet.workers.memory.paged_memory import AdapterState
from motet.workers.plan import AdapterLoad, StepPlan
from motet.workers.scheduling.growing_sequence import GrowingSequence
from motet.workers.scheduling.prefetcher import MAX_LOADS_UNDER_WAY, FreeLoads, WaitingNeeds, choose_prefetch
from motet.workers.scheduling.scheduler import Scheduler
from motet.workers.scheduling.tier_traffic import TierSizes
from motet.workers.wire.messages import SequenceUpdate, Submit

# Where an adapter is and its size follow from its digest, as they do when a scheduler asks.
_ADAPTERS = {"a": (True, 5), "b": (True, 2), "c": (True, 1), "d": (False, 3), "e": (False, 0)}
_HOSTED = {"b", "c"}
_WAITING = st.lists(
    st.builds(
        lambda adapter, num_kv: WaitingNeeds(adapter, *_ADAPTERS.get(adapter, (False, 0)), num_kv, adapter in _HOSTED),
        st.sampled_from([None, *_ADAPTERS]),
        st.integers(0, 6),
    ),
    max_size=12,
)
_LOADS = st.builds(FreeLoads, st.integers(0, 4), st.integers(0, 4))


def claims(waiting: list[WaitingNeeds]) -> int:
    """Pages that all of them need to run together."""
    adapters = {needs.adapter: needs.num_adapter_pages for needs in waiting if needs.adapter is not None}
    return sum(adapters.values()) + sum(needs.num_kv_pages for needs in waiting)


@given(_WAITING, st.integers(-3, 40), _LOADS)
def test_what_comes_is_the_oldest_that_there_is_room_for(
    waiting: list[WaitingNeeds], num_pages: int, loads: FreeLoads
) -> None:
    chosen = choose_prefetch(waiting, num_pages, loads)
    fit = [n for n in range(1, len(waiting) + 1) if claims(waiting[:n]) <= num_pages]
    assert chosen.num_with_room == max(fit, default=0)
    reached = waiting[: chosen.num_with_room]
    if chosen.num_with_room < len(waiting):  # the adapter of the next one may fit alone
        following = waiting[chosen.num_with_room]
        if claims([*reached, WaitingNeeds(following.adapter, True, following.num_adapter_pages, 0)]) <= num_pages:
            reached = [*reached, following]
    absent = dict.fromkeys(needs.adapter for needs in reached if needs.is_absent)
    hosted = [digest for digest in absent if digest in _HOSTED][: loads.from_host]
    others = [digest for digest in absent if digest not in _HOSTED][: loads.from_store]
    assert chosen.adapters == tuple(digest for digest in absent if digest in {*hosted, *others})


@given(_WAITING, _WAITING, st.integers(0, 40), _LOADS)
def test_newer_ones_change_nothing_for_older_ones(
    waiting: list[WaitingNeeds], newer: list[WaitingNeeds], num_pages: int, loads: FreeLoads
) -> None:
    alone = choose_prefetch(waiting, num_pages, loads)
    together = choose_prefetch([*waiting, *newer], num_pages, loads)
    assert together.adapters[: len(alone.adapters)] == alone.adapters
    assert together.num_with_room >= alone.num_with_room


@given(_WAITING, st.integers(0, 40), _LOADS)
def test_more_room_never_brings_less(waiting: list[WaitingNeeds], num_pages: int, loads: FreeLoads) -> None:
    less, more = (choose_prefetch(waiting, n, loads) for n in (num_pages, num_pages + 1))
    assert more.adapters[: len(less.adapters)] == less.adapters
    assert more.num_with_room >= less.num_with_room


def step(s: Scheduler, worker: Worker) -> tuple[StepPlan, list[SequenceUpdate]]:
    plan = s.schedule()
    s.check_integrity()
    updates = s.commit(plan, worker.execute(plan))
    s.check_integrity()
    return plan, updates


def loads_of(plan: StepPlan) -> list[str]:
    return [load.residence.digest for load in plan.loads]


def never_ending() -> random.Random:
    """A random generator with which no load and no move ever ends."""
    chance = random.Random(0)
    chance.random = lambda: 1.0  # type: ignore[method-assign]
    return chance


def full(num_pages: int, num_sequences: int, max_tokens: int = 20, budget: int = 64) -> tuple[Scheduler, Worker]:
    """A scheduler whose batch is full, of sequences 0, 1, …; no load has ended until `slow_loads` is None."""
    of = limits(num_pages, budget, num_sequences)
    s, worker = scheduler(of), Worker(of, slow_loads=never_ending())
    fill_to_the_last_page(s)
    for i in range(num_sequences):
        assert s.add(request(i, max_tokens=max_tokens), 0) is None
    step(s, worker)
    return s, worker


def test_an_adapter_is_there_when_a_place_opens() -> None:
    s, worker = full(num_pages=40, num_sequences=2, max_tokens=8)
    worker.slow_loads = None
    s.add(request(10, adapter="a3"), 0)
    plan, _ = step(s, worker)
    assert loads_of(plan) == ["a3"]
    assert len(plan.sequences) == 2
    assert s._adapters.state("a3") is AdapterState.RESIDENT
    while not any(update.finish_reason for update in step(s, worker)[1]):
        pass
    plan, _ = step(s, worker)  # the very next one
    assert [planned.sequence_id for planned in plan.sequences] == [10]


def test_an_adapter_comes_while_no_token_is_left_in_the_budget() -> None:
    of = limits(num_pages=40, budget=4)
    s, worker = scheduler(of), Worker(of)
    s.add(request(0, num_prompt=30), 0)
    s.add(request(1, adapter="a3"), 0)
    plan, _ = step(s, worker)
    assert ([planned.sequence_id for planned in plan.sequences], loads_of(plan)) == ([0], ["a3"])


def test_older_ones_come_first_and_no_more_than_may_be_under_way() -> None:
    s, worker = full(num_pages=200, num_sequences=12)
    digests = [f"{chr(97 + i)}2" for i in range(12)]
    for i, digest in enumerate(digests):
        s.add(request(20 + i, adapter=digest), 0)
    assert loads_of(step(s, worker)[0]) == digests[:MAX_LOADS_UNDER_WAY]
    assert loads_of(step(s, worker)[0]) == []
    worker.slow_loads = None
    assert loads_of(step(s, worker)[0]) == []  # with its result the others have come
    assert loads_of(step(s, worker)[0]) == digests[MAX_LOADS_UNDER_WAY:]


def test_reads_of_a_store_that_hangs_do_not_stop_loads_from_host_memory() -> None:
    s, worker = full(num_pages=200, num_sequences=30)
    hosted = [f"{chr(110 + i)}2" for i in range(MAX_LOADS_UNDER_WAY + 1)]
    s.memory.note_hosted(hosted, (), {})
    hanging = [f"{chr(97 + i)}2" for i in range(MAX_LOADS_UNDER_WAY + 1)]
    for i, digest in enumerate([*hanging, *hosted]):
        s.add(request(30 + i, adapter=digest), 0)
    assert loads_of(step(s, worker)[0]) == [*hanging[:-1], *hosted[:-1]]
    worker.coming = [digest for digest in worker.coming if digest not in hanging]  # they never end
    worker.slow_loads = None
    step(s, worker)
    assert loads_of(step(s, worker)[0]) == hosted[-1:]


def test_the_prefetcher_looks_no_further_ahead_than_a_batch() -> None:
    s, worker = full(num_pages=200, num_sequences=2)
    for i in range(5):
        s.add(request(20 + i, adapter=f"{chr(97 + i)}2"), 0)
    assert loads_of(step(s, worker)[0]) == ["a2", "b2"]
    assert loads_of(step(s, worker)[0]) == []


@pytest.mark.parametrize(("num_free", "comes"), [(7, True), (6, False)])
def test_a_page_is_left_for_each_running_sequence(num_free: int, comes: bool) -> None:
    s, _ = full(num_pages=3 + num_free, num_sequences=3)
    assert s.load().gauges.num_free_pages == num_free
    s.add(request(10, adapter="a4"), 0)
    assert loads_of(s.schedule()) == (["a4"] if comes else [])


def test_who_lacks_room_for_an_adapter_holds_up_all_newer_ones() -> None:
    of = limits(num_pages=12, budget=64)
    s, worker = scheduler(of), Worker(of)
    s.add(request(0, num_prompt=20, max_tokens=10), 0)
    step(s, worker)
    s.add(request(1, adapter="a8"), 0)
    s.add(request(2, adapter="b1"), 0)
    s.add(request(3), 0)
    plan, _ = step(s, worker)
    assert ([planned.sequence_id for planned in plan.sequences], plan.loads) == ([0], ())
    finished = [update.sequence_id for update in run(s, worker) if update.finish_reason]
    assert finished[0] == 0
    assert sorted(finished) == [0, 1, 2, 3]


def test_newer_ones_of_its_tenant_do_not_keep_out_one_that_lacks_its_adapter() -> None:
    """They may run while there is no room for its KV, but not in turns without end."""
    of = limits(num_pages=20, budget=64)
    s, worker = scheduler(of), Worker(of)
    fill_to_the_last_page(s)
    num_added = num_steps = 0
    while 1000 not in s._running.by_id:
        while s.load().gauges.num_waiting < 4:
            s.add(request(num_added, num_prompt=8, max_tokens=2 + num_added % 7), 0)
            num_added += 1
        if num_steps == 5:
            s.add(request(1000, num_prompt=44, adapter="a3"), 0)
        step(s, worker)
        num_steps += 1
        assert num_steps < 60


def test_what_an_older_one_needs_to_run_is_not_taken_for_a_newer_ones_adapter() -> None:
    s, worker = full(num_pages=20, num_sequences=2)
    s.add(request(10, num_prompt=48, adapter="a3"), 0)  # twelve pages, and three: with two running ones 17
    s.add(request(11, adapter="b2"), 0)
    assert loads_of(step(s, worker)[0]) == ["a3"]
    s.cancel(10)
    assert loads_of(step(s, worker)[0]) == ["b2"]


def test_what_is_wanted_soon_goes_after_all_else_that_is_idle() -> None:
    """Even though idle pages that were used often are worth more."""
    of = limits(num_pages=16, budget=64, num_sequences=1)
    s, worker = scheduler(of), Worker(of)
    for _ in range(4):
        s.add(asking(0, [5] * 17, max_tokens=1), 0)
        run(s, worker)
    assert s.load().gauges.num_idle_prefix_pages == 4
    s.add(request(1, num_prompt=2, max_tokens=30), 0)
    step(s, worker)
    s.add(request(2, adapter="a6"), 0)
    while s._running.by_id[1].num_computed < 26:
        step(s, worker)
    load = s.load()
    assert (load.counters.num_adapter_evictions, load.counters.num_adapter_loads) == (0, 1)
    assert load.counters.num_prefix_evictions > 0


def test_a_full_batch_that_grows_does_not_load_again_what_it_pushed_out() -> None:
    s, worker = full(num_pages=24, num_sequences=3, max_tokens=29)
    worker.slow_loads = None
    for i in range(3):
        s.add(request(10 + i, adapter=f"{chr(97 + i)}4"), 0)
    num_loads = []
    while len(s._running.by_id) == 3:
        step(s, worker)
        num_loads.append(s.load().counters.num_adapter_loads)
    assert s.load().counters.num_preemptions == 0
    assert s.load().counters.num_adapter_evictions > 0
    assert max(num_loads) == 3  # each once
    run(s, worker)


@settings(deadline=None, max_examples=100)
@example(seed=4294967295, num_pages=37, num_sequences=3, tiers=TierSizes())  # one is promoted after a load has begun
@given(
    seed=st.integers(0, 2**32),
    num_pages=st.integers(12, 60),
    num_sequences=st.integers(1, 6),
    tiers=st.sampled_from([TierSizes(), TierSizes(60)]),
)
def test_older_ones_first_within_bounds_and_none_again_for_nothing(
    seed: int, num_pages: int, num_sequences: int, tiers: TierSizes
) -> None:
    rng = random.Random(seed)
    of = limits(num_pages, 64, num_sequences)
    s, worker = scheduler(of, tiers), Worker(of, slow_loads=rng)
    if seed % 2 == 0:
        fill_to_the_last_page(s)
    worker.sequence_of = s._running.by_id.__getitem__
    begin = s._prefetcher.begin

    def begin_in_order(waiting: list[GrowingSequence], num_lacking: int, num_running: int) -> Iterator[AdapterLoad]:
        loads = [*begin(waiting, num_lacking, num_running)]
        for load in loads:  # now: later in the step a sequence may be promoted, and its idle adapter may be evicted
            users = (n for n, sequence in enumerate(s._waiting) if sequence.adapter_digest == load.residence.digest)
            for older in s._waiting.first(next(users)):
                assert not s._prefetcher.is_absent(older), "an adapter of an older one is not there"
        return iter(loads)

    s._prefetcher.begin = begin_in_order  # type: ignore[method-assign]
    went_at: dict[str, int] = {}  # digest to the number of events that could make room, when it was pushed out
    num_events = 0
    requested: set[int] = set()
    finished: set[int] = set()
    for i in range(2000):
        if i < 40 and rng.random() < 0.6:
            adapter = rng.choice([None, *(f"{letter}{rng.choice([1, 1, 4])}" for letter in "abcdefghijkl")])
            prompt = [rng.randrange(3)] * rng.randint(1, 20)
            if s.add(asking(i, prompt, rng.randint(1, 20), adapter), 0) is None:
                requested.add(i)
        if i >= 40 and not s.has_work():
            break
        running, num_preemptions = set(s._running.by_id), s.load().counters.num_preemptions
        before = set(s._adapters._entries)
        plan = s.schedule()
        s.check_integrity()
        assert s._adapters.num_loading <= MAX_LOADS_UNDER_WAY
        assert not before.intersection(loads_of(plan)), "pushed out and loaded again at once"
        num_events += not running.issuperset(s._running.by_id)
        went = before.intersection(s.memory._idle._soon) - set(
            s._adapters._entries
        )  # though a waiting sequence needs it
        went_at |= dict.fromkeys(went, num_events)
        # a sequence gives way when all that is idle has gone
        num_events += s.load().counters.num_preemptions > num_preemptions
        for digest in loads_of(plan):
            assert went_at.get(digest, -1) < num_events, "no room was made since it was pushed out"
        result = worker.execute(plan)
        updates = s.commit(plan, result)
        s.check_integrity()
        num_events += bool(result.loaded or result.moved) or any(update.finish_reason for update in updates)
        finished |= {update.sequence_id for update in updates if update.finish_reason}
    assert not s.has_work()
    assert finished == requested


@pytest.mark.parametrize("num_steps", range(1, 5))
def test_who_can_run_does_not_wait_for_an_adapter_that_began_to_come_as_the_batch_ended(num_steps: int) -> None:
    of = limits(num_pages=40, num_sequences=2)
    s, worker = scheduler(of), Worker(of, slow_loads=never_ending())
    engine = Engine(s, WorkerExecutor(worker), INFO)
    for i in range(2):
        engine.receive(Submit(request(i)))
    finished: list[int] = []
    for _ in range(num_steps):
        finished += [update.sequence_id for update in engine.step() if update.finish_reason]
    engine.receive(Submit(request(10)))
    engine.receive(Submit(request(11, adapter="a3")))
    for _ in range(30):
        finished += [update.sequence_id for update in engine.step() if update.finish_reason]
        if engine.waits:
            break
    assert finished == [0, 1, 10]
    assert engine.waits  # steps do nothing until the load ends
    worker.slow_loads = None
    for _ in range(30):
        finished += [update.sequence_id for update in engine.step() if update.finish_reason]
    assert finished[-1] == 11
    assert not engine.has_work()


PROMPT = [*range(1, 31)]  # 30 tokens: seven full pages of four


def reported_before(num_pages: int, num_often: int = 0) -> tuple[Scheduler, Worker]:
    """PROMPT was computed, and its pages are in host memory alone; others, of four pages each, often.

    Now the batch is full, of sequences 10 and 11, and sequence 5, which asks PROMPT again, waits.
    """
    of = limits(num_pages, 64, num_sequences=2)
    s, worker = scheduler(of, TierSizes(host=200)), Worker(of)
    sequences: dict[int, GrowingSequence] = {}
    worker.sequence_of = sequences.__getitem__

    def add(sequence_id: int, prompt: list[int], max_tokens: int) -> None:
        assert s.add(asking(sequence_id, prompt, max_tokens), 0) is None
        sequences[sequence_id] = [*s._waiting][-1]

    add(0, PROMPT, 1)
    run(s, worker)
    assert s.memory.make_room(num_pages, frozenset())
    for i in range(num_often):
        for _ in range(5):
            add(20 + i, [50 + i] * 17, 1)
            run(s, worker)
    for i in (10, 11):
        add(i, [i] * 3, 16)
    step(s, worker)
    add(5, PROMPT, 4)
    return s, worker


def test_pages_of_kv_are_there_when_a_place_opens() -> None:
    s, worker = reported_before(num_pages=30)
    while not any(update.finish_reason for update in step(s, worker)[1]):
        pass
    assert s.load().counters.num_pages_in == 7
    plan, _ = step(s, worker)
    (planned,) = plan.sequences
    assert (planned.sequence_id, planned.start) == (5, 28)


def test_pages_of_kv_do_not_come_into_the_room_that_running_ones_may_need() -> None:
    s, _ = reported_before(num_pages=11)  # the waiting sequence needs eight, and nine are left
    assert not s.schedule().moves
    s, _ = reported_before(num_pages=12)
    assert [len(move.target_pages) for move in s.schedule().moves] == [7]


def test_pages_of_kv_that_were_pushed_out_again_come_only_with_a_place() -> None:
    """There would be room: what was used often is idle, and worth more."""
    s, worker = reported_before(num_pages=18, num_often=2)
    num_evictions = s.load().counters.num_prefix_evictions
    num_pages_in = []
    while len(s._running.by_id) == 2:
        step(s, worker)
        num_pages_in.append(s.load().counters.num_pages_in)
    assert set(num_pages_in) == {7}
    assert s.load().counters.num_prefix_evictions > num_evictions
    assert s.load().counters.num_preemptions == 0
    finished = [update.sequence_id for update in run(s, worker) if update.finish_reason]
    assert finished == [5]


def test_pages_of_kv_of_an_older_one_do_not_go_for_a_newer_ones_adapter() -> None:
    """Even though the other idle pages were used often and are worth more."""
    s, worker = reported_before(num_pages=20, num_often=2)
    step(s, worker)
    assert s.load().counters.num_pages_in == 7
    keys = next(iter(s._waiting)).page_keys
    s.add(request(6, adapter="a4"), 0)
    assert loads_of(step(s, worker)[0]) == ["a4"]
    assert s.load().counters.num_prefix_evictions > 0
    assert len(s.memory.prefixes.find(keys)) == 7


@pytest.mark.parametrize(("num_pages", "enters"), [(9, True), (8, False)])
def test_the_room_of_one_whose_pages_come_is_not_taken_by_a_newer_one(num_pages: int, enters: bool) -> None:
    """Seven of the older sequence's eight pages are being copied, and the newer one needs a page."""
    of = limits(num_pages, 64, num_sequences=4)
    s, worker = scheduler(of, TierSizes(host=200)), Worker(of)
    assert s.add(asking(0, PROMPT, 1), 0) is None
    worker.sequence_of = s._running.by_id.__getitem__
    run(s, worker)
    assert s.memory.make_room(num_pages, frozenset())
    worker.slow_loads = never_ending()
    assert s.add(asking(1, PROMPT, 1), 0) is None
    assert s.add(request(2, num_prompt=3, max_tokens=1), 0) is None
    plan, _ = step(s, worker)
    assert [len(move.target_pages) for move in plan.moves] == [7]
    assert [planned.sequence_id for planned in plan.sequences] == ([2] if enters else [])
    worker.slow_loads = None
    assert 1 in {update.sequence_id for update in run(s, worker) if update.finish_reason}
    assert s.load().counters.num_pages_in == 7


def test_pages_that_others_follow_on_stay_while_those_come() -> None:
    of = limits(12, 64, num_sequences=4)
    s, worker = scheduler(of, TierSizes(host=200)), Worker(of)
    assert s.add(asking(0, PROMPT, 1), 0) is None
    worker.sequence_of = s._running.by_id.__getitem__
    run(s, worker)
    assert s.memory.make_room(12 - 3, frozenset())  # the first three pages are left
    worker.slow_loads = never_ending()
    assert s.add(asking(1, PROMPT, 1), 0) is None
    (move,) = step(s, worker)[0].moves
    assert len(move.target_pages) == 4
    assert not s.memory.make_room(12 - 3 - 4 + 1, frozenset())
    assert s.memory.make_room(12 - 3 - 4, frozenset())
    worker.slow_loads = None
    run(s, worker)
    assert s.load().counters.num_cached_tokens == 28
