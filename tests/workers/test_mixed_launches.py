"""What the host launches for a step with a prompt, counted on a stand-in GPU."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="Triton is for Linux on x86-64")

from motet.benchmarks.gpu.engine_bench import DRY_SIZE, TINY, Bench
from motet.benchmarks.gpu.machine import Machine
from motet.kernels.backend import triton_kernels
from motet.tests.rigs.stand_in_gpu.stand_in_gpu import stand_in_gpu
from motet.tests.rigs.stand_in_gpu.step_counts import count_mixed, counted, mixed_plan
from motet.workers.execution.runner import Runner

OF_A_LAYER = 4  # a graph, attention of decodes, of the prompt, and a copy


@pytest.mark.parametrize("num_adapters", [0, 2])
def test_a_layer_is_one_graph_and_its_attention(num_adapters: int) -> None:
    """Whatever else a layer does, adapters included."""
    device, launches, before = torch.device("cuda", 0), list[float](), list[float]()
    for num_layers in (1, 3):
        size = replace(DRY_SIZE, config=TINY | {"num_hidden_layers": num_layers})
        with stand_in_gpu() as gpu, counted(gpu) as counter, mock.patch.object(Runner, "warm_up"):
            bench = Bench(Machine(device, torch.float32, is_dry=False), size, triton_kernels(device, torch.float32))
            recorded, launched = count_mixed(bench, counter, mixed_plan(2, 20, 40, num_adapters))
            bench.engine.close()
            gpu.problems.clear()  # kernels that compute nothing write nothing either
            del bench
        launches.append(recorded.launches)
        before.append(launched.launches)
    of_a_layer, of_a_layer_before = ((after - first) / 2 for first, after in (launches, before))
    assert of_a_layer == OF_A_LAYER
    assert of_a_layer_before > 2 * of_a_layer
