"""How many threads a worker on a CPU computes with: what is fastest on the machine, measured before requests come."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from .execution.runner import Runner
from .plan import SamplePlan, SequencePlan, StepPlan, packed
from .wire.messages import SamplingParams

MEASURED_S = 0.25  # for each number of threads
MOST_SEQUENCES = 32  # of a measured step
LEAST_GAIN = 1.1  # a thread more must give, because others use the cores as well


def fewest_of_the_fast(speeds: Mapping[int, float]) -> int:
    """The number of threads to compute with, of the speed with each; more threads must be faster by `LEAST_GAIN`."""
    chosen, *others = sorted(speeds)
    for count in others:
        if speeds[count] >= speeds[chosen] * LEAST_GAIN:
            chosen = count
    return chosen


def numbers_to_measure(most: int) -> tuple[int, ...]:
    """1, 2, 4 and so on, and the most."""
    return (*(1 << power for power in range(most.bit_length()) if 1 << power < most), most)


def decode_speed(runner: Runner, max_sequences: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Tokens per second of decodes of the base. They write to the pool's first page, which must be free."""
    sample = SamplePlan(SamplingParams(temperature=0.0), 0, 0)
    sequences = tuple(
        SequencePlan(index, (0,), 0, packed([0]), None, sample) for index in range(min(MOST_SEQUENCES, max_sequences))
    )
    plan = StepPlan(0, sequences, (), ())
    runner.run(plan)  # starts threads, and reads the weights
    num_steps, began_at = 0, clock()
    while num_steps == 0 or clock() - began_at < MEASURED_S:
        runner.run(plan)
        num_steps += 1
    speed = num_steps * len(sequences) / (clock() - began_at)
    runner.pool[0].zero_()
    return speed
