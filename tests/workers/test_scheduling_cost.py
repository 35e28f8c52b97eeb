"""What a step costs the scheduler, by how many run, wait and share: counted or compared, since machines differ."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.benchmarks.rigs.leader_steps import LeaderSteps, own_prompt
from motet.tests.rigs.full_pool import fill_to_the_last_page
from motet.tests.rigs.scheduler_rig import Worker, asking, limits, quick_result, scheduler
from motet.workers.memory import paged_memory, prefix_cache
from motet.workers.plan import StepPlan
from motet.workers.scheduling import prefix_reuse, prompt_planner
from motet.workers.scheduling.scheduler import Scheduler
from motet.workers.scheduling.tier_traffic import TierSizes
from motet.workers.window_pages import GangLimits
from motet.workers.wire import page_keys
from motet.workers.wire.messages import Cancel
from motet.workers.wire.page_keys import PageKey

_DOCUMENT = [2 + i * 7 % 900 for i in range(8192)]


def gang(
    num_sequences: int,
    num_pages: int = 20_000,
    tiers: TierSizes | None = None,
    budget: int = 8192,
    num_state_pages: int = 0,
) -> Scheduler:
    of = GangLimits(131_072, 1000, 16, num_pages, budget, num_sequences, num_state_pages=num_state_pages)
    return Scheduler(of, frozenset({1}), lambda ref: 2, tiers=tiers)


def decoding(
    num_running: int, num_waiting: int = 0, num_places: int = 0, num_tenants: int = 1, num_state_pages: int = 0
) -> Callable[[], None]:
    """A step of so many sequences that decode, planned ahead, while others wait for adapters that never come.

    `num_tenants`: that those have that wait.
    """
    num_pages = (16 + num_state_pages) * num_running + 4096
    s = gang(num_places or num_running, num_pages, num_state_pages=num_state_pages)
    for i in range(num_running):
        assert s.add(asking(i, [2 + i % 900] * (5 + i % 16), max_tokens=10_000), 0) is None
    plan = s.schedule()
    while s.load().gauges.num_waiting or any(len(part.token_ids) > 1 for part in plan.sequences):
        s.commit(plan, quick_result(plan))
        plan = s.schedule()
    for i in range(num_waiting):
        adapter, tenant = f"{'abcdefgh'[i % 8]}{i % 3000}", f"t{i % num_tenants}"
        s.add(asking(num_running + i, [5] * 20, adapter=adapter, tenant=tenant), 0)

    def step() -> None:
        nonlocal plan
        following = s.schedule()
        result = quick_result(plan)
        following = s.settle(following, result)
        s.commit(plan, result)
        s.load()
        s.take_residency_changes()
        plan = following

    for _ in range(4):
        step()
    return step


def least_s(steps: list[Callable[[], None]], rounds: int = 12) -> list[float]:
    """The least CPU seconds of each: they take turns, so that what else this machine does meets all alike."""
    times: list[list[float]] = [[] for _ in steps]
    for _ in range(rounds):
        for step, seconds in zip(steps, times, strict=True):
            began_at = time.thread_time()
            step()
            seconds.append(time.thread_time() - began_at)
    return [min(seconds) for seconds in times]


def num_calls(action: Callable[[], object]) -> int:
    """Functions and C functions that it calls."""
    number = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal number
        number += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        action()
    finally:
        sys.setprofile(None)
    return number


class PagesWithCalls(dict[PageKey, int]):
    """Pages by key, where each look-up is a call that `num_calls` counts."""

    num_gets = 0

    def get(self, key: PageKey, default: int | None = None) -> int | None:  # type: ignore[override]
        self.num_gets += 1
        return super().get(key, default)


def test_a_step_grows_linearly_with_the_sequences_that_decode() -> None:
    few_s, many_s = least_s([decoding(512), decoding(4096)], rounds=20)
    assert many_s <= 8 * 1.5 * few_s  # and as much again where each sequence sums up all before it


def test_a_decode_with_a_recurrent_state_costs_as_many_calls_as_one_without() -> None:
    without, with_states = (num_calls(decoding(512, num_state_pages=number)) for number in (0, 20))
    assert with_states <= without + 512 + 400  # and one that asks where the state is


@pytest.mark.parametrize(("num_places", "num_tenants"), [(512, 1), (600, 1), (600, 40)])
def test_who_waits_for_an_adapter_costs_a_step_nothing(num_places: int, num_tenants: int) -> None:
    alone, beside = decoding(512, 0, num_places), decoding(512, 5000, num_places, num_tenants)
    assert num_calls(beside) <= num_calls(alone) + 4000  # a bounded look ahead, however many wait
    alone_s, beside_s = least_s([alone, beside])
    assert beside_s <= 2 * alone_s


@pytest.mark.parametrize("num_places", [128, 2])
@pytest.mark.parametrize("tiers", [None, TierSizes(host=10_000)])
def test_who_shares_a_document_that_is_being_computed_costs_a_step_nothing(
    tiers: TierSizes | None, num_places: int
) -> None:
    """Its pages are copied to the tier as they are filled; with 2 places the gang is full."""
    s, plans = gang(num_places, tiers=tiers, budget=512), list[StepPlan]()
    s.memory.prefixes._pages = PagesWithCalls()
    s.add(asking(200, [5] * 20, max_tokens=100), 0)
    for i in range(127):
        assert s.add(asking(i, [*_DOCUMENT, *[i] * 20], max_tokens=100), 0) is None
    for _ in range(4):  # the first begins to compute, and the others find that they have to wait
        s.commit(plan := s.schedule(), quick_result(plan))
    for _ in range(8):
        plans.clear()
        assert num_calls(lambda: plans.append(s.schedule())) < 1800  # one of them computes, 126 wait
        assert sorted(part.sequence_id for part in plans[0].sequences) == [0, 200]
        s.observe(plans[0], 0.1)
        s.commit(plans[0], quick_result(plans[0]))
        s.check_integrity()
    assert s.load().gauges.num_waiting == 126


def test_who_runs_on_a_long_document_costs_no_more_than_on_a_short_one() -> None:
    def sharing(document: list[int]) -> Callable[[], None]:
        s = gang(64, budget=2048)
        for i in range(64):
            assert s.add(asking(i, [*document, *[i] * 20], max_tokens=1000), 0) is None
        while s.load().gauges.num_waiting or s.load().gauges.num_queued_tokens > 64:
            plan = s.schedule()
            s.commit(plan, quick_result(plan))

        def step() -> None:
            plan = s.schedule()
            s.commit(plan, quick_result(plan))

        return step

    short_s, long_s = least_s([sharing(_DOCUMENT[:16]), sharing(_DOCUMENT)])
    assert long_s <= 2 * short_s


def test_keys_of_a_document_are_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed, next_keys = 0, page_keys.next_keys

    def counting(*given: Any) -> Any:
        nonlocal hashed
        keys = next_keys(*given)
        hashed += len(keys)
        return keys

    monkeypatch.setattr(page_keys, "next_keys", counting)
    s = gang(128, budget=512)
    for i in range(20):
        s.add(asking(i, [*_DOCUMENT, *[i] * 20], max_tokens=2), 0)
    while s.has_work():
        plan = s.schedule()
        s.commit(plan, quick_result(plan))
    assert hashed <= 512 + 20 * 3


def test_keys_of_a_document_are_made_for_one_of_those_that_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """They arrive while another one decodes, so keys are made in several steps."""
    monkeypatch.setattr(prefix_reuse, "MOST_KEYS", 64)
    monkeypatch.setattr(prefix_reuse, "_KEYS_OF_A_COPY", 8)
    s = gang(128)
    s.add(asking(500, [5] * 20, max_tokens=1000), 0)
    s.commit(plan := s.schedule(), quick_result(plan))
    for i in range(32):
        s.add(asking(i, [*_DOCUMENT, *[i] * 20], max_tokens=200), 0)
    num_steps = 0
    while s.load().gauges.num_running < 33:
        s.commit(plan := s.schedule(), quick_result(plan))
        num_steps += 1
    assert num_steps < 30  # 256 if all made their own
    s.check_integrity()


def test_growing_beside_many_that_wait_costs_nothing_while_pages_are_free() -> None:
    """Newer sequences run past older ones that wait for adapters, and need more and more pages."""
    s = gang(400)
    for i in range(3000):
        s.add(asking(i, [5] * 20, adapter=f"a{i % 8}"), 0)
    for i in range(300):
        s.add(asking(5000 + i, [2 + i] * 16, max_tokens=500), 0)
    s.commit(plan := s.schedule(), quick_result(plan))
    while s.load().gauges.num_running < 300:
        s.commit(plan := s.schedule(), quick_result(plan))
    most = max(num_calls(lambda: s.commit(plan := s.schedule(), quick_result(plan))) for _ in range(17))
    assert most < 300 * 60


def long_prompt(first: int, num_pages: int) -> list[int]:
    return [first, *8 * _DOCUMENT][: 16 * num_pages]


def test_the_end_of_long_sequences_is_spread_over_steps_and_pages_serve_at_once() -> None:
    s = gang(64, num_pages=18_000, budget=40_000)  # of which some are kept back
    s.add(asking(0, [5] * 20, max_tokens=1000), 0)
    for i in range(1, 9):
        s.add(asking(i, long_prompt(i, 2000), max_tokens=1000), 0)
    while s.load().gauges.num_queued_tokens > 9 or s.load().gauges.num_waiting:
        s.commit(plan := s.schedule(), quick_result(plan))
    s.memory.prefixes._pages = PagesWithCalls(s.memory.prefixes._pages)
    assert num_calls(lambda: [s.cancel(i) for i in range(1, 9)]) < 20 * prefix_cache.MOST_GIVEN_BACK
    s.check_integrity()
    assert s.memory.num_pages_to_take < 8000  # of 16,000
    s.add(asking(20, long_prompt(20, 4000), max_tokens=4), 0)  # it needs some of them, and has them after a few steps
    num_steps = 0
    while s.load().gauges.num_running < 2:
        assert (
            num_calls(lambda: s.commit(plan := s.schedule(), quick_result(plan))) < 80_000
        )  # the last fills 2,500 pages
        s.check_integrity()
        num_steps += 1
    assert 3 < num_steps < 50
    assert s.load().counters.num_preemptions == 0
    while s.is_clearing:
        s.commit(plan := s.schedule(), quick_result(plan))
    s.check_integrity()


def test_a_long_prompt_arrives_and_starts_in_a_full_pool_little_by_little() -> None:
    s = gang(64, num_pages=6000, budget=512)
    for i in range(10):  # pages that are kept for no sequence
        s.add(asking(i, long_prompt(i, 590), max_tokens=1), 0)
        while s.has_work():
            s.commit(plan := s.schedule(), quick_result(plan))
    s.add(asking(20, [5] * 20, max_tokens=1000), 0)
    s.commit(plan := s.schedule(), quick_result(plan))
    assert num_calls(lambda: s.add(asking(21, long_prompt(21, 5000), max_tokens=4), 0)) < 5 * prefix_reuse.MOST_KEYS
    num_steps = 0
    while s.load().gauges.num_running < 2:
        assert num_calls(lambda: s.commit(plan := s.schedule(), quick_result(plan))) < 20_000
        s.check_integrity()
        num_steps += 1
    assert num_steps >= 5000 // prefix_reuse.MOST_KEYS
    assert s.load().counters.num_preemptions == 0


def test_many_that_share_a_long_document_start_little_by_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """The document has 512 pages, which are in the pool: all could start in one step."""
    monkeypatch.setattr(prompt_planner, "_MOST_FOUND", 1024)
    s = gang(128)
    s.add(asking(500, _DOCUMENT, max_tokens=1), 0)
    while s.has_work():
        s.commit(plan := s.schedule(), quick_result(plan))
    s.add(asking(501, [5] * 20, max_tokens=1000), 0)
    s.commit(plan := s.schedule(), quick_result(plan))
    for i in range(100):
        s.add(asking(i, [*_DOCUMENT, *[i] * 20], max_tokens=200), 0)
    s.memory.prefixes._pages = PagesWithCalls(s.memory.prefixes._pages)
    num_steps = 0
    while s.load().gauges.num_running < 101:
        assert num_calls(lambda: s.commit(plan := s.schedule(), quick_result(plan))) < 60 * 1024  # a million for all
        s.check_integrity()
        num_steps += 1
    assert 100 * 512 // 1024 - 5 < num_steps < 60


def test_a_document_that_a_crowd_waits_for_is_looked_up_once() -> None:
    """Eight sequences of a tenant that is behind take the places of another one's; then one more may start."""
    s = gang(16, budget=600)
    s.memory.prefixes._pages = pages = PagesWithCalls()

    def step() -> StepPlan:
        s.commit(plan := s.schedule(), quick_result(plan))
        return plan

    def ask(first: int, stop: int, tenant: str, document: list[int]) -> None:
        for i in range(first, stop):
            assert s.add(asking(i, [*document, *[i] * 20], max_tokens=1000, tenant=tenant), 0) is None

    ask(0, 1, "behind", _DOCUMENT)
    ask(1, 16, "ahead", [])
    while s.load().gauges.num_waiting or s.load().gauges.num_queued_tokens > 16:
        step()
    s.counters.charge(s._running.by_id[1].counter, 1e6)
    ask(20, 28, "behind", _DOCUMENT)
    pages.num_gets = 0
    assert s._admission.preempt_for_waiting(s._preempt) == 8
    assert pages.num_gets < 600
    while s.load().gauges.num_waiting > 8:
        step()
    s.cancel(15)
    ask(30, 31, "behind", [7] * 2000)  # its prompt is computed while the next one arrives
    while 30 not in s._running.by_id:
        step()
    s.cancel(14)
    ask(31, 32, "behind", _DOCUMENT)
    pages.num_gets = 0
    assert 30 in {part.sequence_id for part in step().sequences}
    assert pages.num_gets < 2300  # when it arrives and starts, and not once more to see whether there is room


