"""The arrivals of a day, shortened to six hours: a quiet night, two peaks, and sudden bursts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

DAY_S = 6 * 3600.0
PEAK_PER_S = 12.0
NUM_BURSTS = 6
BURST_S = 120.0
BURST_FACTOR = 3.0
MORNING, EVENING = 0.3, 0.9  # shares of the day, outside of which there are no requests


@dataclass(frozen=True)
class Arrival:
    at_s: float
    num_prompt_tokens: int
    num_new_tokens: int


def recorded_day(seed: int = 1) -> Iterator[Arrival]:
    """Arrivals in order of time; equal seeds give equal days. Lengths have a long tail, as in real use."""
    random = Random(seed)
    bursts = [random.uniform(MORNING + 0.05, EVENING - 0.05) * DAY_S for _ in range(NUM_BURSTS)]
    now_s, top_per_s = 0.0, PEAK_PER_S * BURST_FACTOR
    while (now_s := now_s + random.expovariate(top_per_s)) < DAY_S:
        if random.random() * top_per_s < _rate_per_s(now_s, bursts):
            yield Arrival(now_s, *_lengths(random))


def steady_arrivals(rate_per_s: float, duration_s: float, seed: int = 1) -> Iterator[Arrival]:
    """The same kind of requests, at a constant rate."""
    random = Random(seed)
    now_s = 0.0
    while (now_s := now_s + random.expovariate(rate_per_s)) < duration_s:
        yield Arrival(now_s, *_lengths(random))


def _rate_per_s(now_s: float, bursts: list[float]) -> float:
    share = now_s / DAY_S
    if not MORNING < share < EVENING:
        return 0.0
    through = (share - MORNING) / (EVENING - MORNING)
    rate = PEAK_PER_S * math.sin(math.pi * through) * (0.7 + 0.3 * math.cos(4 * math.pi * through)) ** 2
    return rate * BURST_FACTOR if any(start <= now_s < start + BURST_S for start in bursts) else rate


def _lengths(random: Random) -> tuple[int, int]:
    return (
        min(4000, max(8, int(random.lognormvariate(5.5, 0.9)))),
        min(1000, max(1, int(random.lognormvariate(4.0, 0.8)))),
    )
