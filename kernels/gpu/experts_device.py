"""Mixture-of-experts products and adapters of experts in Triton, the device side.

The host sides are `experts.py` and `expert_lora.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_tiles"])
def grouped_linear_kernel(
    x,  # [num_pairs, num_in], sorted by expert
    weight,  # [num_experts, num_out, num_in]
    bias,  # [num_experts, num_out] or None
    offsets,  # [num_experts + 1] int64
    out,  # [num_pairs, num_out]
    num_tiles,  # as many as there are programs for; some may not be needed
    num_experts,
    num_in,
    num_out,
    x_row,
    weight_expert,
    weight_row,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    TOGETHER: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program computes COLUMNS outputs of one tile of pairs, all of one expert. Tiles count expert by expert.

    Tiles come first, so that those of one expert read the same part of its weight, which is larger than any cache; and
    only TOGETHER of them before the next columns, so that these find x in the cache.
    """
    group = TOGETHER * tl.cdiv(num_out, COLUMNS)
    first_tile = tl.program_id(0) // group * TOGETHER
    height = tl.minimum(num_tiles - first_tile, TOGETHER)
    place = tl.program_id(0) % group
    tile, block = first_tile + place % height, place // height
    expert = tl.arange(0, EXPERTS)
    is_expert = expert < num_experts
    starts = tl.load(offsets + expert, mask=is_expert, other=0)
    counts = tl.load(offsets + expert + 1, mask=is_expert, other=0) - starts
    tiles = (counts + ROWS - 1) // ROWS
    ends = tl.cumsum(tiles, 0)
    if tile >= tl.sum(tiles, 0):
        return
    mine = (tile >= ends - tiles) & (tile < ends)  # true for exactly one expert
    expert_index = tl.sum(tl.where(mine, expert, 0), 0)
    first = tl.sum(tl.where(mine, starts + (tile - (ends - tiles)) * ROWS, 0), 0)
    end = tl.sum(tl.where(mine, starts + counts, 0), 0)
    row, column, depth = (
        first + tl.arange(0, ROWS),
        block * COLUMNS + tl.arange(0, COLUMNS),
        tl.arange(0, DEPTH),
    )
    row_mask, column_mask = row < end, column < num_out
    x_place = x + row[:, None] * x_row + depth[None, :]
    weight_place = (
        weight + expert_index.to(tl.int64) * weight_expert + column[:, None].to(tl.int64) * weight_row + depth[None, :]
    )
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, num_in, DEPTH):
        inside = (start + depth < num_in)[None, :]
        inputs = tl.load(x_place + start, mask=row_mask[:, None] & inside, other=0.0)
        weights = tl.load(weight_place + start, mask=column_mask[:, None] & inside, other=0.0)
        acc = tl.dot(inputs, tl.trans(weights), acc, input_precision=PRECISION)
    if bias is not None:
        own_bias = tl.load(bias + expert_index * num_out + column, mask=column_mask, other=0.0)
        acc += own_bias.to(tl.float32)[None, :]
    place = out + row[:, None] * num_out + column[None, :]
    tl.store(place, acc.to(out.dtype.element_ty), mask=row_mask[:, None] & column_mask[None, :])


@triton.jit
def _own_expert(experts, pair, inside, first, num_experts, beyond):
    """Each pair's expert, counted from this worker's first; num_experts: another worker's; `beyond`: no pair."""
    expert = tl.load(experts + pair, mask=inside, other=0).to(tl.int32) - first
    expert = tl.where((expert >= 0) & (expert < num_experts), expert, num_experts)
    return tl.where(inside, expert, beyond)


