"""LoRA over pages in Triton, the device side: rows of A and of B are gathered from the pages, 16 ranks at a time.

The host side is `lora.py`. Gathering each adapter at its own rank is S-LoRA's idea (arXiv 2311.03285, §5.2). Nothing is
added atomically: each split of a shrink writes its own partial sums, and the expand adds them up in order, so that a
result is the same every time.

An entry of `tiles` is some neighbouring rows of one segment, `(first row, number of rows, segment)`; entries with no
rows pad a launch of a fixed grid. `parts` says where each module of a segment lies: `(rank, rows of A, start of A,
start of B)`, in elements of the adapter's virtual array.
"""

from __future__ import annotations

import triton
import triton.language as tl

# As in `attention_device.py`, arguments that change from step to step are excluded from specialisation.
_RANKS = tl.constexpr(16)  # rows of A or B at a time: the fewest that a matrix instruction takes


@triton.jit
def _page_rows(pool, pages, start, live, width, page_stride, SLAB: tl.constexpr, WIDTH: tl.constexpr):
    """`[16, WIDTH]`: row i starts at `start + i * width` of an adapter's virtual array and lies within one slab."""
    rank = tl.arange(0, _RANKS)
    flat = start + rank * width
    page = tl.load(pages + flat // SLAB, mask=live, other=0)
    place = pool + page[:, None] * page_stride + (flat % SLAB)[:, None] + tl.arange(0, WIDTH)[None, :]
    return tl.load(place, mask=live[:, None], other=0.0)


@triton.jit(
    do_not_specialize=["num_rows"],
    do_not_specialize_on_alignment=["tiles", "parts", "first_pages", "pages"],
)
def shrink_kernel(
    x,  # [num_rows, NUM_IN]
    pool,  # [num_pages, ...], points to the layer
    tiles,  # [num_tiles, 3] int64
    parts,  # [num_segments, NUM_MODULES, 4] int64
    first_pages,  # [num_segments] int64
    pages,  # int64, of all segments
    shrunk,  # [modules of this launch, SPLITS, num_rows, ranks] float32
    x_row,
    page_stride,
    num_rows,
    ranks,
    MODULE_0: tl.constexpr,
    MODULE_1: tl.constexpr,
    MODULE_2: tl.constexpr,
    NUM_MODULES: tl.constexpr,
    NUM_IN: tl.constexpr,
    SLAB: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program computes x Aᵀ of one tile and module, over one split of x's columns."""
    slot, split = tl.program_id(0), tl.program_id(2)
    tile = tiles + tl.program_id(1) * 3
    first_row, count = tl.load(tile), tl.load(tile + 1)
    if count == 0:
        return
    segment = tl.load(tile + 2)
    module = MODULE_0
    if slot == 1:
        module = MODULE_1
    if slot == 2:
        module = MODULE_2
    part = parts + (segment * NUM_MODULES + module) * 4
    a_rows, a = tl.load(part + 1).to(tl.int32), tl.load(part + 2).to(tl.int32)
    pages += tl.load(first_pages + segment)
    member, rank, column = tl.arange(0, ROWS), tl.arange(0, _RANKS), tl.arange(0, WIDTH)
    here = member < count
    row = first_row + member
    NUM_STEPS: tl.constexpr = NUM_IN // WIDTH
    SHARE: tl.constexpr = (NUM_STEPS + SPLITS - 1) // SPLITS
    first_step = split * SHARE
    last_step = tl.minimum(first_step + SHARE, NUM_STEPS)
    x_place = x + row[:, None] * x_row + column[None, :]
    place = shrunk + ((slot * SPLITS + split) * num_rows + row)[:, None] * ranks + rank[None, :]
    for first in range(0, a_rows, _RANKS):
        live = first + rank < a_rows
        acc = tl.zeros((ROWS, _RANKS), tl.float32)
        for step in range(first_step, last_step):
            inputs = tl.load(x_place + step * WIDTH, mask=here[:, None], other=0.0)
            weights = _page_rows(pool, pages, a + first * NUM_IN + step * WIDTH, live, NUM_IN, page_stride, SLAB, WIDTH)
            acc = tl.dot(inputs, tl.trans(weights), acc, input_precision=PRECISION)
        tl.store(place + first, acc, mask=here[:, None] & live[None, :])


@triton.jit(
    do_not_specialize=["num_rows", "num_workers"],
    do_not_specialize_on_alignment=["tiles", "parts", "first_pages", "pages"],
)
def expand_kernel(
    y,  # [num_rows, sum of outputs]
    shrunk,  # [num_workers, modules of this launch, SPLITS, num_rows, ranks] float32
    pool,
    tiles,
    parts,
    first_pages,
    pages,
    y_row,
    page_stride,
    num_rows,
    ranks,
    num_workers,
    worker_stride,
    MODULE_0: tl.constexpr,
    MODULE_1: tl.constexpr,
    MODULE_2: tl.constexpr,
    NUM_MODULES: tl.constexpr,
    OUT_0: tl.constexpr,
    OUT_1: tl.constexpr,
    OUT_2: tl.constexpr,
    SLAB: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program adds the output of one tile's adapter to WIDTH columns of y, all of one module."""
    tile = tiles + tl.program_id(1) * 3
    first_row, count = tl.load(tile), tl.load(tile + 1)
    if count == 0:
        return
    segment = tl.load(tile + 2)
    column = tl.program_id(0) * WIDTH
    slot, module, width, own = 0, MODULE_0, OUT_0, column
    if column >= OUT_0:
        slot, module, width, own = 1, MODULE_1, OUT_1, column - OUT_0
    if column >= OUT_0 + OUT_1:
        slot, module, width, own = 2, MODULE_2, OUT_2, column - OUT_0 - OUT_1
    part = parts + (segment * NUM_MODULES + module) * 4
    a_rows, b = tl.load(part + 1).to(tl.int32), tl.load(part + 3).to(tl.int32)
    if a_rows == 0:
        return
    pages += tl.load(first_pages + segment)
    member, rank = tl.arange(0, ROWS), tl.arange(0, _RANKS)
    here = member < count
    row = first_row + member
    acc = tl.zeros((ROWS, WIDTH), tl.float32)
    for worker in range(0, num_workers):
        vectors = shrunk + worker * worker_stride
        for first in range(0, a_rows, _RANKS):
            live = first + rank < a_rows
            there = here[:, None] & live[None, :]
            total = tl.zeros((ROWS, _RANKS), tl.float32)
            for split in tl.static_range(SPLITS):
                place = vectors + ((slot * SPLITS + split) * num_rows + row)[:, None] * ranks + (first + rank)[None, :]
                total += tl.load(place, mask=there, other=0.0)
            start = b + (worker * a_rows + first) * width + own
            weights = _page_rows(pool, pages, start, live, width, page_stride, SLAB, WIDTH)
            acc = tl.dot(total.to(weights.dtype), weights, acc, input_precision=PRECISION)
    y_place = y + row[:, None] * y_row + (column + tl.arange(0, WIDTH))[None, :]
    before = tl.load(y_place, mask=here[:, None], other=0.0).to(tl.float32)
    tl.store(y_place, (before + acc).to(y.dtype.element_ty), mask=here[:, None])