def test_a_sequence_awaits_the_last_page_of_a_prompt_that_is_being_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the next one, with which it would look its prefix up in each step. No sequence holds the first pages."""
    s = scheduler(limits(num_pages=40, budget=8, window=8))
    s.add(asking(0, [*range(60)], max_tokens=1), 0)
    for _ in range(3):
        s.commit(plan := s.schedule(), quick_result(plan))
    s.add(asking(1, [*range(60)], max_tokens=1), 0)
    num_looked_up, find = 0, s._prefixes.find

    def counting(*given: Any) -> Any:
        nonlocal num_looked_up
        num_looked_up += 1
        return find(*given)

    monkeypatch.setattr(s._prefixes, "find", counting)
    while 0 in s._running.by_id:
        assert 1 not in s._running.by_id
        s.commit(plan := s.schedule(), quick_result(plan))
    assert num_looked_up == 3  # when it arrives, and twice as it starts
    s.check_integrity()


def test_long_prompts_take_few_look_ups_where_layers_have_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of their pages is in the pool, and any of them could begin the window that is."""
    monkeypatch.setattr(prefix_reuse, "MOST_KEYS", 100_000)  # all are made when they arrive
    s = Scheduler(GangLimits(131_072, 1000, 16, 20_000, 512, 64, window=4096), frozenset({1}), lambda ref: 2)
    s.memory.prefixes._pages = PagesWithCalls()
    for i in range(16):
        s.add(asking(i, long_prompt(i, 2000), max_tokens=4), 0)
    assert num_calls(s.schedule) < 16 * 2000  # and ten times as many if each page were looked up