@triton.jit(do_not_specialize=["num_pairs"])
def group_kernel(
    experts,  # [num_pairs] int64, the experts that each row chose, row by row
    weights,  # [num_pairs]
    rows,  # [num_pairs] int64
    factors,  # [num_pairs] float32
    local_experts,  # [num_pairs] int64
    places,  # [num_pairs] int64
    offsets,  # [num_experts + 1] int64
    num_pairs,
    first,
    num_experts,
    top_k,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One program counts for BLOCK pairs how many stand before each: of lesser experts, and earlier ones of its own.

    That is its place in a stable sort. After the pairs come the experts' borders, before which pairs of lesser experts
    stand.
    """
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_pair, border = index < num_pairs, index - num_pairs
    expert = _own_expert(experts, index, is_pair, first, num_experts, border)
    earlier = tl.where(is_pair, index, 0)
    place = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, num_pairs, WIDTH):
        other = start + tl.arange(0, WIDTH)
        theirs = _own_expert(experts, other, other < num_pairs, first, num_experts, num_experts + 1)
        is_before = theirs[None, :] < expert[:, None]
        is_before |= (theirs[None, :] == expert[:, None]) & (other[None, :] < earlier[:, None])
        place += tl.sum(is_before.to(tl.int32), 1)
    tl.store(places + index, place, mask=is_pair)
    tl.store(rows + place, (index // top_k).to(tl.int64), mask=is_pair)
    tl.store(local_experts + place, expert, mask=is_pair)
    tl.store(factors + place, tl.load(weights + index, mask=is_pair, other=0.0).to(tl.float32), mask=is_pair)
    tl.store(offsets + border, place, mask=(border >= 0) & (border <= num_experts))


@triton.jit
def combine_pairs_kernel(
    x,  # [num_pairs, width]
    weights,  # [num_pairs] float32
    places,  # [num_rows, TOP_K] int64
    offsets,  # [num_experts + 1] int64
    out,  # [num_rows, width]
    width,
    x_row,
    num_experts,
    TOP_K: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One program adds up COLUMNS of one row's pairs. Of other workers' pairs, which stand last, it reads nothing."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    num_own = tl.load(offsets + num_experts)
    total = tl.zeros((COLUMNS,), tl.float32)
    for choice in tl.static_range(TOP_K):
        place = tl.load(places + row * TOP_K + choice)
        column_mask = column < tl.where(place < num_own, width, 0)
        factor = tl.load(weights + place)
        part = tl.load(x + place * x_row + column, mask=column_mask, other=0.0).to(tl.float32)
        total += tl.where(column_mask, part * factor, 0.0)
    tl.store(out + row * width + column, total.to(out.dtype.element_ty), mask=column < width)


# Adapters of experts: which tiles of a layer's pairs share an expert and an adapter.


@triton.jit
def _later(a, b):
    return tl.maximum(a, b)


@triton.jit
def _part_of(at, inside, rows, experts, row_segments, num_rows, num_own, first, num_experts):
    """The index of a pair's expert and adapter in the table of parts; -1: it has none, or is another worker's."""
    row = tl.load(rows + at, mask=inside, other=num_rows)
    segment = tl.load(row_segments + row, mask=row < num_rows, other=-1)
    expert = tl.load(experts + at, mask=inside, other=num_own)
    return tl.where((segment >= 0) & (expert < num_own), segment * num_experts + first + expert, -1)


@triton.jit(do_not_specialize=["num_pairs", "num_rows"])
def pair_tiles_kernel(
    rows,  # [num_pairs] int64, the batch's row of each pair
    experts,  # [num_pairs] int64, each pair's expert, counted from this worker's first
    row_segments,  # [num_rows] int64, each row's segment; -1: none
    num_tiles,  # [1] int64, zero before the launch
    tiles,  # [most tiles, 3] int64, zeros before the launch
    num_pairs,
    num_rows,
    num_own,  # experts of this worker
    first,  # index of the first of them
    num_experts,  # of all workers
    ROWS: tl.constexpr,
):
    """One program finds the tiles that lie in ROWS pairs: neighbours of one expert and adapter.

    Pairs are sorted by expert and then by row, so neighbours that share both lie together. The atomic counter says only
    where in the list a tile stands; what a tile's rows get does not depend on that.
    """
    member = tl.arange(0, ROWS)
    at = tl.program_id(0) * ROWS + member
    inside = at < num_pairs
    part = _part_of(at, inside, rows, experts, row_segments, num_rows, num_own, first, num_experts)
    before = _part_of(at - 1, inside & (member > 0), rows, experts, row_segments, num_rows, num_own, first, num_experts)
    has_after = (member + 1 < ROWS) & (at + 1 < num_pairs)
    after = _part_of(at + 1, has_after, rows, experts, row_segments, num_rows, num_own, first, num_experts)
    # A part's pairs are neighbours, so a tile reaches from where one begins to where it ends. Its last pair writes it.
    begin = tl.associative_scan(tl.where(part != before, member, 0), 0, _later)
    ends = (part >= 0) & (part != after)
    counts = ends.to(tl.int32)
    base = tl.atomic_add(num_tiles, tl.sum(counts, 0).to(tl.int64), sem="relaxed")
    place = tiles + (base + tl.cumsum(counts, 0) - 1) * 3
    tl.store(place, (at - member + begin).to(tl.int64), mask=ends)
    tl.store(place + 1, (member - begin + 1).to(tl.int64), mask=ends)
    tl.store(place + 2, part, mask=ends)
