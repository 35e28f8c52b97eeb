"""Requests of many tenants: a few adapters are used all the time, most are hardly ever used."""

from __future__ import annotations

import bisect
import itertools
import math
import random

from motet.benchmarks.rigs.simulated_gang import Job

ADAPTER_PAGES = {20: 0.4, 40: 0.3, 80: 0.2, 160: 0.1}  # ranks 8, 16, 32 and 64 of Llama-3-8B, and their shares
MEAN_PROMPT_TOKENS, MEAN_OUTPUT_TOKENS = 400, 150


def draw_jobs(count: int, rate: float, num_adapters: int, exponent: float, num_routers: int, seed: int) -> list[Job]:
    """Requests in order of arrival, `rate` a second. Adapter i is asked for in proportion to (i + 1) ** -exponent."""
    generator = random.Random(seed)
    shares = list(itertools.accumulate(rank**-exponent for rank in range(1, num_adapters + 1)))
    pages = generator.choices(list(ADAPTER_PAGES), list(ADAPTER_PAGES.values()), k=num_adapters)
    jobs, now = [], 0.0
    for _ in range(count):
        now += generator.expovariate(rate)
        adapter = bisect.bisect(shares, generator.random() * shares[-1])
        jobs.append(
            Job(
                now,
                generator.randrange(num_routers),
                f"adapter-{adapter}",
                pages[adapter],
                _length(generator, MEAN_PROMPT_TOKENS),
                _length(generator, MEAN_OUTPUT_TOKENS),
            )
        )
    return jobs


def _length(generator: random.Random, mean: float) -> int:
    """Log-normal, as lengths of conversations are."""
    sigma = 0.8
    drawn = generator.lognormvariate(0, sigma) * mean / math.exp(sigma * sigma / 2)
    return min(max(round(drawn), 1), 8 * round(mean))
