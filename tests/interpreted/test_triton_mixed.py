"""Steps with prompts that are recorded, their rows padded: the answers of steps launched kernel by kernel."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from motet.benchmarks.gpu.engine_bench import DRY_SIZE, RANK, Bench
from motet.benchmarks.gpu.machine import Machine
from motet.kernels.backend import triton_kernels
from motet.workers.execution.device_rows import MOST_ROWS
from motet.workers.execution.graphs import Compute, mixed_sizes
from motet.workers.plan import Residence, SamplePlan, SequencePlan, StepPlan, packed
from motet.workers.wire.messages import SamplingParams

CPU, MOST_TOKENS = torch.device("cpu"), 12
SAMPLE = SamplePlan(SamplingParams(temperature=0.0), 0, 0)
ADAPTER_PAGES = 5  # from here on


@dataclass(frozen=True)
class Rerun:
    """Stands in for CUDA graphs: computes again on the same memory."""

    compute: Compute

    def replay(self) -> torch.Tensor:
        return self.compute(lambda between: between())


def mixed_plan(bench: Bench) -> StepPlan:
    """A decode, two prompts of which one goes on later, and an adapter with one of these. Pages 2 to 4 are written."""
    ranks = dict.fromkeys(bench._layout.shape.modules, RANK)
    pages = tuple(range(ADAPTER_PAGES, ADAPTER_PAGES + bench._layout.num_pages(ranks)))
    sequences = (
        SequencePlan(1, (5,), 17, packed([1, 2]), None, SAMPLE),
        SequencePlan(2, (7, 8, 9), 0, packed([3]), "adapter", SAMPLE),
        SequencePlan(3, (11, 12), 4, packed([4]), None, None),
    )
    return StepPlan(1, sequences, (Residence("adapter", ranks, pages),), ())


@torch.inference_mode()
def test_padding_is_not_read_and_writes_nothing() -> None:
    bench = Bench(Machine(CPU, torch.float32, is_dry=True), DRY_SIZE, triton_kernels(CPU, torch.float32))
    runner, plan = bench.runner, mixed_plan(bench)
    runner.pool.copy_(torch.randn(runner.pool.shape, generator=torch.Generator().manual_seed(1)) * 0.1)
    before = runner.pool.clone()
    runner.keep_tables(4, 128)
    expected, pool = runner.logits(plan), runner.pool.clone()
    runner.pool.copy_(before)
    runner.record_mixed(MOST_TOKENS, Rerun)
    assert runner._mixed_graphs is not None
    runner._mixed_graphs._attended.fill_(torch.nan)
    logits = runner.logits(plan)
    assert (runner._mixed_graphs._queries != 0).any(), "the step was launched kernel by kernel"
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(runner.pool, pool, atol=1e-5, rtol=1e-5)
    written = [page for page in range(len(pool)) if not torch.equal(runner.pool[page], before[page])]
    assert written == [2, 3, 4]
    bench.engine.close()


def test_what_no_recording_holds_is_launched_kernel_by_kernel() -> None:
    bench = Bench(Machine(CPU, torch.float32, is_dry=True), DRY_SIZE, triton_kernels(CPU, torch.float32))
    runner, plan = bench.runner, mixed_plan(bench)
    runner.pool.zero_()
    runner.keep_tables(4, 128)
    expected = runner.logits(plan)
    runner.record_mixed(5, Rerun)
    assert runner._mixed_graphs is not None
    assert torch.equal(runner.logits(plan), expected)
    decode = StepPlan(1, plan.sequences[:1], (), ())
    assert runner.logits(decode).shape == (1, expected.shape[1])
    assert not runner._mixed_graphs._queries.any()
    bench.engine.close()


@pytest.mark.parametrize(
    ("max_rows", "sizes"), [(5, [5]), (64, [64]), (100, [64, 100]), (2048, list(range(64, MOST_ROWS + 1, 64)))]
)
def test_padding_stays_under_64_rows(max_rows: int, sizes: list[int]) -> None:
    assert mixed_sizes(max_rows) == sizes
