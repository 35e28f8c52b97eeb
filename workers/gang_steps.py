"""Measures at a gang's start how long steps take whole and in nano-batches, to decide which later ones are split."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch

from .costs.nano_batches import StepTimes, first_rows
from .execution.runner import Runner
from .execution.warm_up import doubled
from .parallel import Parallel
from .plan import SequencePlan, StepPlan, packed

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
