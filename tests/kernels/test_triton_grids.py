"""What is launched of the largest steps, on tensors without memory: CUDA takes 65,535 programs along y and z."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton", reason="Triton is for Linux on x86-64")

from motet.kernels.lora import LoraGeometry, LoraSegment, ModuleSlice, PagedAdapter
from motet.tests.rigs.kernel_launches import (
    HEADS,
    KERNELS,
    META,
    RECURRENCE,
    attend,
    bf16,
    delta,
    experts,
    float8,
    lora,
    mamba,
    recur,
)
from motet.tests.rigs.launch_grid import grid_problem
from motet.tests.rigs.triton_compile import Launch, recorded

MOST_ROWS = 131_072  # the longest context, as one step
MOST_SEQUENCES = 8192
TOP_K, NUM_EXPERTS = 8, 128
EXPERT_SIDES = ((2048, 768), (2048, 768), (768, 2048))  # Qwen3-30B-A3B


def expert_lora(num_rows: int, num_segments: int) -> None:
    """Rows of as many adapters of all experts, one after the other."""
    groups = KERNELS.experts.group(
        torch.empty(num_rows, TOP_K, dtype=torch.int64, device=META),
        torch.empty(num_rows, TOP_K, device=META),
        0,
        NUM_EXPERTS,
    )
    KERNELS.experts.combine(bf16(num_rows * TOP_K, 2048), groups, num_rows)
    geometry = LoraGeometry(48, 16384, 256, EXPERT_SIDES)
    expert = PagedAdapter((0,), (ModuleSlice(16, 16, 0, 0),) * 3)
    adapter, rows = PagedAdapter(expert.pages, (), (expert,) * NUM_EXPERTS), num_rows // num_segments
    segments = [LoraSegment(index * rows, (index + 1) * rows, adapter) for index in range(num_segments)]
    prepared = KERNELS.expert_lora.prepare(segments, geometry, META)
    batch = KERNELS.expert_lora.of_pairs(prepared, groups, 0)
    pool = bf16(2000, 48, 16384)
    for modules in ((0, 1), (2,)):
        (num_in, _), outputs = EXPERT_SIDES[modules[0]], [EXPERT_SIDES[module][1] for module in modules]
        x, y = bf16(num_rows * TOP_K, num_in), bf16(num_rows * TOP_K, sum(outputs))
        KERNELS.lora.expand(y, KERNELS.lora.shrink(x, pool, 3, batch, modules).unsqueeze(0), pool, 3, batch, modules)


def rows() -> None:
    KERNELS.add_rms_norm(bf16(MOST_ROWS, 4096), bf16(MOST_ROWS, 4096), bf16(4096), 1e-5)
    KERNELS.rms_norm(bf16(MOST_ROWS, HEADS, 128), bf16(128), 1e-5)
    KERNELS.gated(bf16(MOST_ROWS, 2 * 53_248), "silu")  # Llama-3.1-405B
    float8()


CASES: dict[str, tuple[Callable[[], None], set[str]]] = {
    "decodes": (lambda: attend((1,) * MOST_SEQUENCES), {"split_kernel", "decode_kernel", "combine_kernel"}),
    "chunks": (
        lambda: attend((MOST_ROWS - MOST_SEQUENCES, *(1,) * MOST_SEQUENCES)),
        {"split_kernel", "decode_kernel", "combine_kernel", "chunk_kernel"},
    ),
    "a row of each adapter": (lambda: lora(MOST_SEQUENCES, 1), {"shrink_kernel", "expand_kernel"}),
    "rows of all adapters": (lambda: lora(MOST_SEQUENCES, 16), {"shrink_kernel", "expand_kernel"}),
    "one adapter": (lambda: lora(1, MOST_ROWS), {"shrink_kernel", "expand_kernel"}),
    "480 adapters of experts": (
        lambda: expert_lora(8192, 480),
        {"group_kernel", "combine_pairs_kernel", "pair_tiles_kernel", "shrink_kernel", "expand_kernel"},
    ),
    "all adapters of experts": (
        lambda: expert_lora(MOST_ROWS, 1024),
        {"group_kernel", "combine_pairs_kernel", "pair_tiles_kernel", "shrink_kernel", "expand_kernel"},
    ),
    "states of decodes": (lambda: recur(delta(16, 64), MOST_SEQUENCES, MOST_SEQUENCES), RECURRENCE),
    "states of a prompt": (lambda: recur(mamba(128, 8, 64, 128), MOST_ROWS, 1), RECURRENCE),
    "pairs": (lambda: experts(MOST_ROWS * TOP_K), {"grouped_linear_kernel"}),
    "rows": (rows, {"norm_kernel", "gated_kernel", "quantise_kernel"}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_largest_steps_can_be_launched(case: str) -> None:
    """`recorded` refuses what cannot. What grows with a step lies along x: the rest does not come near its limit."""
    launches = launches_of(case)
    assert {launch.name for launch in launches} == CASES[case][1]
    for launch in launches:
        assert all(side <= 1024 for side in launch.grid[1:]), (launch.name, launch.grid)


def launches_of(case: str) -> list[Launch]:
    with recorded() as launches:
        CASES[case][0]()
    return launches


def test_more_tiles_than_y_takes_are_reached() -> None:
    """Or the test above shows nothing."""
    sizes = {launch.name: launch.num_programs for launch in launches_of("480 adapters of experts")}
    assert sizes["shrink_kernel"] >= 65_536 and sizes["expand_kernel"] >= 65_536


def test_grids_that_no_gpu_launches() -> None:
    for grid in ((1, 65_536), (1, 1, 65_536), (2**31,), (0,), (1, 0), (1, 1, 1, 1)):
        assert grid_problem("kernel", grid) is not None, grid
    for grid in ((2**31 - 1, 65_535, 65_535), (1,)):
        assert grid_problem("kernel", grid) is None, grid
