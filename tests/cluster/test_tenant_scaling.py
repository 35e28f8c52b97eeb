"""What one tenant's backlog may call for, and how gangs report the tenant."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from hypothesis import given
from hypothesis import strategies as st

from motet.cluster.replicas.autoscaler import COMPUTED_TOKENS, gang_load, gang_stats
from motet.cluster.scaling import FleetState, GangLoad, TenantLoad, gangs_needed
from motet.tests.rigs.engine_loads import engine_load
from motet.tests.rigs.part_configs import scaling_config
from motet.workers.wire.engine_load import TenantShare

HALF = scaling_config(min_gangs=0, max_gangs=8, tenant_scaling_share=0.5)
ALL = scaling_config(min_gangs=0, max_gangs=8)
LIMIT = HALF.queued_tokens_per_gang

amounts = st.floats(0, 20 * LIMIT)
pressures = st.floats(0, 1)


def state(*gangs: GangLoad) -> FleetState:
    return FleetState(now_s=0, target=len(gangs), num_running=len(gangs), gangs=gangs)


def gang(*tenants: TenantLoad, more_tokens: float = 0.0) -> GangLoad:
    tokens = sum(one.queued_tokens for one in tenants) + more_tokens
    pressure = sum(one.pool_pressure for one in tenants)
    return GangLoad(num_sequences=1, queued_tokens=tokens, pool_pressure=pressure, tenants=tenants)


tenant_loads = st.builds(TenantLoad, st.sampled_from("abc"), amounts, st.floats(0, 0.3))
gangs = st.lists(tenant_loads, max_size=3, unique_by=lambda one: one.tenant).map(lambda parts: gang(*parts))


@given(st.lists(st.tuples(amounts, pressures), min_size=1, max_size=8))
def test_a_flood_calls_for_its_part_of_the_gangs_at_most(floods: list[tuple[float, float]]) -> None:
    flooded = [gang(TenantLoad("a", tokens, pressure)) for tokens, pressure in floods]
    assert gangs_needed(state(*flooded), HALF) <= 4


@given(st.lists(gangs, min_size=1, max_size=5), st.integers(0, 4), amounts, pressures)
def test_more_of_a_tenant_never_calls_for_fewer(
    loads: list[GangLoad], number: int, tokens: float, pressure: float
) -> None:
    at = number % len(loads)
    grown = replace(
        loads[at],
        queued_tokens=loads[at].queued_tokens + tokens,
        pool_pressure=loads[at].pool_pressure + pressure,
        tenants=(*loads[at].tenants, TenantLoad("a", tokens, pressure)),
    )
    before = gangs_needed(state(*loads), HALF)
    after = gangs_needed(state(*loads[:at], grown, *loads[at + 1 :]), HALF)
    assert before <= after <= max(before, gangs_needed(state(*loads[:at], grown, *loads[at + 1 :]), ALL))


@given(st.lists(gangs, min_size=1, max_size=5))
def test_without_a_bound_it_does_not_matter_whose_it_is(loads: list[GangLoad]) -> None:
    assert gangs_needed(state(*loads), ALL) == gangs_needed(state(*[replace(one, tenants=()) for one in loads]), ALL)


def test_what_others_need_comes_on_top() -> None:
    flood, calm = TenantLoad("a", 100.0 * LIMIT), TenantLoad("b", 1.5 * LIMIT)
    assert gangs_needed(state(gang(flood)), HALF) == 4
    assert gangs_needed(state(gang(flood), gang(flood, calm)), HALF) == 6
    assert gangs_needed(state(gang(flood, more_tokens=2.0 * LIMIT)), HALF) == 6  # of unreported tenants


def test_what_gangs_report_of_tenants_comes_back() -> None:
    shares = [TenantShare(str(number), 0.0, 1, number, 100 * number, num_running_tokens=1) for number in range(20)]
    shares.append(TenantShare("flood", 5.0, 6, 40, 9000, num_running_tokens=506))
    load = engine_load(num_pages=100, num_free_pages=20, num_running=8, num_waiting=60, num_queued_tokens=28_000)
    reported = gang_stats(load, 16, shares)
    found = gang_load(reported, {})
    assert found.pool_pressure == 0.8
    assert [one.tenant for one in found.tenants] == ["flood", "19", "18", "17", "16", "15", "14", "13"]
    flood = found.tenants[0]
    assert flood.queued_tokens == 9500
    assert math.isclose(flood.pool_pressure, 0.6)
    assert gang_load(gang_stats(load, 16), {}).tenants == ()


def reported_load(**gauges: int) -> GangLoad:
    load = engine_load(num_pages=100, num_free_pages=0, num_computed_tokens=1000, **gauges)
    return gang_load(gang_stats(load, 16), {})


def test_background_work_alone_calls_for_no_second_gang() -> None:
    long_queue = 50 * int(LIMIT)
    batch = reported_load(
        num_running=16,
        num_running_background=16,
        num_waiting=900,
        num_queued_tokens=long_queue + 16,
        num_queued_background_tokens=long_queue,
    )
    assert (batch.queued_tokens, batch.pool_pressure) == (0, 0)
    assert gangs_needed(state(batch), ALL) == 1, "but one, as it is to be done"
    assert not batch.is_idle
    others = reported_load(num_running=16, num_waiting=900, num_queued_tokens=long_queue + 16)
    assert gangs_needed(state(others), ALL) == ALL.max_gangs
    both = reported_load(
        num_running=16,
        num_running_background=8,
        num_waiting=900,
        num_queued_tokens=long_queue + 2 * int(LIMIT) + 16,
        num_queued_background_tokens=long_queue,
    )
    assert (both.queued_tokens, both.pool_pressure) == (2 * LIMIT, 0.5)
    assert gangs_needed(state(both), ALL) == 2


@dataclass
class Reported:
    timestamp: float
    value: float


def test_what_background_work_computes_holds_no_gangs() -> None:
    series = [Reported(float(at), 1000.0 * at) for at in range(3)]
    load = engine_load(num_pages=10, num_running=4, num_running_background=3)
    assert gang_load(gang_stats(load, 16), {COMPUTED_TOKENS: series}).computed_tokens_per_s == 250
