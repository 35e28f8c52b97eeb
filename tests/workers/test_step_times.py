"""Seconds of steps and of loads, by a clock that the test sets."""

from __future__ import annotations

from motet.tests.rigs.engine_loads import engine_load
from motet.workers.loop import EngineTimes


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def step(
    times: EngineTimes, clock: Clock, idle_s: float, step_s: float, coming: int, loads: int
) -> tuple[float, float]:
    """Busy and loading seconds after a step that begins `idle_s` after the one before."""
    clock.now += idle_s
    times.begin_step()
    clock.now += step_s
    load = times.end_step(engine_load(num_coming_adapters=coming, num_adapter_loads=loads, num_steps=7))
    assert load.counters.num_steps == 7
    return round(load.counters.busy_s, 6), round(load.counters.loading_s, 6)


def test_each_adapter_counts_until_a_step_notices_it() -> None:
    clock = Clock()
    times = EngineTimes(clock)
    assert step(times, clock, 5.0, 1.0, coming=0, loads=0) == (1.0, 0.0)
    assert step(times, clock, 0.0, 1.0, coming=2, loads=2) == (2.0, 2.0)  # both from this step's begin
    assert step(times, clock, 3.0, 1.0, coming=1, loads=2) == (
        3.0,
        10.0,
    )  # idle time counts too: nothing else was to do
    assert step(times, clock, 0.0, 1.0, coming=0, loads=2) == (4.0, 11.0)
    assert step(times, clock, 9.0, 1.0, coming=0, loads=3) == (5.0, 12.0)  # requested and there within one step
