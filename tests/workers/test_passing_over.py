"""Sequences start before older ones of their tenant if their prefix is in the pool: what it saves, and its bounds."""

from __future__ import annotations

import random
from collections import Counter

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.benchmarks.scarce.shared_documents import shared_documents
from motet.tests.rigs.scheduler_rig import asking, limits, quick_result, request, scheduler
from motet.tests.workers.test_scheduling_cost import PagesWithCalls, gang, num_calls
from motet.workers.fairness.prompt_budget import PrefixHere, PromptBursts, most_passed_over, to_promote
from motet.workers.fairness.tenant_counters import Scheduling, TenantCounter
from motet.workers.scheduling.growing_sequence import ARRIVAL_STEP, GrowingSequence
from motet.workers.scheduling.scheduler import Scheduler
from motet.workers.scheduling.waiting_queue import WaitingQueue
from motet.workers.window_pages import GangLimits
from motet.workers.wire.page_keys import KeyChain, next_keys


def test_a_prefix_that_the_fewest_share_is_used_first_if_it_saves_half() -> None:
    nothing = PrefixHere(100, 0, None)
    half = [PrefixHere(100, 50, key) for key in (b"a", b"b", b"a")]
    assert to_promote([nothing, *half]) == 2
    assert to_promote([nothing, *half[:2]]) == 1
    assert to_promote([nothing, PrefixHere(100, 49, b"c")]) is None
    assert to_promote([PrefixHere(100, 1, b"c"), *half]) is None
    assert to_promote([nothing]) is None


@settings(deadline=None)
@given(seed=st.integers(0, 2**32), num_tenants=st.integers(1, 3))
def test_no_sequence_is_passed_over_more_often_than_its_bound(seed: int, num_tenants: int) -> None:
    """Nor before one of more priority, nor if it has run before; and no tenant's turn is another's."""
    rng = random.Random(seed)
    queue, here = WaitingQueue(PromptBursts()), dict[GrowingSequence, int]()
    counters = [TenantCounter() for _ in range(num_tenants)]
    num_before, num_passed = dict[GrowingSequence, int](), Counter[GrowingSequence]()
    arrivals = dict[GrowingSequence, int]()
    for _ in range(120):
        for _ in range(rng.choice([0, 1, 3])):
            index = len(arrivals)
            requested = msgspec.structs.replace(request(index), priority=rng.choice([0, 0, 0, 1]))
            arrival = index * ARRIVAL_STEP - (requested.priority << 63)
            sequence = GrowingSequence(requested, arrival, 0, [1] * 100, began_at=rng.choice([None, None, None, 0.0]))
            sequence.counter = rng.choice(counters)
            own = [each for each in queue if each.counter is sequence.counter]
            num_before[sequence] = sum(arrivals[each] < arrival for each in own)
            arrivals[sequence], here[sequence] = arrival, rng.choice([0, 0, 30, 60, 90])
            queue.add(sequence)
        if rng.random() < 0.3 and len(queue):
            here[rng.choice([*queue])] = rng.choice([0, 90])
        turns = [sequence.counter for sequence in queue]
        queue.promote(rng.choice([1, 4]), lambda each: PrefixHere(100, here[each], bytes([each.sequence_id % 5])))
        queue.check_integrity()
        assert [sequence.counter for sequence in queue] == turns
        for sequence in queue.first(rng.choice([0, 1, 2])):
            own = [each for each in queue if each.counter is sequence.counter]
            passed = [each for each in own if arrivals[each] < arrivals[sequence]]
            num_passed.update(passed)
            assert not any(each.request.priority > sequence.request.priority for each in passed)
            queue.remove(sequence)
            assert sequence.arrival == arrivals[sequence], "it takes its place among those that run by its age"
            sequence.counter.value += rng.choice([0, 50])
        if rng.random() < 0.2 and len(queue):
            queue.remove(rng.choice([*queue]))
    for sequence, number in num_passed.items():
        assert number <= (0 if sequence.began_at is not None else most_passed_over(num_before[sequence]))


@pytest.mark.parametrize("num_tenants", [1, 4])
def test_shared_documents_are_mostly_found(num_tenants: int) -> None:
    found = shared_documents(num_tenants=num_tenants, seconds=30)
    assert found.found_part > 0.5  # by age alone 0.2
    assert found.shares < 1.4


@pytest.mark.parametrize(("scheduling", "first"), [("fair", 2), ("fifo", 1)])
def test_only_fair_scheduling_passes_over(scheduling: Scheduling, first: int) -> None:
    s = Scheduler(GangLimits(64, 100, 4, 40, 64, 1), frozenset(), lambda ref: 1, scheduling=scheduling)

    def run() -> list[int]:
        s.commit(plan := s.schedule(), quick_result(plan))
        return [part.sequence_id for part in plan.sequences]

    s.add(asking(0, [*range(2, 22)], max_tokens=2), 0)
    run()
    for number, start in ((3, 40), (1, 60), (2, 2)):
        s.add(asking(number, [*range(start, start + 20)], max_tokens=1), 0)
    assert run() == [0]
    assert run() == [3 if scheduling == "fifo" else first]
    s.check_integrity()


def test_pages_that_waiting_sequences_need_are_evicted_last() -> None:
    s = scheduler(limits(num_pages=14, budget=64, num_sequences=1))
    prompts = [[2 + number] * 20 for number in range(2)]  # five pages each

    def num_kept(prompt: list[int]) -> int:
        return len(s.memory.prefixes.find(next_keys(KeyChain.of(asking(0, prompt), 1).first_link, prompt, 0, 4, 5)))

    for number, prompt in enumerate(prompts):
        s.add(asking(number, prompt, max_tokens=1), 0)
        s.commit(plan := s.schedule(), quick_result(plan))
    s.add(asking(2, [5] * 3, max_tokens=30), 0)
    s.commit(plan := s.schedule(), quick_result(plan))
    s.add(asking(3, [*prompts[0], 7]), 0)
    while s.load().gauges.num_waiting:
        assert num_kept(prompts[0]) == 5
        s.commit(plan := s.schedule(), quick_result(plan))
    assert num_kept(prompts[1]) < 5
    s.check_integrity()


@pytest.mark.parametrize("num_documents", [1, 64])
def test_ten_thousand_that_wait_cost_a_step_no_more_than_a_thousand(num_documents: int) -> None:
    def calls(num_waiting: int) -> int:
        s = gang(16, num_pages=4000, budget=512)
        s.memory.prefixes._pages = PagesWithCalls()
        for number in range(num_waiting):
            document = [2 + number % num_documents] * 1024
            s.add(asking(number, [*document, *[number % 900] * 20], max_tokens=20), 0)
        for _ in range(40):
            s.commit(plan := s.schedule(), quick_result(plan))
        most = 0
        for _ in range(20):
            most = max(most, num_calls(lambda: s.commit(plan := s.schedule(), quick_result(plan))))
        s.check_integrity()
        return most

    assert calls(10_000) < 1.2 * calls(1000) < 60_000
