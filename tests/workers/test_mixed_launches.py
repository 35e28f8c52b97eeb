"""What the host launches for a step with a prompt, counted on a stand-in GPU."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import msgspec
import pytest
import torch

pytest.importorskip("triton", reason="Triton is for Linux on x86-64")

from motet.adapters.adapter import MODULES
from motet.benchmarks.gpu.engine_bench import BLOCK, DRY_SIZE, RANK, TINY, Bench
from motet.benchmarks.gpu.machine import Machine
from motet.kernels.backend import triton_kernels
from motet.tests.rigs.stand_in_gpu.operations import EMPTY
from motet.tests.rigs.stand_in_gpu.stand_in_gpu import StandInGpu, stand_in_gpu
from motet.tests.rigs.stand_in_gpu.step_counts import counted
from motet.workers.execution.runner import Runner
from motet.workers.execution.warm_up import Rows, as_plan
from motet.workers.plan import Residence, StepPlan

LAYERS = 32


def mixed_plan(has_adapters: bool) -> StepPlan:
    """Two sequences decode beside 20 tokens of a prompt."""
    adapters = [Residence(str(index), dict.fromkeys(MODULES, RANK), (0,) * 64) for index in range(3)]
    plan = as_plan((Rows(20, 0, 0), Rows(1, 1000, 1), Rows(1, 1000, 2)), 1, BLOCK, adapters)
    if has_adapters:
        return plan
    alone = tuple(msgspec.structs.replace(sequence, adapter=None) for sequence in plan.sequences)
    return msgspec.structs.replace(plan, sequences=alone, adapters=())


def launches(bench: Bench, gpu: StandInGpu, plan: StepPlan) -> int:
    """By the host, graphs counted as one. Nothing is launched for memory that is only taken."""
    bench.runner.logits(plan)  # the adapters' tables are there
    gpu.tally.clear()
    bench.runner.logits(plan)
    return sum(number for name, number in gpu.tally.launches.items() if name not in EMPTY)


def recorded_and_launched(num_layers: int, plan: StepPlan) -> tuple[int, int]:
    """Launches of the plan's step as it is recorded, and as it is launched kernel by kernel."""
    device = torch.device("cuda", 0)
    config = TINY | {"num_hidden_layers": num_layers, "max_position_embeddings": 2048}
    size = replace(DRY_SIZE, config=config, pool_bytes=16 << 20)
    with stand_in_gpu() as gpu, counted(gpu), mock.patch.object(Runner, "warm_up"):
        bench = Bench(Machine(device, torch.float32, is_dry=False), size, triton_kernels(device, torch.float32))
        recorded = launches(bench, gpu, plan)
        bench.runner._mixed_graphs = None
        launched = launches(bench, gpu, plan)
        bench.engine.close()
        gpu.problems.clear()  # kernels that compute nothing write nothing either
        del bench
    return recorded, launched


@pytest.mark.parametrize(("has_adapters", "expected"), [(False, (173, 369)), (True, (173, 625))])
def test_a_layer_is_one_graph_and_its_attention(has_adapters: bool, expected: tuple[int, int]) -> None:
    """Whatever else a layer does, adapters included; each layer adds the same, so that two models are enough."""
    plan = mixed_plan(has_adapters)
    one, two = recorded_and_launched(1, plan), recorded_and_launched(2, plan)
    assert two[0] - one[0] == 5, "a graph, three kernels of attention, a copy"
    assert tuple(a + (b - a) * (LAYERS - 1) for a, b in zip(one, two, strict=True)) == expected