@pytest.mark.parametrize("has_bursts", [False, True])
def test_tenants_whose_prompts_burst_in_cost_a_step_nothing(has_bursts: bool) -> None:
    """Each of so many decodes, and has others waiting."""

    def beside(num_tenants: int) -> Callable[[], None]:
        of = GangLimits(4096, 1000, 16, 20_000, 8192, num_tenants)
        s = Scheduler(of, frozenset({1}), lambda ref: 2, token_interval_s=0.05)
        for i in range(num_tenants * (4 if has_bursts else 1)):
            s.add(asking(i, [2 + i % 900] * 8, max_tokens=1000, tenant=f"t{i % num_tenants}"), 0)
        while s.load().gauges.num_running < num_tenants:
            s.commit(plan := s.schedule(), quick_result(plan))

        def budget() -> None:
            s._prompt_budget(num_tenants)

        return budget

    assert num_calls(beside(1000)) <= num_calls(beside(10))


def test_pages_of_ended_sequences_are_released_as_fast_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """In each step 8 sequences end that share a document of 64 pages: more than may be released in a step at least."""
    monkeypatch.setattr(prefix_cache, "MOST_GIVEN_BACK", 32)
    s, num_added = gang(16), 0
    for _ in range(300):
        while s.load().gauges.num_waiting < 16:
            s.add(asking(num_added, [*_DOCUMENT[:1024], 5 + num_added % 900, 7], max_tokens=2), 0)
            num_added += 1
        s.commit(plan := s.schedule(), quick_result(plan))
    assert num_added > 2000
    assert s.memory.prefixes.num_leaving < 64 * 8 * 64
    s.check_integrity()


