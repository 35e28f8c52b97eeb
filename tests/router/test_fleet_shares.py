"""What routers send gangs of the service at others: it never shrinks, counts nothing twice, and outlives gangs."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.router.fleet import fair_queue
from motet.router.fleet.fair_queue import FleetShares
from motet.workers.wire.engine_load import TenantShare

GANGS, TENANTS = "xyz", "abc"


def served(tenant: str, amount: float) -> TenantShare:
    return TenantShare(tenant, 0.0, 1, 0, 0, served=amount)


serve = st.tuples(st.just("serve"), st.sampled_from(GANGS), st.sampled_from(TENANTS), st.integers(1, 100))
report = st.tuples(st.just("report"), st.sampled_from(GANGS), st.sampled_from(TENANTS), st.just(0))
restart = st.tuples(st.just("restart"), st.sampled_from(GANGS), st.just(""), st.just(0))
replace = st.tuples(st.just("replace"), st.sampled_from(GANGS), st.just(""), st.just(0))
ask = st.tuples(st.just("ask"), st.sampled_from(GANGS), st.just(""), st.integers(1, 3))


@given(st.lists(st.one_of(serve, report, restart, replace, ask), max_size=60))
def test_totals_are_what_others_served_whatever_gangs_do(steps: list[tuple[str, str, str, int]]) -> None:
    shares = FleetShares()
    ids = {gang: f"{gang}0" for gang in GANGS}  # the process at each gang's place
    counters: defaultdict[str, Counter[str]] = defaultdict(Counter)  # by process, as it counts
    received: defaultdict[str, Counter[str]] = defaultdict(Counter)  # by process: service that the router knows of
    last: defaultdict[str, Counter[str]] = defaultdict(Counter)
    reported: dict[tuple[str, str], float] = {}
    number = 0
    for what, gang, tenant, amount in steps:
        one = ids[gang]
        if what == "serve":
            counters[one][tenant] += amount
        elif what == "report":
            now = counters[one][tenant]
            received[one][tenant] += now - last[one][tenant] if now >= last[one][tenant] else now
            last[one][tenant] = now
            shares.receive(one, [served(tenant, now)])
        elif what == "restart":  # of its counters: it is short of memory for tenants
            counters[one].clear()
        elif what == "replace":
            number += 1
            shares.forget(one)
            ids[gang] = f"{gang}{number}"
        else:
            due = shares.take_due(one, TENANTS, limit=amount)
            assert len(due) <= amount
            for name, total in due:
                others = sum(known[name] for process, known in received.items() if process != one)
                assert total == others
                assert total > reported.get((one, name), 0.0)
                reported[one, name] = total
    for gang in GANGS:
        for tenant in TENANTS:
            others = sum(known[tenant] for process, known in received.items() if process != ids[gang])
            assert shares.elsewhere(ids[gang], tenant) == others


def test_nothing_is_reported_twice_and_what_does_not_fit_comes_next() -> None:
    shares = FleetShares()
    shares.receive("x", [served("a", 5), served("b", 50), served("c", 20)])
    assert shares.take_due("x", TENANTS) == []
    first = shares.take_due("y", TENANTS, limit=2)
    rest = shares.take_due("y", TENANTS, limit=2)
    assert sorted([*first, *rest]) == [("a", 5), ("b", 50), ("c", 20)]
    assert shares.take_due("y", TENANTS) == []
    shares.receive("x", [served("a", 6), served("b", 90), served("c", 30)])
    assert shares.take_due("y", TENANTS, limit=1) == [("b", 90)]  # it has grown most
    assert shares.take_due("y", "a") == [("a", 6)]


def test_routers_that_began_to_receive_at_different_times_send_the_same() -> None:
    early, late = FleetShares(), FleetShares()
    for amount in (10, 20):
        early.receive("x", [served("a", amount)])
    late.receive("x", [served("a", 20)])
    assert early.take_due("y", "a") == late.take_due("y", "a") == [("a", 20)]


def test_tenants_of_long_ago_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_queue, "_MAX_TENANTS", 2)
    shares = FleetShares()
    shares.receive("x", [served("a", 1), served("b", 1), served("a", 2), served("c", 1)])
    assert [shares.elsewhere("y", tenant) for tenant in "abc"] == [2, 0, 1]
