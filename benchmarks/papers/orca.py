"""Orca (OSDI 2022): what iteration-level scheduling gains over static batches, by how much answers differ in length.

In virtual time: a step takes 20 ms and 0.1 ms more for each row. 1,024 requests wait from the beginning, prompts of 64
tokens, answers of 128 on average, 32 at once. Static batches end with their longest answer.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Sequence

from motet.benchmarks.papers.policies import Continuous, Dynamic
from motet.benchmarks.papers.virtual_load import Job, Outcome, run

NUM_JOBS, BATCH = 1024, 32
PROMPT, MEAN_ANSWER = 64, 128
SPREADS = (0.0, 0.25, 0.5, 1.0)  # deviation over mean of the answers' lengths, which are lognormal
WINDOW_S = 0.5
LOAD = 0.2  # of what continuous batches do


def jobs_of(spread: float, rate: float | None = None, number: int = NUM_JOBS) -> list[Job]:
    """`rate`: arrivals in a second; None: all wait from the beginning."""
    rng, now_s = random.Random(3), 0.0
    sigma = math.sqrt(math.log(1 + spread**2))
    found = []
    for _ in range(number):
        now_s += rng.expovariate(rate) if rate else 0.0
        drawn = MEAN_ANSWER * math.exp(rng.gauss(0, 1) * sigma - sigma * sigma / 2)
        found.append(Job(PROMPT, min(2048, max(2, round(drawn))), now_s))
    return found


def continuous(jobs: Sequence[Job], batch: int = BATCH) -> Outcome:
    return run(jobs, Continuous(), max_num_sequences=batch)


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    over_static, over_none = {}, {}
    print(f"{'spread':>6} {'continuous, steps':>18} {'static':>8} {'over static':>12} {'over one by one':>16}")
    for spread in SPREADS:
        jobs = jobs_of(spread)
        ours, static = continuous(jobs), run(jobs, Dynamic(BATCH, None))
        alone = continuous(jobs[: NUM_JOBS // 32], 1)
        over_static[spread] = ours.tokens_per_s / static.tokens_per_s
        over_none[spread] = ours.tokens_per_s / alone.tokens_per_s
        print(
            f"{spread:6} {ours.num_steps:18} {static.num_steps:8} {over_static[spread]:12.2f} {over_none[spread]:16.1f}"
        )
    print(
        f"\na load of a fifth of what is possible, {BATCH} at once, spread 1: mean seconds to the first token; tokens/s"
    )
    jobs = jobs_of(1.0, LOAD * continuous(jobs_of(1.0)).tokens_per_s / MEAN_ANSWER, NUM_JOBS // 2)
    waits = {}
    for name, policy in (
        ("continuous", Continuous()),
        (f"dynamic, {WINDOW_S} s", Dynamic(BATCH, WINDOW_S)),
        ("static", Dynamic(BATCH, None)),
    ):
        outcome = run(jobs, policy, max_num_sequences=BATCH)
        waits[name] = sum(outcome.waits_s) / len(outcome.waits_s)
        print(f"{name:16} {waits[name]:8.2f} {outcome.tokens_per_s:8.0f}")
    print(
        json.dumps(
            {
                "over_static": {spread: round(ratio, 3) for spread, ratio in over_static.items()},
                "over_none": {spread: round(ratio, 2) for spread, ratio in over_none.items()},
                "first_token_s": {name: round(wait_s, 3) for name, wait_s in waits.items()},
            }
        )
    )


if __name__ == "__main__":
    main()
