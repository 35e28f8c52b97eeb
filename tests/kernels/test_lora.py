"""LoRA over pages against one dense product per row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.adapters.adapter import MODULES, BaseShape
from motet.adapters.packing.layout import AdapterLayout
from motet.kernels.lora import ABSENT, LoraGeometry, LoraSegment, ModuleSlice, PagedAdapter
from motet.kernels.plain.lora import PlainLora

pytestmark = pytest.mark.slow
SHAPE = BaseShape(
    num_layers=2,
    modules={
        "q_proj": (48, 64),
        "k_proj": (48, 32),
        "v_proj": (48, 32),
        "o_proj": (64, 48),
        "gate_proj": (48, 80),
        "up_proj": (48, 80),
        "down_proj": (80, 48),
    },
)
LAYOUT = AdapterLayout(SHAPE, slab=4 * 2 * 32, dtype="float32")
GEOMETRY = LoraGeometry(2, LAYOUT.slab, LAYOUT.tile, tuple(SHAPE.modules[m] for m in MODULES))
GROUPS = ((0, 1, 2), (3,), (4, 5), (6,))
NUM_PAGES = 1500
# Products of bfloat16 operands round to 8 bits after the shrink and after the expand.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 4e-2}


def place(
    ranks: dict[str, int], free: list[int], pool: torch.Tensor, generator: torch.Generator
) -> tuple[PagedAdapter, dict[tuple[int, str], tuple[torch.Tensor, torch.Tensor]]]:
    """A random adapter in random pages of the pool, and its dense matrices by (layer, module)."""
    pages = tuple(free.pop() for _ in range(LAYOUT.num_pages(ranks)))
    offsets = LAYOUT.offsets(ranks)
    dense = {}
    for layer in range(SHAPE.num_layers):
        virtual = torch.zeros(len(pages) * LAYOUT.slab)
        for module, at in offsets.items():
            num_in, num_out = SHAPE.modules[module]
            a = torch.randn(at.rank, num_in, generator=generator) / num_in**0.5
            b = torch.randn(at.rank, num_out, generator=generator) / at.rank**0.5
            virtual[at.a : at.b] = a.flatten()
            virtual[at.b : at.b + at.rank * num_out] = b.flatten()
            dense[layer, module] = (a, b)
        pool[list(pages), layer] = virtual.view(len(pages), -1).to(pool.dtype)
    slices = tuple(
        ModuleSlice(offsets[m].rank, offsets[m].rank, offsets[m].a, offsets[m].b) if m in offsets else ABSENT
        for m in MODULES
    )
    return PagedAdapter(pages, slices), dense


ranks_of_adapter = st.dictionaries(st.sampled_from(MODULES), st.sampled_from([1, 2, 3, 8, 16, 33]), min_size=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(deadline=None, max_examples=20)
@given(
    batch=st.lists(st.tuples(st.one_of(st.none(), ranks_of_adapter), st.integers(1, 12)), min_size=1, max_size=12),
    seed=st.integers(0, 2**20),
)
def test_rows_get_their_own_adapters_share(
    dtype: torch.dtype, batch: list[tuple[dict[str, int] | None, int]], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    # Foreign pages hold huge numbers, so reading one shows.
    pool = torch.full((NUM_PAGES, SHAPE.num_layers, LAYOUT.slab), 1e4, dtype=dtype)
    free = torch.randperm(NUM_PAGES, generator=generator).tolist()
    segments, dense, start = [], {}, 0
    for ranks, num_rows in batch:
        if ranks is not None:
            adapter, matrices = place(ranks, free, pool, generator)
            segments.append(LoraSegment(start, start + num_rows, adapter))
            dense[start] = matrices
        start += num_rows
    lora = PlainLora()
    prepared = lora.prepare(segments, GEOMETRY, pool.device)
    for layer in range(SHAPE.num_layers):
        for modules in GROUPS:
            x = torch.randn(start, GEOMETRY.sides[modules[0]][0], generator=generator).to(dtype)
            y = torch.randn(start, sum(GEOMETRY.sides[m][1] for m in modules), generator=generator).to(dtype)
            expected = y.float()
            for segment in segments:
                rows, column = slice(segment.start, segment.end), 0
                for module in modules:
                    num_out = GEOMETRY.sides[module][1]
                    if (layer, MODULES[module]) in dense[segment.start]:
                        a, b = dense[segment.start][layer, MODULES[module]]
                        expected[rows, column : column + num_out] += x[rows].float() @ a.T @ b
                    column += num_out
            at_once = y.clone()
            shrunk = lora.shrink(x, pool, layer, prepared, modules).unsqueeze(0)
            lora.expand(y, shrunk, pool, layer, prepared, modules)
            lora.add(at_once, x, pool, layer, prepared, modules)
            assert torch.equal(at_once, y)
            torch.testing.assert_close(y.float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_an_overflow_in_a_neighbour_reaches_no_other_row() -> None:
    generator = torch.Generator().manual_seed(0)
    pool = torch.zeros(NUM_PAGES, SHAPE.num_layers, LAYOUT.slab)
    free = list(range(NUM_PAGES))
    good, dense = place({"q_proj": 4}, free, pool, generator)
    bad, _ = place({"q_proj": 4}, free, pool, generator)
    pool[list(bad.pages)] = 3e38
    segments = [LoraSegment(0, 1, good), LoraSegment(1, 2, bad), LoraSegment(2, 3, good)]
    lora = PlainLora()
    prepared = lora.prepare(segments, GEOMETRY, pool.device)
    x, y = torch.randn(3, 48, generator=generator), torch.zeros(3, 64)
    shrunk = lora.shrink(x, pool, 0, prepared, (0,)).unsqueeze(0)
    lora.expand(y, shrunk, pool, 0, prepared, (0,))
    a, b = dense[0, "q_proj"]
    torch.testing.assert_close(y[[0, 2]], x[[0, 2]] @ a.T @ b, atol=1e-4, rtol=1e-4)
    assert not y[1].isfinite().all()
