"""LoRA over pages in Triton, the device side: rows of A and of B are gathered from the pages, 16 ranks at a time.

The host side is `lora.py`. Gathering each adapter at its own rank is S-LoRA's idea (arXiv 2311.03285, §5.2). Nothing is
added atomically: each split of a shrink writes its own partial sums, and the expand adds them up in order, so that a
result is the same every time.

An entry of `tiles` is some neighbouring rows of one segment, `(first row, number of rows, segment)`. The first
`num_tiles` are in use; the others pad a launch of a fixed grid and have no rows. `parts` says where each module of a
segment lies: `(rank, rows of A, start of A, start of B)`, in elements of the adapter's virtual array.
"""

from __future__ import annotations

import triton
import triton.language as tl

# As in `attention_device.py`, arguments that change from step to step are excluded from specialisation.
_RANKS = tl.constexpr(16)  # rows of A or B at a time: the fewest that a matrix instruction takes


@triton.jit
def _pages_of(pages, start, live, width, SLAB: tl.constexpr):
    """The pages of 16 rows; row i starts at `start + i * width` of an adapter's virtual array.

    Loops look them up one round ahead: see `attention_device.pages_of`.
    """
    return tl.load(pages + (start + tl.arange(0, _RANKS) * width) // SLAB, mask=live, other=0)


@triton.jit
def _page_rows(pool, page, start, live, width, page_stride, SLAB: tl.constexpr, WIDTH: tl.constexpr):
    """`[16, WIDTH]`: the rows that `_pages_of` found, each of which lies within one slab."""
    flat = start + tl.arange(0, _RANKS) * width
    place = pool + page[:, None] * page_stride + (flat % SLAB)[:, None] + tl.arange(0, WIDTH)[None, :]
    return tl.load(place, mask=live[:, None], other=0.0)


@triton.jit
def _element(place):
    """A start of rows from `parts`, in elements.

    Rows are multiples of 16 elements (`_LEAST_TILE` in `lora.py`), and so is what begins where one does. A number from
    a table hides that from the compiler, which would read matrices 2 bytes at a time, and not ahead.
    """
    return tl.multiple_of(tl.load(place).to(tl.int32), 16)


@triton.jit
def _vectors(shrunk, row, ranks, num_rows, there, SPLITS: tl.constexpr):
    """`[rows, 16]` of a shrink, its splits added up in order. `shrunk` points to the first split and rank."""
    total = tl.zeros(there.shape, tl.float32)
    for split in tl.static_range(SPLITS):
        place = shrunk + (split * num_rows + row)[:, None] * ranks + tl.arange(0, _RANKS)[None, :]
        total += tl.load(place, mask=there, other=0.0)
    return total


@triton.jit
def _shrink_row(
    x,
    pool,
    pages,
    a,
    a_rows,
    first_column,
    last_column,
    shrunk,
    page_stride,
    NUM_IN: tl.constexpr,
    SLAB: tl.constexpr,
    RUN: tl.constexpr,
):
    """A row's x Aᵀ over these columns."""
    rank, column = tl.arange(0, _RANKS), tl.arange(0, RUN)
    for first in range(0, a_rows, _RANKS):
        live = first + rank < a_rows
        products = tl.zeros((_RANKS, RUN), tl.float32)
        for at in range(first_column, last_column, RUN):
            start = a + first * NUM_IN + at
            page = _pages_of(pages, start, live, NUM_IN, SLAB)
            weights = _page_rows(pool, page, start, live, NUM_IN, page_stride, SLAB, RUN)
            products += weights.to(tl.float32) * tl.load(x + at + column).to(tl.float32)[None, :]
        tl.store(shrunk + first + rank, tl.sum(products, 1), mask=live)


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
    MODULE_3: tl.constexpr,
    SLOTS: tl.constexpr,  # modules of this launch
    NUM_MODULES: tl.constexpr,
    NUM_IN: tl.constexpr,
    SLAB: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    RUN: tl.constexpr,  # columns that a split has a multiple of, and that a single row takes at a time
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program computes x Aᵀ of one tile and module, over one split of x's columns.

    A tile of a single row needs no matrix instruction, and its A no way through shared memory.
    """
    slot, split = tl.program_id(0) % SLOTS, tl.program_id(1)
    tile = tiles + tl.program_id(0) // SLOTS * 3
    first_row, count = tl.load(tile), tl.load(tile + 1)
    if count == 0:
        return
    segment = tl.load(tile + 2)
    module = MODULE_0
    if slot == 1:
        module = MODULE_1
    if slot == 2:
        module = MODULE_2
    if SLOTS > 3:
        module = tl.where(slot == 3, MODULE_3, module)
    part = parts + (segment * NUM_MODULES + module) * 4
    a_rows, a = tl.load(part + 1).to(tl.int32), _element(part + 2)
    pages += tl.load(first_pages + segment)
    SHARE: tl.constexpr = (NUM_IN // RUN + SPLITS - 1) // SPLITS * RUN
    first_column, last_column = split * SHARE, tl.minimum((split + 1) * SHARE, NUM_IN)
    if count == 1:
        inputs, sums = x + first_row * x_row, shrunk + ((slot * SPLITS + split) * num_rows + first_row) * ranks
        _shrink_row(inputs, pool, pages, a, a_rows, first_column, last_column, sums, page_stride, NUM_IN, SLAB, RUN)
        return
    member, rank, column = tl.arange(0, ROWS), tl.arange(0, _RANKS), tl.arange(0, WIDTH)
    row_mask = member < count
    row = first_row + member
    NUM_STEPS: tl.constexpr = NUM_IN // WIDTH
    first_step, last_step = first_column // WIDTH, last_column // WIDTH
    x_place = x + row[:, None] * x_row + column[None, :]
    place = shrunk + ((slot * SPLITS + split) * num_rows + row)[:, None] * ranks + rank[None, :]
    for first in range(0, a_rows, _RANKS):
        live = first + rank < a_rows
        acc = tl.zeros((ROWS, _RANKS), tl.float32)
        start = a + first * NUM_IN
        page = _pages_of(pages, start + tl.minimum(first_step, NUM_STEPS - 1) * WIDTH, live, NUM_IN, SLAB)
        for step in range(first_step, last_step):
            upcoming = _pages_of(pages, start + tl.minimum(step + 1, NUM_STEPS - 1) * WIDTH, live, NUM_IN, SLAB)
            inputs = tl.load(x_place + step * WIDTH, mask=row_mask[:, None], other=0.0)
            weights = _page_rows(pool, page, start + step * WIDTH, live, NUM_IN, page_stride, SLAB, WIDTH)
            acc = tl.dot(inputs, tl.trans(weights), acc, input_precision=PRECISION)
            page = upcoming
        tl.store(place + first, acc, mask=row_mask[:, None] & live[None, :])


@triton.jit(
    do_not_specialize=["num_rows", "num_workers"],
    do_not_specialize_on_alignment=["num_tiles", "tiles", "parts", "first_pages", "pages"],
)
def expand_kernel(
    y,  # [num_rows, sum of outputs]
    shrunk,  # [num_workers, modules of this launch, SPLITS, num_rows, ranks] float32
    pool,
    num_tiles,  # int64, in memory
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
    MODULE_3: tl.constexpr,
    SLOTS: tl.constexpr,
    NUM_MODULES: tl.constexpr,
    OUT_0: tl.constexpr,
    OUT_1: tl.constexpr,
    OUT_2: tl.constexpr,
    OUT_3: tl.constexpr,
    SLAB: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program adds the output of one tile's adapter to a block of y's columns, of one module.

    The tiles in use share all programs, at least SLOTS for each: however many there are, all programs have work. Tiles
    come first: those of one adapter read the same columns of B, while no two programs share any of y.
    """
    live_tiles = tl.load(num_tiles).to(tl.int32)
    if live_tiles == 0:
        return
    programs = tl.num_programs(0) // live_tiles
    # Of WIDTH columns each, few enough to a block for enough programs, with a short last block of each module.
    steps = tl.cdiv((OUT_0 + OUT_1 + OUT_2 + OUT_3) // WIDTH, programs - (SLOTS - 1))
    block = tl.program_id(0) // live_tiles
    slot, module, width, column = 0, MODULE_0, OUT_0, 0
    num_before = tl.cdiv(OUT_0 // WIDTH, steps)
    if block >= num_before:
        slot, module, width, column, block = 1, MODULE_1, OUT_1, OUT_0, block - num_before
        num_before = tl.cdiv(OUT_1 // WIDTH, steps)
        if block >= num_before:
            slot, module, width, column, block = 2, MODULE_2, OUT_2, OUT_0 + OUT_1, block - num_before
            if SLOTS > 3:
                num_before = tl.cdiv(OUT_2 // WIDTH, steps)
                if block >= num_before:
                    slot, module, width, column, block = 3, MODULE_3, OUT_3, OUT_0 + OUT_1 + OUT_2, block - num_before
    width = tl.multiple_of(width, 16)
    offset = block * steps * WIDTH  # the first column, in the module's output
    if offset >= width:
        return
    tile = tiles + tl.program_id(0) % live_tiles * 3
    first_row, count, segment = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    part = parts + (segment * NUM_MODULES + module) * 4
    a_rows, b = tl.load(part + 1).to(tl.int32), _element(part + 3)
    if a_rows == 0:
        return
    pages += tl.load(first_pages + segment)
    member, rank = tl.arange(0, ROWS), tl.arange(0, _RANKS)
    row_mask = member < count
    row = first_row + member
    num_steps = tl.minimum(steps, width // WIDTH - block * steps)
    shrunk += slot * SPLITS * num_rows * ranks
    y_place = y + row[:, None] * y_row + (column + offset + tl.arange(0, WIDTH))[None, :]
    start, live = b + offset, rank < a_rows
    vectors = _vectors(shrunk, row, ranks, num_rows, row_mask[:, None] & live[None, :], SPLITS)
    page = _pages_of(pages, start, live, width, SLAB)
    rank_tiles = tl.cdiv(a_rows, _RANKS)
    rounds = num_workers * rank_tiles  # of a step
    if rounds == 1:  # ranks of up to 16: the vectors stay as they are
        factors = vectors.to(pool.dtype.element_ty)
        for step in range(0, num_steps):
            upcoming = _pages_of(pages, b + offset + tl.minimum(step + 1, num_steps - 1) * WIDTH, live, width, SLAB)
            weights = _page_rows(pool, page, b + offset + step * WIDTH, live, width, page_stride, SLAB, WIDTH)
            before = tl.load(y_place + step * WIDTH, mask=row_mask[:, None], other=0.0).to(tl.float32)
            total = before + tl.dot(factors, weights, input_precision=PRECISION)
            tl.store(y_place + step * WIDTH, total.to(y.dtype.element_ty), mask=row_mask[:, None])
            page = upcoming
        return
    # One round for each step and 16 ranks: the next rows of B are loaded while a round computes.
    acc = tl.zeros((ROWS, WIDTH), tl.float32)
    for index in range(0, num_steps * rounds):
        step, turn = index // rounds, index % rounds
        next_step, next_turn = tl.minimum((index + 1) // rounds, num_steps - 1), (index + 1) % rounds
        worker, first = next_turn // rank_tiles, next_turn % rank_tiles * _RANKS
        next_live = first + rank < a_rows
        next_start = b + offset + (worker * a_rows + first) * width + next_step * WIDTH
        upcoming = _pages_of(pages, next_start, next_live, width, SLAB)
        weights = _page_rows(pool, page, start, live, width, page_stride, SLAB, WIDTH)
        acc = tl.dot(vectors.to(weights.dtype), weights, acc, input_precision=PRECISION)
        if turn == rounds - 1:
            before = tl.load(y_place + step * WIDTH, mask=row_mask[:, None], other=0.0).to(tl.float32)
            tl.store(y_place + step * WIDTH, (before + acc).to(y.dtype.element_ty), mask=row_mask[:, None])
            acc = tl.zeros((ROWS, WIDTH), tl.float32)
        there = row_mask[:, None] & next_live[None, :]
        vectors = _vectors(shrunk + worker * worker_stride + first, row, ranks, num_rows, there, SPLITS)
        page, start, live = upcoming, next_start, next_live
