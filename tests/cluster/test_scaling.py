"""The scaling policy: bounds, delays, and days of load in a simulated fleet."""

from __future__ import annotations

import math
from dataclasses import asdict, astuple, replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.cluster.scaling import FleetState, GangLoad, ScalingConfig, ScalingHistory, decide, gangs_needed
from motet.tests.rigs.fleet_simulation import Outcome, simulate
from motet.tests.rigs.part_configs import scaling_config
from motet.tests.rigs.recorded_day import DAY_S, EVENING, MORNING, recorded_day, steady_arrivals

CONFIG = scaling_config(min_gangs=0, max_gangs=8)
IDLE = GangLoad()
BUSY = GangLoad(num_sequences=10, queued_tokens=2.5 * CONFIG.queued_tokens_per_gang, computed_tokens_per_s=100)

amounts = st.floats(0, 1e6)
loads = st.builds(
    GangLoad,
    num_sequences=amounts,
    queued_tokens=amounts,
    pool_pressure=st.floats(0, 1),
    adapter_loads_per_s=st.floats(0, 100),
    computed_tokens_per_s=amounts,
)
bounds = st.tuples(st.integers(0, 8), st.integers(1, 8)).filter(lambda bounds: bounds[0] <= bounds[1])


@st.composite
def states(draw: st.DrawFn, now_s: float = 0.0) -> FleetState:
    target = draw(st.integers(0, 8))
    num_running = draw(st.integers(0, target))
    gangs = tuple(draw(st.lists(loads, max_size=num_running)))
    return FleetState(now_s=now_s, target=target, num_running=num_running, gangs=gangs, is_awaited=draw(st.booleans()))


class Memory:
    """The policy with its history, called as the autoscaler calls it."""

    def __init__(self, config: ScalingConfig) -> None:
        self._config = config
        self._history: ScalingHistory | None = None

    def __call__(self, state: FleetState) -> int:
        history = ScalingHistory.start(state, self._config) if self._history is None else self._history
        self._history = history.observe(state, self._config)
        return decide(state, self._config, self._history)


@given(bounds, st.lists(st.tuples(st.floats(0, 400), states()), max_size=8))
def test_stays_within_its_bounds_whatever_is_reported(
    bounds: tuple[int, int], steps: list[tuple[float, FleetState]]
) -> None:
    memory = Memory(scaling_config(min_gangs=bounds[0], max_gangs=bounds[1]))
    now_s = 0.0
    for pause_s, state in steps:
        now_s += pause_s
        assert bounds[0] <= memory(replace(state, now_s=now_s)) <= bounds[1]


@given(st.lists(st.tuples(st.floats(0, 4000), states()), min_size=1, max_size=8))
def test_is_never_zero_while_there_are_requests(steps: list[tuple[float, FleetState]]) -> None:
    memory = Memory(CONFIG)
    now_s = 0.0
    for pause_s, state in steps:
        now_s += pause_s
        target = memory(replace(state, now_s=now_s))
        if state.is_awaited or any(not gang.is_idle for gang in state.gangs):
            assert target >= 1


@given(st.lists(st.tuples(st.floats(0, 4000), states()), min_size=1, max_size=8))
def test_nothing_is_given_up_before_it_has_reported_its_load(steps: list[tuple[float, FleetState]]) -> None:
    memory = Memory(CONFIG)
    now_s = 0.0
    for pause_s, state in steps:
        now_s += pause_s
        target = memory(replace(state, now_s=now_s))
        if not state.gangs or len(state.gangs) < state.num_running:
            assert target >= min(state.target, CONFIG.max_gangs)


@given(states(), st.integers(0, 7), loads)
def test_more_load_never_calls_for_fewer(state: FleetState, number: int, more: GangLoad) -> None:
    if not state.gangs:
        return
    at = number % len(state.gangs)
    grown = GangLoad(
        **{
            name: max(before, after)
            for (name, before), after in zip(asdict(state.gangs[at]).items(), astuple(more), strict=True)
        }
    )
    heavier = replace(state, gangs=(*state.gangs[:at], grown, *state.gangs[at + 1 :]))
    assert gangs_needed(heavier, CONFIG) >= gangs_needed(state, CONFIG)
    assert Memory(CONFIG)(heavier) >= Memory(CONFIG)(state)


@pytest.mark.parametrize(
    "load",
    [
        GangLoad(num_sequences=1, queued_tokens=2.5 * CONFIG.queued_tokens_per_gang),
        GangLoad(num_sequences=1, adapter_loads_per_s=2.5 * CONFIG.adapter_loads_per_s),
    ],
)
def test_each_measure_alone_brings_gangs_at_once(load: GangLoad) -> None:
    assert Memory(CONFIG)(FleetState(now_s=0, target=1, num_running=1, gangs=(load,))) == 3


def test_a_full_pool_brings_one_more() -> None:
    full = GangLoad(num_sequences=1, pool_pressure=1.0)
    assert Memory(CONFIG)(FleetState(now_s=0, target=2, num_running=2, gangs=(full, full))) == 3


