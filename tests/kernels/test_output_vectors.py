"""Scales and shifts of outputs over pages against one row at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.adapters.adapter import MODULES, OUTPUTS
from motet.kernels.lora import ABSENT, LoraSegment, PagedAdapter
from motet.kernels.output_vectors import PlainOutputs
from motet.tests.kernels.test_lora import GEOMETRY, GROUPS, LAYOUT, NUM_PAGES, SHAPE

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2e-2}  # one rounding of the result
modules_of_adapter = st.sets(st.sampled_from(MODULES), min_size=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(deadline=None, max_examples=30)
@given(
    batch=st.lists(st.tuples(st.one_of(st.none(), modules_of_adapter), st.integers(1, 5)), min_size=1, max_size=10),
    seed=st.integers(0, 2**20),
)
def test_rows_get_their_own_adapters_vectors(
    dtype: torch.dtype, batch: list[tuple[set[str] | None, int]], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    pool = torch.full((NUM_PAGES, SHAPE.num_layers, LAYOUT.slab), float("nan"), dtype=dtype)  # so foreign pages show
    free = torch.randperm(NUM_PAGES, generator=generator).tolist()
    segments, start = list[LoraSegment](), 0
    vectors_of: dict[tuple[int, str], tuple[tuple[int | None, ...], torch.Tensor]] = {}
    for modules, num_rows in batch:
        if modules is not None:
            ranks = {"q_proj": 3} | {f"{module}{OUTPUTS}": 2 for module in modules}
            offsets = LAYOUT.offsets(ranks)
            pages = tuple(free.pop() for _ in range(LAYOUT.num_pages(ranks)))
            array = torch.randn(len(pages), SHAPE.num_layers, LAYOUT.slab, generator=generator).to(dtype)
            pool[list(pages)] = array
            starts = tuple(at.outputs if (at := offsets.get(module)) else None for module in MODULES)
            segments.append(LoraSegment(start, start + num_rows, PagedAdapter(pages, (ABSENT,) * 7, outputs=starts)))
            vectors_of |= {
                (row, module): (starts, array) for row in range(start, start + num_rows) for module in modules
            }
        start += num_rows
    prepared = PlainOutputs().prepare(segments, GEOMETRY, pool.device)
    if not segments:
        assert prepared is None
        return
    rows = [replace(each, start=row, end=row + 1) for each in segments for row in range(each.start, each.end)]
    apart = PlainOutputs().prepare(rows, GEOMETRY, pool.device)
    assert prepared is not None and apart is not None
    for layer in range(SHAPE.num_layers):
        for group in GROUPS:
            names = [MODULES[index] for index in group]
            parts = [torch.randn(start, SHAPE.modules[name][1], generator=generator).to(dtype) for name in names]
            y, expected = torch.cat(parts, dim=1), torch.cat(parts, dim=1).float()
            column = 0
            for index, name in zip(group, names, strict=True):
                width = SHAPE.modules[name][1]
                for row in range(start):
                    if (row, name) in vectors_of:
                        starts, array = vectors_of[row, name]
                        virtual = array[:, layer].reshape(-1)
                        gain, shift = virtual[starts[index] :][: 2 * width].float().view(2, width)
                        expected[row, column : column + width] *= 1 + gain
                        expected[row, column : column + width] += shift
                column += width
            by_row = y.clone()
            PlainOutputs().apply(y, pool, layer, prepared, group)
            torch.testing.assert_close(y.float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
            PlainOutputs().apply(by_row, pool, layer, apart, group)
            assert torch.equal(y, by_row), "a row's result is the same in any batch, to the last bit"


def test_adapters_without_vectors_need_no_batch() -> None:
    segment = LoraSegment(0, 3, PagedAdapter((1, 2), (ABSENT,) * 7))
    assert PlainOutputs().prepare([segment], GEOMETRY, torch.device("cpu")) is None
