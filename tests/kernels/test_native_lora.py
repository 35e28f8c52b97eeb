"""The native LoRA kernels against the plain twin and dense products, for this CPU and CPUs with fewer instructions.

`tests/kernels/test_sanitizers.py` runs this file once more, with sanitizers compiled in.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.adapters.adapter import MODULES, OUTPUTS, BaseShape
from motet.adapters.packing.layout import AdapterLayout
from motet.kernels.backend import Kernels
from motet.kernels.lora import ABSENT, LoraGeometry, LoraSegment, ModuleSlice, PagedAdapter
from motet.kernels.output_vectors import PlainOutputs
from motet.kernels.plain.lora import PlainLora
from motet.tests.rigs.native_builds import EXAMPLES, HERE, close, load_build

CPU = torch.device("cpu")
GUARD = 5  # columns of NaN beside x and y, and rows after the last of y: reads and writes there are noticed

RANKS = [1, 2, 3, 8, 17, 64, 256, 1024]
ranks_of_adapter = st.dictionaries(st.sampled_from(MODULES), st.sampled_from(RANKS), min_size=1)


@settings(deadline=None, max_examples=EXAMPLES)
@given(
    batch=st.lists(st.tuples(st.one_of(st.none(), ranks_of_adapter), st.integers(1, 40)), min_size=1, max_size=6),
    slab=st.sampled_from([96, 256, 6144]),
    seed=st.integers(0, 2**20),
)
def test_lora(
    native: tuple[Kernels, torch.dtype], batch: list[tuple[dict[str, int] | None, int]], slab: int, seed: int
) -> None:
    """Against the twin: mixed ranks, absent modules, rows without adapters; NaN everywhere else in the pool."""
    kernels, dtype = native
    generator = torch.Generator().manual_seed(seed)
    hidden, kv, wide = 48, 16, 80
    sides = dict(zip(MODULES, [(hidden, hidden), (hidden, kv), (hidden, kv), (hidden, hidden)], strict=False))
    sides |= {"gate_proj": (hidden, wide), "up_proj": (hidden, wide), "down_proj": (wide, hidden)}
    layout = AdapterLayout(BaseShape(2, sides), slab, "float32")
    geometry = LoraGeometry(2, slab, layout.tile, tuple(sides[module] for module in MODULES))
    num_pages = sum(layout.num_pages(ranks) for ranks, _ in batch if ranks) + 3
    free = torch.randperm(num_pages, generator=generator).tolist()
    pool = torch.full((num_pages, 2, slab), torch.nan, dtype=dtype)
    segments, start = [], 0
    for ranks, num_rows in batch:
        if ranks:
            pages = tuple(free.pop() for _ in range(layout.num_pages(ranks)))
            content = torch.full((len(pages) * slab,), torch.nan)  # a page's tail may be anything
            size = layout.num_elements(ranks)
            content[:size] = torch.randn(size, generator=generator) * 0.1
            pool[list(pages), 1] = content.view(-1, slab).to(dtype)
            at = layout.offsets(ranks)
            places = (ModuleSlice(at[m].rank, at[m].rank, at[m].a, at[m].b) if m in at else ABSENT for m in MODULES)
            segments.append(LoraSegment(start, start + num_rows, PagedAdapter(pages, tuple(places))))
        start += num_rows
    twin = PlainLora()
    prepared, twin_prepared = kernels.lora.prepare(segments, geometry, CPU), twin.prepare(segments, geometry, CPU)
    for modules in ((0, 1, 2), (3,), (4, 5), (6,)):
        x = torch.randn(start, geometry.sides[modules[0]][0], generator=generator).to(dtype)
        y = torch.randn(start, sum(geometry.sides[m][1] for m in modules), generator=generator).to(dtype)
        expected, at_once = y.clone(), y.clone()
        twin.expand(
            expected, twin.shrink(x, pool, 1, twin_prepared, modules).unsqueeze(0), pool, 1, twin_prepared, modules
        )
        shrunk = kernels.lora.shrink(x, pool, 1, prepared, modules).unsqueeze(0)
        kernels.lora.expand(y, shrunk, pool, 1, prepared, modules)
        close(y, expected)
        kernels.lora.add(at_once, x, pool, 1, prepared, modules)
        assert torch.equal(at_once, y)


@dataclass(frozen=True)
class Placed:
    """A segment whose adapter lies in the pools of a gang's workers."""

    num_rows: int
    matrices: list[tuple[torch.Tensor, torch.Tensor] | None]  # A `[rank, in]`, B `[rank, out]` by module; None: absent
    by_worker: list[PagedAdapter]


