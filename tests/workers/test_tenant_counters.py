"""Virtual token counters of tenants, and the order that they make."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.tests.rigs.scheduler_rig import asking, limits, quick_result, scheduler
from motet.tests.workers.test_scheduling_cost import num_calls
from motet.workers.fairness import tenant_counters
from motet.workers.fairness.tenant_counters import MinQueue, TenantCounters


@given(seed=st.integers(0, 2**32))
def test_the_least_come_first_though_all_grow(seed: int) -> None:
    """Against sorting."""
    rng = random.Random(seed)
    counters: dict[str, float] = {}
    queue = MinQueue[str](lambda item: (False, counters[item], ord(item[-1])) if item in counters else None)
    for number in range(200):
        match rng.randrange(4):
            case 0:
                item = f"{number}{rng.choice('abcdefgh')}"
                counters[item] = float(rng.randrange(50))
                queue.put(item)
                queue.put(item)
            case 1 if counters:
                counters[rng.choice([*counters])] += rng.randrange(30)
            case 2 if counters:
                before = counters.pop(gone := rng.choice([*counters]))
                if rng.random() < 0.3:  # it comes back before the queue was read
                    counters[gone] = before + 5
                    queue.put(gone)
            case 3:
                most = rng.choice([1, 2, 100])
                walked = [item for _, item in zip(range(most), queue.walk(), strict=False)]
                assert [counters[item] for item in walked] == sorted(counters.values())[:most]
    assert {*queue.walk()} == counters.keys()


def test_a_returning_tenant_is_lifted_to_nearly_the_one_furthest_behind() -> None:
    counters = TenantCounters(10)
    busy = counters.join("busy")
    counters.charge(busy, 1000.0)
    assert counters.join("new").value == 1000.0 - counters.burst
    ahead = counters.join("ahead")
    counters.charge(ahead, 5000.0)
    counters.leave(ahead)
    assert counters.join("ahead").value == ahead.value > 5000.0  # what it has had is not forgotten
    background = counters.join("busy", is_background=True)
    assert background is not busy and background.value == 0.0


def test_a_new_tenant_alone_does_not_go_before_one_that_was_here_just_now() -> None:
    counters = TenantCounters(10)
    quiet = counters.join("quiet")
    counters.charge(quiet, 1000.0)
    counters.leave(quiet)
    flood = counters.join("flood")
    assert flood.value == 1000.0
    counters.charge(flood, 100.0)
    assert counters.join("quiet").value == 1000.0
    counters.leave(flood)
    counters.leave(quiet)
    counters.charge(quiet, 5000.0)
    assert counters.join("quiet").value == 6000.0
    assert counters.join("flood").value == 6000.0 - counters.burst  # a tenant is here


def test_a_weight_slows_the_counter_and_a_price_without_lift_is_what_was_served() -> None:
    counters = TenantCounters(10)
    light, heavy = counters.join("light", weight=2.0), counters.join("heavy", weight=8.0)
    before = heavy.value
    for counter in (light, heavy):
        counters.charge(counter, 100.0)
    assert (light.value, heavy.value - before) == (100.0, 25.0)  # in units of the first tenant's weight
    assert (light.served, heavy.served) == (50.0, 12.5)  # as other gangs count it
    assert [counter.tenant for counter in counters.take_changed(9)] == ["light", "heavy"]
    assert counters.take_changed(9) == []


def test_tenants_that_come_together_come_back_alike() -> None:
    counters = TenantCounters(10)
    counters.charge(counters.join("busy"), 1000.0)
    assert {counters.join(f"t{number}").value for number in range(9)} == {1000.0 - counters.burst}


def test_what_others_served_is_charged_once_whichever_router_reports_it() -> None:
    counters = TenantCounters(10)
    here, other = counters.join("acme"), counters.join("globex")
    for totals in ([("acme", 500.0)], [("acme", 530.0)], [("acme", 510.0)], [("acme", 530.0)], [("acme", 535.0)]):
        counters.charge_elsewhere(totals)
    assert (here.value, here.served, other.value) == (35.0, 0.0, 0.0)  # the first is where it begins


def test_tenants_that_have_gone_are_forgotten_and_those_that_are_here_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenant_counters, "_MAX_IDLE", 100)
    counters = TenantCounters(10)
    stays = counters.join("stays")
    for number in range(5000):
        counters.leave(counters.join(f"t{number}"))
    assert len(counters) <= 102
    assert counters.join("stays") is stays


def test_ten_thousand_tenants_that_wait_cost_a_step_no_more_than_a_thousand() -> None:
    calls = []
    for num_tenants in (1000, 10_000):
        s = scheduler(limits(2000, 64, 8))
        for number in range(num_tenants):
            assert s.add(asking(number, [number % 90] * 3, 50, tenant=f"t{number}"), 0) is None
        for _ in range(5):
            plan = s.schedule()
            s.commit(plan, quick_result(plan))
        plans: list[object] = []
        calls.append(num_calls(lambda s=s, plans=plans: plans.append(s.schedule())))  # type: ignore[misc]
    assert calls[1] < 1.3 * calls[0] + 100