class Crowd:
    """60 sequences that run on a document of 512 pages, which with theirs nearly fills the pool."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(prefix_cache, "MOST_GIVEN_BACK", 32)
        monkeypatch.setattr(prefix_cache, "_MOST_FOR_ROOM", 64)
        self.scheduler = s = gang(64, num_pages=1000, budget=2048)
        for i in range(60):
            s.add(asking(i, [*_DOCUMENT, *[i] * 20], max_tokens=1000), 0)
        while s.load().gauges.num_waiting or s.load().gauges.num_queued_tokens > 60:
            s.commit(plan := s.schedule(), quick_result(plan))
        self.num_released = self.most_released = 0  # pages, in a step
        self._release = s.memory.allocator.release
        monkeypatch.setattr(s.memory.allocator, "release", self.release)

    def release(self, pages: Sequence[int]) -> None:
        self.num_released += len(pages)
        self._release(pages)

    def step(self) -> None:
        self.num_released = 0
        self.scheduler.commit(plan := self.scheduler.schedule(), quick_result(plan))
        self.most_released = max(self.most_released, self.num_released)
        self.scheduler.check_integrity()


def test_pages_that_others_hold_are_not_all_released_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant that is behind preempts sequences that share a document, of which none becomes room."""
    crowd = Crowd(monkeypatch)
    s = crowd.scheduler
    for i in range(4):
        s.add(asking(100 + i, long_prompt(i, 120), max_tokens=4, tenant="quiet"), 0)
    while s.load().gauges.num_waiting > s.load().counters.num_preemptions:
        crowd.step()
    assert s.load().counters.num_fair_preemptions >= 8
    assert crowd.most_released < 1500  # with all that eight sequences hold more than 4,096


