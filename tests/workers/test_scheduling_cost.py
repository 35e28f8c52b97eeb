"""What a step costs the scheduler, by how many run, wait and share: counted or compared, since machines differ."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from motet.tests.rigs.scheduler_rig import asking, quick_result
from motet.workers.plan import StepPlan
from motet.workers.scheduling import prefix_reuse
from motet.workers.scheduling.request_limits import GangLimits
from motet.workers.scheduling.scheduler import Scheduler
from motet.workers.scheduling.tier_traffic import TierSizes
from motet.workers.wire import page_keys

_DOCUMENT = [2 + i * 7 % 900 for i in range(8192)]


def gang(num_sequences: int, num_pages: int = 20_000, tiers: TierSizes | None = None, budget: int = 8192) -> Scheduler:
    of = GangLimits(131_072, 1000, 16, num_pages, budget, num_sequences)
    return Scheduler(of, frozenset({1}), lambda ref: 2, tiers=tiers)


def decoding(num_running: int, num_waiting: int = 0, num_places: int = 0) -> Callable[[], None]:
    """A step of so many sequences that decode, planned ahead, while others wait for adapters that never come."""
    s = gang(num_places or num_running, 16 * num_running + 4096)
    for i in range(num_running):
        assert s.add(asking(i, [2 + i % 900] * (5 + i % 16), max_tokens=10_000), 0) is None
    plan = s.schedule()
    while s.load().gauges.num_waiting or any(len(part.token_ids) > 1 for part in plan.sequences):
        s.commit(plan, quick_result(plan))
        plan = s.schedule()
    for i in range(num_waiting):
        s.add(asking(num_running + i, [5] * 20, adapter=f"{'abcdefgh'[i % 8]}{i % 3000}"), 0)

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


def test_a_step_grows_linearly_with_the_sequences_that_decode() -> None:
    few_s, many_s = least_s([decoding(512), decoding(4096)], rounds=20)
    assert many_s <= 8 * 1.5 * few_s  # and as much again where each sequence sums up all before it


@pytest.mark.parametrize("num_places", [512, 600])
def test_who_waits_for_an_adapter_costs_a_step_nothing(num_places: int) -> None:
    alone, beside = decoding(512, 0, num_places), decoding(512, 5000, num_places)
    assert num_calls(beside) <= num_calls(alone) + 4000  # a bounded look ahead, however many wait
    alone_s, beside_s = least_s([alone, beside])
    assert beside_s <= 2 * alone_s


@pytest.mark.parametrize("tiers", [None, TierSizes(host=1000)])
def test_who_shares_a_document_that_is_being_computed_costs_a_step_nothing(tiers: TierSizes | None) -> None:
    s, plans = gang(128, tiers=tiers, budget=512), list[StepPlan]()
    for i in range(127):
        assert s.add(asking(i, [*_DOCUMENT, *[i] * 20], max_tokens=100), 0) is None
    for _ in range(2):  # the first begins to compute, and the others are told that they have to wait
        s.commit(plan := s.schedule(), quick_result(plan))
    for _ in range(8):
        plans.clear()
        assert num_calls(lambda: plans.append(s.schedule())) < 700  # one of them computes, 126 wait
        assert [part.sequence_id for part in plans[0].sequences] == [0]
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
    hashed = 0

    def counting(*given: Any) -> Any:
        nonlocal hashed
        keys = page_keys.next_keys(*given)
        hashed += len(keys)
        return keys

    monkeypatch.setattr(prefix_reuse, "next_keys", counting)
    s = gang(128, budget=512)
    for i in range(20):
        s.add(asking(i, [*_DOCUMENT, *[i] * 20], max_tokens=2), 0)
    while s.has_work():
        plan = s.schedule()
        s.commit(plan, quick_result(plan))
    assert hashed <= 512 + 20 * 3


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
