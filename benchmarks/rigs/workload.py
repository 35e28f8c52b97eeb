"""The load that the engine benchmarks share: requests whose lengths are drawn log-normally (sigma 0.5), seeded."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Job:
    """One request: greedy, `ignore_eos`, exactly `num_output_tokens` long."""

    prompt_token_ids: list[int]
    num_output_tokens: int
    adapter: int | None  # index into the adapters at hand; None: the base


def draw_jobs(count: int, adapters: Sequence[int | None], vocab_size: int, seed: int = 1) -> list[Job]:
    """`count` jobs: prompts of 60 and outputs of 80 tokens on average; job i asks for adapters[i % len(adapters)].

    The same seed gives the same prompts and lengths whatever the adapters are.
    """
    generator = random.Random(seed)
    jobs = []
    for index in range(count):
        num_prompt = _length(generator, mean=60, low=8, high=256)
        num_output = _length(generator, mean=80, low=16, high=256)
        prompt = [generator.randrange(1, vocab_size) for _ in range(num_prompt)]
        jobs.append(Job(prompt, num_output, adapters[index % len(adapters)]))
    return jobs


def _length(generator: random.Random, mean: float, low: int, high: int, sigma: float = 0.5) -> int:
    drawn = generator.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma)
    return min(max(round(drawn), low), high)