def test_pages_that_only_ended_sequences_share_become_room_little_by_little(monkeypatch: pytest.MonkeyPatch) -> None:
    crowd = Crowd(monkeypatch)
    s = crowd.scheduler
    for i in range(60):
        s.cancel(i)
    s.add(asking(200, long_prompt(200, 20), max_tokens=1000), 0)
    s.add(asking(201, long_prompt(201, 900), max_tokens=4, tenant="quiet"), 0)
    num_steps = 0
    while 201 not in s._running.by_id:
        crowd.step()
        num_steps += 1
        assert num_steps < 200
    assert crowd.most_released < 3000  # of 30,720


def test_pages_of_ended_sequences_serve_at_once_where_running_ones_need_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_cache, "MOST_GIVEN_BACK", 1)
    monkeypatch.setattr(prefix_cache, "_CLEARING_STEPS", 1 << 20)
    s = gang(65, num_pages=1100, budget=20_000)
    fill_to_the_last_page(s)
    for i in range(65):
        s.add(asking(i, long_prompt(i, 1000 if i == 64 else 1)[:-1], max_tokens=1000), 0)
    while s.load().gauges.num_waiting or s.load().gauges.num_queued_tokens > 65:
        s.commit(plan := s.schedule(), quick_result(plan))
    s.cancel(64)
    for _ in range(64):  # in which those that run need 256 pages, of which 36 are free
        s.commit(plan := s.schedule(), quick_result(plan))
    assert s.memory.prefixes.num_leaving > 500
    assert s.load().counters.num_preemptions == 0
    s.check_integrity()


