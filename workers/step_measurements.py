"""Measured at a worker's start: the fastest number of threads, and which steps are faster in two nano-batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch

from .costs.step_costs import StepTimes, first_rows
from .execution.runner import Runner
from .execution.warm_up import doubled
from .models.weights import Progress
from .parallel import Parallel
from .plan import SamplePlan, SequencePlan, StepPlan, packed
from .wire.messages import SamplingParams

# How many threads a worker on a CPU computes with: what is fastest on the machine, measured before requests come.

MEASURED_S = 0.25  # for each kind of step with each number of threads, in all rounds
NUM_ROUNDS = 2  # of all numbers, so that what else the machine does for a moment does not decide
MOST_SEQUENCES = 32  # of a measured step of decodes
MOST_PROMPT_TOKENS = 128  # of a measured step of prompts
LEAST_GAIN = 1.1  # a thread more must give, because others use the cores as well
CLEARLY_SLOWER = 1.5  # times: still fewer threads are not measured

Speeds = Mapping[str, float]  # tokens per second, by kind of step: "decodes", "prompts"
Measure = Callable[[int], Speeds | None]  # with this number of threads; None: a step takes too long to measure


def fewest_of_the_fast(speeds: Mapping[int, float]) -> int:
    """The number of threads to compute with, of the speed with each; more threads must be faster by `LEAST_GAIN`."""
    chosen, *counts = sorted(speeds)
    for count in counts:
        if speeds[count] >= speeds[chosen] * LEAST_GAIN:
            chosen = count
    return chosen


def choose_threads(speeds: Mapping[int, Speeds]) -> int:
    """The number of threads to compute with: what the kind of step needs that needs most of them."""
    return max(fewest_of_the_fast(of) for of in by_kind(speeds).values())


def by_kind(speeds: Mapping[int, Speeds]) -> dict[str, dict[int, float]]:
    """The speeds of each kind of step, by number of threads."""
    kinds = next(iter(speeds.values()))
    return {kind: {count: of[kind] for count, of in speeds.items()} for kind in kinds}


def numbers_to_measure(limit: int) -> tuple[int, ...]:
    """The most, and the powers of two below it, down to 1."""
    return (limit, *(1 << power for power in reversed(range(limit.bit_length())) if 1 << power < limit))


def measure_threads(max_threads: int, measure: Measure, on_progress: Progress) -> dict[int, Speeds]:
    """The best speeds of several rounds, by number of threads; empty if steps with `max_threads` are too long.

    From most threads downward, as far as fewer may be as fast.
    """
    counts, best_speeds, num_done = numbers_to_measure(max_threads), dict[int, Speeds](), 0

    def next_speeds(count: int) -> Speeds | None:
        nonlocal num_done
        on_progress("measuring threads", num_done, NUM_ROUNDS * len(counts))
        num_done += 1
        return measure(count)

    for count in counts:
        speeds = next_speeds(count)
        if speeds is None:
            break
        best_speeds[count] = speeds
        if any(speed * CLEARLY_SLOWER < max(of[kind] for of in best_speeds.values()) for kind, speed in speeds.items()):
            break
    for _ in range(NUM_ROUNDS - 1 if len(best_speeds) > 1 else 0):
        for count, before in best_speeds.items():
            again = next_speeds(count) or before
            best_speeds[count] = {kind: max(speed, again[kind]) for kind, speed in before.items()}
    on_progress("measuring threads", NUM_ROUNDS * len(counts), NUM_ROUNDS * len(counts))
    return best_speeds


class SpeedMeter:
    """Measures steps of the base. They write to the pool's first page, which must be free."""

    def __init__(
        self,
        runner_of: Callable[[int], Runner],
        max_sequences: int,
        max_tokens: int,
        chunk_tokens: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`runner_of`: by number of threads. `max_sequences` and `max_tokens`: of a step.

        `chunk_tokens`: of each prompt, no more than a page and a sequence hold.
        """
        self._runner_of, self._clock = runner_of, clock
        self._runners: dict[int, Runner] = {}
        sample = SamplePlan(SamplingParams(temperature=0.0), 0, 0)
        self._decodes = tuple(
            SequencePlan(index, (0,), 0, packed([0]), None, sample)
            for index in range(min(MOST_SEQUENCES, max_sequences, max_tokens))
        )
        num_tokens = min(chunk_tokens, max_tokens)
        self._prompts = tuple(
            SequencePlan(index, (0,) * num_tokens, 0, packed([0]), None, None)
            for index in range(max(1, min(MOST_PROMPT_TOKENS, max_tokens) // num_tokens))
        )
        self._kinds: dict[str, tuple[SequencePlan, ...]] | None = None  # None: nothing is measured yet

    def measure(self, num_threads: int) -> dict[str, float] | None:
        """See `Measure`."""
        runner = self._runners.get(num_threads)
        if runner is None:
            runner = self._runners[num_threads] = self._runner_of(num_threads)
        try:
            return self._measure(runner)
        finally:
            runner.pool[0].zero_()

    def _measure(self, runner: Runner) -> dict[str, float] | None:
        decodes = self._speed(runner, self._decodes)
        if len(self._decodes) > decodes * MEASURED_S:
            return None
        if self._kinds is None:  # the same kinds with all numbers of threads
            num_tokens = sum(len(each.token_ids) for each in self._prompts)
            self._kinds = {"prompts": self._prompts} if num_tokens <= decodes * MEASURED_S else {}
        return {"decodes": decodes} | {kind: self._speed(runner, plan) for kind, plan in self._kinds.items()}

    def _speed(self, runner: Runner, sequences: tuple[SequencePlan, ...]) -> float:
        """Tokens per second."""
        plan = StepPlan(0, sequences, (), ())
        runner.run(plan)  # starts threads, and reads the weights
        num_steps, began_at = 0, self._clock()
        while num_steps == 0 or self._clock() - began_at < MEASURED_S / NUM_ROUNDS:
            runner.run(plan)
            num_steps += 1
        return num_steps * sum(len(each.token_ids) for each in sequences) / (self._clock() - began_at)


# Measures at a gang's start how long steps take whole and in nano-batches, to decide which later ones are split.

_NUM_ROUNDS = 2  # of each size
_MEASURED_S = 4.0  # after so long no larger step is measured


def measured_steps(
    parallel: Parallel,
    runner: Runner,
    context: int,
    least_rows: int,
    most_rows: int,
    clock: Callable[[], float] = time.perf_counter,
) -> StepTimes:
    """The same on all workers, which call it together before the first plan. Steps of half of `least_rows` and more.

    `context`: of the longest sequence.
    """
    whole, split = dict[int, float](), dict[int, float]()
    began_at = clock()
    for num_rows in doubled(least_rows // 2, most_rows):
        plan = _prompts(num_rows, context, runner.geometry.block_size)
        for _ in range(_NUM_ROUNDS):
            for way, nano_batches in ((whole, {}), (split, {num_rows: first_rows(num_rows)})):
                runner.nano_batches = nano_batches
                way[num_rows] = min(way.get(num_rows, float("inf")), _step_s(parallel, runner, plan, clock))
        if _of_slowest(parallel, clock() - began_at, runner) > _MEASURED_S:
            break
    runner.nano_batches = {}
    runner.pool[0].zero_()
    return StepTimes(whole, split)


def note_of(times: StepTimes, first_rows: Mapping[int, int]) -> str:
    """What `motet status` adds to the kernels."""
    chosen = f"nano-batches from {min(first_rows)} rows on" if first_rows else "no nano-batches"
    num_rows = max(times.whole)
    whole_ms, split_ms = 1e3 * times.whole[num_rows], 1e3 * times.split[num_rows]
    return f"; {chosen}: {num_rows} rows took {whole_ms:.0f} ms, in two {split_ms:.0f} ms"


def _step_s(parallel: Parallel, runner: Runner, plan: StepPlan, clock: Callable[[], float]) -> float:
    """Seconds on the slowest worker; all begin together."""
    parallel.all_gather(torch.zeros(1, device=runner.pool.device))
    began_at = clock()
    logits = runner.logits(plan)
    if logits.device.type == "cuda":
        torch.cuda.synchronize(logits.device)
    return _of_slowest(parallel, clock() - began_at, runner)


def _prompts(num_rows: int, context: int, block_size: int) -> StepPlan:
    """Prompts on the pool's first page, which no sequence has yet."""
    lengths = [min(context, num_rows - start) for start in range(0, num_rows, context)]
    sequences = (
        SequencePlan(index, (0,) * length, 0, packed([0]) * -(-length // block_size), None, None)
        for index, length in enumerate(lengths)
    )
    return StepPlan(0, tuple(sequences), (), ())


def _of_slowest(parallel: Parallel, seconds: float, runner: Runner) -> float:
    mine = torch.tensor([seconds], dtype=torch.float64, device=runner.pool.device)
    return float(parallel.all_gather(mine).max())