def place(
    batch: Sequence[tuple[Sequence[int], int]],
    num_in: int,
    outs: Sequence[int],
    slab: int,
    degree: int,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> tuple[list[torch.Tensor], list[Placed]]:
    """Pools `[num_pages, 2, slab]` of `degree` workers, and the segments' adapters in pages of any order of layer 1.

    `batch`: (rank of each module, rows) of each segment. Each worker has a part of A's rows and all of B; all else in
    the pools is NaN, the tails of last pages included. Widths need not be multiples of anything.
    """
    found, contents = [], []
    for ranks, num_rows in batch:
        ranks = [-(-rank // degree) * degree for rank in ranks]
        matrices = [
            (
                torch.randn(rank, num_in, generator=generator).to(dtype) / num_in**0.5,
                torch.randn(rank, out, generator=generator).to(dtype) / rank**0.5,
            )
            if rank
            else None
            for rank, out in zip(ranks, outs, strict=True)
        ]
        arrays, places = [[torch.empty(0, dtype=dtype)] for _ in range(degree)], []
        start = 0
        for both, out in zip(matrices, outs, strict=True):
            if both is None:
                places.append(ABSENT)
                continue
            share = len(both[0]) // degree
            places.append(ModuleSlice(share * degree, share, start, start + share * num_in))
            start += share * num_in + share * degree * out
            for worker, array in enumerate(arrays):
                array += [both[0][worker * share : (worker + 1) * share].flatten(), both[1].flatten()]
        num_pages = -(-start // slab)
        for array in arrays:
            array.append(torch.full((num_pages * slab - start,), torch.nan, dtype=dtype))
        contents.append([torch.cat(array).view(-1, slab) for array in arrays])
        found.append((num_rows, matrices, tuple(places), num_pages))
    total = sum(num_pages for *_, num_pages in found) + 2
    free = torch.randperm(total, generator=generator)
    pools = [torch.full((total, 2, slab), torch.nan, dtype=dtype) for _ in range(degree)]
    segments, first = [], 0
    for (num_rows, matrices, slices, num_pages), own in zip(found, contents, strict=True):
        pages = free[first : first + num_pages]
        first += num_pages
        for pool, content in zip(pools, own, strict=True):
            pool[pages, 1] = content
        segments.append(Placed(num_rows, matrices, [PagedAdapter(tuple(pages.tolist()), slices)] * degree))
    return pools, segments


def check_against_dense_products(
    native: tuple[Kernels, torch.dtype],
    batch: Sequence[tuple[Sequence[int], int]],
    num_in: int,
    outs: Sequence[int],
    slab: int,
    degree: int,
    seed: int,
) -> None:
    """Checks modules that share an input (see `place`), and that nothing outside x and y is read or written."""
    kernels, dtype = native
    generator = torch.Generator().manual_seed(seed)
    pools, placed = place(batch, num_in, outs, slab, degree, dtype, generator)
    num_rows, num_out, modules = sum(one.num_rows for one in placed), sum(outs), tuple(range(len(outs)))
    around_x = torch.full((num_rows, num_in + 2 * GUARD), torch.nan, dtype=dtype)
    around_y = torch.full((num_rows + GUARD, num_out + 2 * GUARD), torch.nan, dtype=dtype)
    x, y = around_x[:, GUARD : GUARD + num_in], around_y[:num_rows, GUARD : GUARD + num_out]
    x.copy_(torch.randn(x.shape, generator=generator))
    y.copy_(torch.randn(y.shape, generator=generator))
    expected, start, of_worker = around_y.clone(), 0, [list[LoraSegment]() for _ in pools]
    for one in placed:
        end, column = start + one.num_rows, GUARD
        for both, out in zip(one.matrices, outs, strict=True):
            if both is not None:
                shrunk = (x[start:end].float() @ both[0].float().T).to(dtype)
                expected[start:end, column : column + out] += (shrunk.float() @ both[1].float()).to(dtype)
            column += out
        if any(both is not None for both in one.matrices):  # else its rows are the base's
            for segments, adapter in zip(of_worker, one.by_worker, strict=True):
                segments.append(LoraSegment(start, end, adapter))
        start = end
    geometry = LoraGeometry(2, slab, 1, tuple((num_in, out) for out in outs))
    prepared = [kernels.lora.prepare(segments, geometry, CPU) for segments in of_worker]
    gathered = torch.stack(
        [kernels.lora.shrink(x, pool, 1, one, modules) for pool, one in zip(pools, prepared, strict=True)]
    )
    for pool, one in zip(pools, prepared, strict=True):
        actual = around_y.clone()
        kernels.lora.expand(actual[:num_rows, GUARD : GUARD + num_out], gathered, pool, 1, one, modules)
        torch.testing.assert_close(actual.isnan(), expected.isnan())
        close(actual.nan_to_num(), expected.nan_to_num())


@settings(deadline=None, max_examples=EXAMPLES)
@given(
    batch=st.lists(
        st.tuples(
            st.tuples(*[st.sampled_from([0, 1, 2, 3, 8, 17, 64, 256])] * 3), st.sampled_from([1, 1, 1, 1, 2, 5, 37])
        ),
        min_size=1,
        max_size=20,
    ),
    num_in=st.integers(1, 150),
    outs=st.tuples(*[st.integers(1, 150)] * 3),
    slab=st.sampled_from([24, 100, 512, 6144]),
    degree=st.integers(1, 3),
    seed=st.integers(0, 2**20),
)
def test_any_widths_in_gangs_of_any_size(
    native: tuple[Kernels, torch.dtype],
    batch: list[tuple[tuple[int, ...], int]],
    num_in: int,
    outs: tuple[int, ...],
    slab: int,
    degree: int,
    seed: int,
) -> None:
    """Mostly segments of one row, as in decodes; rows that cross pages, and pages of many rows; parts of A's rows."""
    check_against_dense_products(native, batch, num_in, outs, slab, degree, seed)


@pytest.mark.parametrize("count", [1, 7, 8, 9, 40])
def test_single_rows_fewer_and_more_than_readers(native: tuple[Kernels, torch.dtype], count: int) -> None:
    """All ranks side by side, so that readers end at different times; other segments and rows of the base between."""
    ranks = [1, 256, 3, 8, 64, 17, 2, 33]
    singles = [((ranks[i % 8], 0, ranks[(i + 3) % 8]), 1) for i in range(count)]
    for slab, degree in ((24, 1), (4096, 2)):  # a row lies in several pages; rows lie in one or two
        check_against_dense_products(native, singles, 70, (130, 5, 49), slab, degree, seed=count)
    between = [*singles[: count // 2], ((8, 8, 8), 6), ((0, 0, 0), 3), *singles[count // 2 :]]
    check_against_dense_products(native, between, 576, (160, 64, 32), 1536, 1, seed=count)


@pytest.mark.parametrize(("num_in", "outs"), [(3300, (64, 40, 8)), (200, (1700, 40, 2100)), (1600, (1540, 1536, 1530))])
def test_single_rows_too_wide_for_readers_in_turn(
    native: tuple[Kernels, torch.dtype], num_in: int, outs: tuple[int, ...]
) -> None:
    """Wide and narrow modules side by side; for wide ones there is a single reader."""
    singles = [((8, 3, 16), 1), ((1, 0, 8), 1), ((17, 8, 0), 1), ((4, 4, 4), 2)]
    check_against_dense_products(native, 8 * singles, num_in, outs, 6144, 1, seed=num_in)


def test_lora_of_nothing(native: tuple[Kernels, torch.dtype]) -> None:
    kernels, dtype = native
    geometry, pool = LoraGeometry(1, 96, 16, ((48, 48),)), torch.full((2, 1, 96), torch.nan, dtype=dtype)
    y = torch.ones(3, 48, dtype=dtype)
    for segments in ([], [LoraSegment(0, 3, PagedAdapter((1,), (ABSENT,)))]):
        prepared = kernels.lora.prepare(segments, geometry, CPU)
        shrunk = kernels.lora.shrink(torch.ones(3, 48, dtype=dtype), pool, 0, prepared, (0,))
        assert shrunk.shape == (0,)
        kernels.lora.expand(y, shrunk.unsqueeze(0), pool, 0, prepared, (0,))
    assert (y == 1).all()


@pytest.mark.parametrize("width", [80, 3200])
def test_a_rows_lora_does_not_depend_on_who_else_is_there(native: tuple[Kernels, torch.dtype], width: int) -> None:
    """Equal to the last bit: alone, among other rows of its adapter, and beside segments of other adapters."""
    kernels, dtype = native
    generator = torch.Generator().manual_seed(0)
    rank = 37
    pool = torch.randn(8, 1, 2 * rank * width // 4, generator=generator).to(dtype)
    place = ModuleSlice(rank, rank, 0, rank * width)
    mine, other = PagedAdapter((5, 2, 7, 0), (place,)), PagedAdapter((1, 3, 4, 6), (place,))
    geometry = LoraGeometry(1, pool.shape[2], 1, ((width, width),))
    x = torch.randn(1, width, generator=generator).to(dtype)
    found = []
    for before, rows, each in (
        (0, 1, 1),
        (0, 2, 1),
        (0, 4, 1),
        (0, 7, 1),
        (0, 40, 1),
        (3, 1, 3),
        (30, 9, 30),
        (19, 1, 1),
    ):
        segments = [LoraSegment(start, start + each, other) for start in range(0, before, each)]
        segments.append(LoraSegment(before, before + rows, mine))
        prepared, inputs = kernels.lora.prepare(segments, geometry, CPU), x.expand(before + rows, width).contiguous()
        y = torch.zeros(before + rows, width, dtype=dtype)
        shrunk = kernels.lora.shrink(inputs, pool, 0, prepared, (0,))
        kernels.lora.expand(y, shrunk.unsqueeze(0), pool, 0, prepared, (0,))
        found.append(y[before:])
    for y in found:
        assert (y == found[0][0]).all()


def test_callers_on_several_threads_do_not_meet() -> None:
    """Buffers that are kept from call to call belong to one thread each."""
    kernels, rank, width = load_build((torch.float32, 1, HERE)).lora, 64, 512
    pool = torch.randn(1, 1, 2 * rank * width, generator=torch.Generator().manual_seed(0)) * 0.05
    geometry = LoraGeometry(1, pool.shape[2], 1, ((width, width),))
    segment = LoraSegment(0, 40, PagedAdapter((0,), (ModuleSlice(rank, rank, 0, rank * width),)))

    def add_often(seed: int) -> list[torch.Tensor]:
        batch, found = kernels.prepare([segment], geometry, CPU), []
        x = torch.randn(40, width, generator=torch.Generator().manual_seed(seed))
        for _ in range(60):
            y = torch.zeros(40, width)
            kernels.add(y, x, pool, 0, batch, (0,))
            found.append(y)
        return found

    with ThreadPoolExecutor(4) as threads:
        for found in threads.map(add_often, range(4)):
            assert all(torch.equal(found[0], y) for y in found)


@settings(deadline=None, max_examples=EXAMPLES)
@given(
    batch=st.lists(st.tuples(st.sets(st.sampled_from(MODULES)), st.integers(1, 40)), min_size=1, max_size=6),
    slab=st.sampled_from([96, 256, 6144]),
    seed=st.integers(0, 2**20),
)
def test_scales_and_shifts(
    native: tuple[Kernels, torch.dtype], batch: list[tuple[set[str], int]], slab: int, seed: int
) -> None:
    """Against the twin, and to the last bit row by row; NaN everywhere else in the pool."""
    kernels, dtype = native
    generator, twin = torch.Generator().manual_seed(seed), PlainOutputs()
    sides = dict.fromkeys(MODULES, (48, 48)) | {"k_proj": (48, 16), "v_proj": (48, 24)}
    layout = AdapterLayout(BaseShape(2, sides), slab, "float32")
    geometry = LoraGeometry(2, slab, layout.tile, tuple(sides[module] for module in MODULES))
    pool = torch.full((400, 2, slab), torch.nan, dtype=dtype)
    free = torch.randperm(len(pool), generator=generator).tolist()
    segments, start = list[LoraSegment](), 0
    for modules, num_rows in batch:
        ranks = {"q_proj": 2} | {f"{module}{OUTPUTS}": 2 for module in modules}
        pages = tuple(free.pop() for _ in range(layout.num_pages(ranks)))
        size = layout.num_elements(ranks)
        content = torch.full((len(pages) * slab,), torch.nan)
        content[:size] = torch.randn(size, generator=generator)
        pool[list(pages), 1] = content.view(-1, slab).to(dtype)
        at = layout.offsets(ranks)
        starts = tuple(at[module].outputs if module in at else None for module in MODULES) if modules else ()
        segments.append(LoraSegment(start, start + num_rows, PagedAdapter(pages, (ABSENT,) * 7, outputs=starts)))
        start += num_rows
    prepared, expected = (each.prepare(segments, geometry, CPU) for each in (kernels.outputs, twin))
    if expected is None:
        assert prepared is None
        return
    for group in ((0, 1, 2), (3,), (4, 5)):
        width = sum(geometry.sides[module][1] for module in group)
        whole = torch.full((start + 1, width + GUARD), torch.nan, dtype=dtype)
        whole[:-1, :width] = torch.randn(start, width, generator=generator).to(dtype)
        y, by_row, by_twin = whole.clone(), whole.clone(), whole[:-1, :width].clone()
        kernels.outputs.apply(y[:-1, :width], pool, 1, prepared, group)
        twin.apply(by_twin, pool, 1, expected, group)
        close(y[:-1, :width], by_twin)
        assert y[-1].isnan().all() and y[:, width:].isnan().all()
        for each in segments:
            for row in range(each.start, each.end):
                alone = kernels.outputs.prepare([LoraSegment(row, row + 1, each.adapter)], geometry, CPU)
                if alone is not None:
                    kernels.outputs.apply(by_row[:-1, :width], pool, 1, alone, group)
        assert torch.equal(y[:-1, :width], by_row[:-1, :width])
