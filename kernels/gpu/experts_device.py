"""Mixture-of-experts products in Triton, the device side. The host side is `experts.py`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def grouped_linear_kernel(
    x,  # [num_pairs, num_in], sorted by expert
    weight,  # [num_experts, num_out, num_in]
    offsets,  # [num_experts + 1] int64
    out,  # [num_pairs, num_out]
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
    PRECISION: tl.constexpr,
):
    """One program computes COLUMNS outputs of one tile of pairs, all of one expert. Tiles count expert by expert."""
    tile = tl.program_id(1)
    expert = tl.arange(0, EXPERTS)
    known = expert < num_experts
    starts = tl.load(offsets + expert, mask=known, other=0)
    counts = tl.load(offsets + expert + 1, mask=known, other=0) - starts
    tiles = (counts + ROWS - 1) // ROWS
    ends = tl.cumsum(tiles, 0)
    if tile >= tl.sum(tiles, 0):
        return
    mine = (tile >= ends - tiles) & (tile < ends)  # true for exactly one expert
    own = tl.sum(tl.where(mine, expert, 0), 0)
    first = tl.sum(tl.where(mine, starts + (tile - (ends - tiles)) * ROWS, 0), 0)
    end = tl.sum(tl.where(mine, starts + counts, 0), 0)
    row, column, depth = (
        first + tl.arange(0, ROWS),
        tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS),
        tl.arange(0, DEPTH),
    )
    here, wanted = row < end, column < num_out
    x_place = x + row[:, None] * x_row + depth[None, :]
    weight_place = (
        weight + own.to(tl.int64) * weight_expert + column[:, None].to(tl.int64) * weight_row + depth[None, :]
    )
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, num_in, DEPTH):
        inside = (start + depth < num_in)[None, :]
        inputs = tl.load(x_place + start, mask=here[:, None] & inside, other=0.0)
        weights = tl.load(weight_place + start, mask=wanted[:, None] & inside, other=0.0)
        acc = tl.dot(inputs, tl.trans(weights), acc, input_precision=PRECISION)
    place = out + row[:, None] * num_out + column[None, :]
    tl.store(place, acc.to(out.dtype.element_ty), mask=here[:, None] & wanted[None, :])
