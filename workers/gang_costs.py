"""What a gang's sums and passes take, measured at its start: by that its steps are computed in nano-batches, or not."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch

from .costs.nano_batches import CPU_WAIT_S, NanoBatchCosts, SumCosts
from .execution.runner import Runner
from .execution.warm_up import doubled
from .parallel import Alone, Parallel
from .plan import SequencePlan, StepPlan, packed

_NUM_SUMS = 9  # of each size
_NUM_PASSES = 3  # of each size
_PASSES_S = 3.0  # after so long no larger pass is measured
Clock = Callable[[], float]


class Unsummed(Alone):
    """A worker of a gang that exchanges nothing: to measure what it computes, and nothing else."""

    def __init__(self, parallel: Parallel) -> None:
        self.rank, self.degree = parallel.rank, parallel.degree


def measured_costs(
    parallel: Parallel,
    runner_of: Callable[[Parallel], Runner],
    context: int,
    least_rows: int,
    most_rows: int,
    clock: Clock = time.perf_counter,
) -> NanoBatchCosts:
    """The same on all workers, which call it together before the first plan. Passes of half of `least_rows` and more.

    `runner_of`: a worker's that exchanges what it is given. `context`: of the longest sequence.
    """
    runner = runner_of(Unsummed(parallel))
    device = runner.pool.device
    row = torch.zeros((1, runner.hidden_size), dtype=runner.pool.dtype, device=device)
    sums, passes = measured_sums(parallel, row, most_rows, clock), dict[int, float]()
    began_at = clock()
    for num_rows in doubled(least_rows // 2, most_rows):
        passes[num_rows] = _pass_s(parallel, runner, _prompts(num_rows, context, runner.geometry.block_size), clock)
        if _of_slowest(parallel, clock() - began_at, device) > _PASSES_S:
            break
    runner.pool[0].zero_()
    return NanoBatchCosts(runner.num_sums, sums, passes)


def note_of(costs: NanoBatchCosts, first_rows: Mapping[int, int], row_bytes: int) -> str:
    """What `motet status` adds to the kernels."""
    sums = costs.sums
    speed = f" at {row_bytes / sums.row_s / 1e6:.0f} MB/s" if sums.row_s > 0 else ""
    chosen = f"nano-batches from {min(first_rows)} rows on" if first_rows else "no nano-batches"
    return f"; {chosen}: sums{speed} after {sums.sum_s * 1e3:.2f} ms, {sums.busy_share:.0%} of it computing"


def measured_sums(parallel: Parallel, row: torch.Tensor, num_rows: int, clock: Clock = time.perf_counter) -> SumCosts:
    """A line through the sums of one row, `[1, hidden]`, and of `num_rows`, at least two."""
    one_s, _ = _sum_s(parallel, row, clock)
    all_s, busy_share = _sum_s(parallel, row.repeat(num_rows, 1), clock)
    row_s = max(all_s - one_s, 0.0) / (num_rows - 1)
    wait_s = 0.0 if row.device.type == "cuda" else CPU_WAIT_S
    return SumCosts(max(one_s - row_s, 0.0), row_s, busy_share, wait_s)


def _sum_s(parallel: Parallel, x: torch.Tensor, clock: Clock) -> tuple[float, float]:
    """Seconds of a sum, and the share of them in which the worker's threads computed: none on a GPU."""
    times: list[float] = []
    parallel.all_reduce(x)  # waits for workers that are behind
    _end_of(x)
    busy_s, began_at = time.process_time(), clock()
    for _ in range(_NUM_SUMS):
        began_one_at = clock()
        parallel.all_reduce(x)
        _end_of(x)
        times.append(clock() - began_one_at)
    busy_s, took_s = time.process_time() - busy_s, clock() - began_at
    share = 0.0 if x.device.type == "cuda" else min(busy_s / max(took_s, 1e-9), 1.0)
    return _of_slowest(parallel, statistics.median(times), x.device), _of_slowest(parallel, share, x.device)


def _pass_s(parallel: Parallel, runner: Runner, plan: StepPlan, clock: Clock) -> float:
    """Seconds on the slowest worker; all compute at once, as in a step."""
    times: list[float] = []
    for _ in range(_NUM_PASSES):
        began_at = clock()
        _end_of(runner.logits(plan))
        times.append(clock() - began_at)
    return _of_slowest(parallel, min(times[1:]), runner.pool.device)  # the first may compile


def _prompts(num_rows: int, context: int, block_size: int) -> StepPlan:
    """Prompts on the pool's first page, which no sequence has yet."""
    lengths = [min(context, num_rows - start) for start in range(0, num_rows, context)]
    sequences = (
        SequencePlan(index, (0,) * length, 0, packed([0]) * -(-length // block_size), None, None)
        for index, length in enumerate(lengths)
    )
    return StepPlan(0, tuple(sequences), (), ())


def _of_slowest(parallel: Parallel, seconds: float, device: torch.device) -> float:
    return float(parallel.all_gather(torch.tensor([seconds], dtype=torch.float64, device=device)).max())


def _end_of(x: torch.Tensor) -> None:
    if x.device.type == "cuda":
        torch.cuda.synchronize(x.device)
