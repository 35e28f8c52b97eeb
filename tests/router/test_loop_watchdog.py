"""What a router's watchdog distinguishes: a loop that its process holds, and one that waits for the machine."""

from __future__ import annotations

import time
from itertools import count

import pytest

from motet.router.loop_watchdog import LoopWatchdog
from motet.router.metrics import Histogram
from motet.tests.rigs.patience import eventually_in_loop

BOUND_S = 0.005
HELD_S = 0.05


def num_over(histogram: Histogram) -> float:
    (_, within), (_, all_values) = histogram.buckets()
    return all_values - within


@pytest.mark.parametrize("computes", [True, False])
async def test_only_what_the_process_computes_counts_as_its_own(computes: bool) -> None:
    held_s, held_cpu_s = Histogram([BOUND_S]), Histogram([BOUND_S])
    readings = count(0)
    watchdog = LoopWatchdog(held_s, held_cpu_s, lambda: 1e9 * next(readings) if computes else 0.0)
    watchdog.start()
    time.sleep(HELD_S)  # noqa: ASYNC251  # to hold the loop
    await eventually_in_loop(lambda: num_over(held_s) > 0)
    watchdog.stop()
    assert num_over(held_cpu_s) == (num_over(held_s) if computes else 0)
    assert held_cpu_s.sum == (pytest.approx(held_s.sum) if computes else 0.0)