def test_an_engine_does_not_sleep_while_pages_are_to_be_released() -> None:
    steps = LeaderSteps(3000, 4)
    steps.submit(own_prompt(1, 16 * 2000))
    steps.step_until(lambda: steps.engine.load().gauges.num_queued_tokens == 1)
    steps.engine.receive(Cancel(1))
    num_steps = 0
    while steps.engine.has_work():
        steps.step()
        assert not (steps.engine.waits and steps.engine.has_work()), "it would sleep until something arrives"
        num_steps += 1
    assert num_steps >= 2000 // prefix_cache.MOST_GIVEN_BACK
    steps.engine.check_integrity()


@pytest.fixture
def stateless() -> Scheduler:
    """Of its document it has all pages and no recurrent state, for which 40 sequences look at one time."""
    s = gang(64, num_state_pages=3)
    s.add(asking(0, _DOCUMENT, max_tokens=1), 0)
    while s.has_work():
        plan = s.schedule()
        s.commit(plan, quick_result(plan))
    s.memory.prefixes.forget([*filter(page_keys.is_state, s.memory.prefixes._pages)])
    assert s.memory.prefixes.num_pages == len(_DOCUMENT) // 16
    for i in range(40):
        s.add(asking(1 + i, [*_DOCUMENT, 2 + i], max_tokens=9), 0)
    return s


def test_states_that_waiting_sequences_would_want_are_looked_for_in_a_bounded_number_of_keys(
    stateless: Scheduler,
) -> None:
    prefixes, waiting = stateless._prefixes, [*stateless._waiting]
    prefixes.bound_keys(False)
    assert all(prefixes.make_keys(sequence) for sequence in waiting)
    max_pages = 600  # more than they have in common
    assert num_calls(lambda: prefixes.pages_here(waiting, max_pages)) < 8 * max_pages + 100 * len(waiting)


def test_states_are_looked_for_at_most_for_a_few_sequences_in_a_step(
    stateless: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_planner, "_MOST_FOUND", 1000)
    with_states, num_looked = stateless._prefixes._with_state, 0

    def counted(keys: Sequence[PageKey]) -> prefix_reuse.FoundPrefix:
        nonlocal num_looked
        num_looked += 1
        return with_states(keys)

    monkeypatch.setattr(stateless._prefixes, "_with_state", counted)
    stateless.schedule()
    assert 0 < num_looked <= 1000 // (len(_DOCUMENT) // 16) + 3


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**32), bound=st.integers(1, 3), has_tier=st.booleans())
def test_work_that_is_spread_over_steps_leaks_nothing_and_ends(seed: int, bound: int, has_tier: bool) -> None:
    """Random sequences of several tenants, cancelled at times, with so small bounds that all is spread."""
    rng, of = random.Random(seed), limits(rig_pages := 30, 16, 4)
    s, worker = scheduler(of, TierSizes(host=rig_pages) if has_tier else None), Worker(of)
    worker.sequence_of = s._running.by_id.__getitem__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_cache, "MOST_GIVEN_BACK", bound)
        patch.setattr(paged_memory, "MOST_EVICTED", bound)
        patch.setattr(prefix_reuse, "MOST_KEYS", bound)
        ended: set[int] = set()
        requested: set[int] = set()
        for i in range(600):
            if i < 60 and rng.random() < 0.6:
                prompt = [rng.randrange(2)] * rng.randint(1, 50)
                adapter, tenant = rng.choice([None, "a1", "b3"]), rng.choice("tu")
                if s.add(asking(i, prompt, rng.randint(1, 12), adapter, tenant), 0) is None:
                    requested.add(i)
            if requested and rng.random() < 0.1 and s.cancel(chosen := rng.choice([*requested])) is not None:
                ended.add(chosen)
            if i >= 60 and not s.has_work():
                break
            plan = s.schedule()
            s.check_integrity()
            ended |= {update.sequence_id for update in s.commit(plan, worker.execute(plan)) if update.finish_reason}
            s.check_integrity()
        assert ended == requested
        assert not s.is_clearing