def test_a_starting_gang_is_neither_missing_nor_in_the_way() -> None:
    memory = Memory(CONFIG)
    for now_s in range(300):  # five minutes of starting: no fourth is requested, and none is given up
        assert memory(FleetState(now_s=now_s, target=1 if now_s == 0 else 3, num_running=1, gangs=(BUSY,))) == 3
    for now_s in range(300, 500):  # the queue was worked off meanwhile
        assert memory(FleetState(now_s=now_s, target=3, num_running=1, gangs=(IDLE,))) == 3


def test_what_cannot_be_started_is_given_up_in_the_end() -> None:
    memory = Memory(CONFIG)
    memory(FleetState(now_s=0, target=1, num_running=1, gangs=(BUSY,)))
    memory(FleetState(now_s=1, target=3, num_running=1, gangs=(BUSY,)))
    over_s = 1 + CONFIG.start_grace_s + CONFIG.scale_down_after_s
    targets = [memory(FleetState(now_s=s, target=3, num_running=1, gangs=(IDLE,))) for s in range(2, int(over_s) + 3)]
    assert targets[:-3] == [3] * (len(targets) - 3)
    assert targets[-1] < 3


def test_the_first_gang_is_awaited_however_long_it_takes() -> None:
    memory = Memory(CONFIG)
    assert memory(FleetState(now_s=0, target=0, num_running=0)) == 0
    assert memory(FleetState(now_s=1, target=0, num_running=0, is_awaited=True)) == 1
    for now_s in (2, 1000, 10_000):
        assert memory(FleetState(now_s=now_s, target=1, num_running=0)) == 1  # the client has left
    assert memory(FleetState(now_s=10_001, target=1, num_running=1)) == 1  # serves, and has reported nothing


def test_fewer_only_after_a_while_and_none_after_a_longer_one() -> None:
    memory = Memory(CONFIG)
    target, fell_s = 3, {}
    for now_s in range(1000):
        load = BUSY if now_s < 100 else IDLE
        decided = memory(
            FleetState(now_s=now_s, target=target, num_running=target, gangs=(load,) + (IDLE,) * (target - 1))
            if target
            else FleetState(now_s=now_s, target=0, num_running=0)
        )
        if decided < target:
            fell_s[decided] = now_s
        target = decided
    assert fell_s == {1: 100 + CONFIG.scale_down_after_s, 0: 100 + CONFIG.scale_to_zero_after_s}


def test_one_request_now_and_then_keeps_one_gang() -> None:
    memory = Memory(CONFIG)
    for now_s in range(3000):
        load = GangLoad(computed_tokens_per_s=1) if now_s % 250 == 0 else IDLE
        assert memory(FleetState(now_s=now_s, target=1, num_running=1, gangs=(load,))) == 1


def test_a_load_that_only_just_fits_keeps_its_gangs() -> None:
    """No gang has a queue, but three gangs compute more than two have ever been seen to compute."""
    memory = Memory(CONFIG)
    swamped = GangLoad(num_sequences=9, queued_tokens=3 * CONFIG.queued_tokens_per_gang, computed_tokens_per_s=1000)
    assert memory(FleetState(now_s=0, target=1, num_running=1, gangs=(swamped,))) == 3
    relieved = (GangLoad(num_sequences=3, computed_tokens_per_s=700),) * 3
    for now_s in range(1, 1000):
        assert memory(FleetState(now_s=now_s, target=3, num_running=3, gangs=relieved)) == 3


def without_memory(state: FleetState) -> int:
    """The number of gangs for the load of this moment, once that is known."""
    return min(gangs_needed(state, CONFIG), CONFIG.max_gangs) if state.gangs else max(state.target, state.is_awaited)


@pytest.fixture(scope="module")
def day() -> Outcome:
    return simulate(recorded_day(), Memory(CONFIG), DAY_S)


def test_a_day_is_served_with_far_fewer_gangs_than_its_peak_needs(day: Outcome) -> None:
    most = max(day.targets)
    fixed = simulate(recorded_day(), lambda state: most, DAY_S, num_gangs=most)
    assert len(day.first_token_s) == len(fixed.first_token_s)  # all were served
    assert day.gang_s < 0.5 * fixed.gang_s
    # Half of all wait as if nothing were saved. Those of a burst wait for a start at the worst.
    assert day.wait_s(0.5) < 2 * fixed.wait_s(0.5)
    assert day.wait_s(0.99) < fixed.wait_s(0.99) + 60


def test_gangs_end_at_night(day: Outcome) -> None:
    last_s = int(EVENING * DAY_S + CONFIG.scale_to_zero_after_s + 200)
    assert max(day.targets[: int(MORNING * DAY_S)]) == 0
    assert max(day.targets[last_s:]) == 0
    assert max(day.targets) >= 3


def test_a_day_has_few_changes(day: Outcome) -> None:
    forgetful = simulate(recorded_day(), without_memory, DAY_S)
    assert day.num_changes * 5 < forgetful.num_changes


@pytest.mark.parametrize("rate_per_s", [0.5, 2.0, 4.0, 8.0, 12.0, 16.0])
def test_a_steady_load_has_a_steady_fleet(rate_per_s: float) -> None:
    duration_s = 3600
    outcome = simulate(steady_arrivals(rate_per_s, duration_s), Memory(CONFIG), duration_s, num_gangs=1)
    settled = outcome.targets[900:duration_s]
    assert sum(one > other for one, other in pairwise(settled)) <= 2, set(settled)
    assert math.ceil(rate_per_s / 20) <= min(settled)
