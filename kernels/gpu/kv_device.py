"""Rotary embedding and the write of KV in Triton, the device side. The host side is `attention.py`."""

from __future__ import annotations

import triton
import triton.language as tl

from .rows_device import float8_bits, float8_scale


@triton.jit
def _rotated(x, head, num_heads, x_head, cos, sin, HEAD_DIM: tl.constexpr, HALF: tl.constexpr):
    """The two halves of some heads of a row, rotated, in float32; their offsets among the row's heads; and a mask."""
    dim = tl.arange(0, HALF)
    live = (head < num_heads)[:, None] & (dim < HEAD_DIM // 2)[None, :]
    place = x + head[:, None] * x_head + dim[None, :]
    first = tl.load(place, mask=live, other=0.0).to(tl.float32)
    second = tl.load(place + HEAD_DIM // 2, mask=live, other=0.0).to(tl.float32)
    offset = head[:, None] * HEAD_DIM + dim[None, :]
    return first * cos - second * sin, second * cos + first * sin, offset, live


@triton.jit
def _store_float8(place, scale_place, first, second, live, HEAD_DIM: tl.constexpr):
    """Quantises heads, given in two halves `[heads, HALF]` in float32, and stores them and their scales."""
    size = tl.maximum(tl.abs(first), tl.abs(second))
    # A NaN makes the scale of its head infinite: the maximum alone would not show it.
    size = tl.where((first == first) & (second == second), size, float("inf"))
    scale = float8_scale(tl.max(size, 1))
    tl.store(place, float8_bits(tl.div_rn(first, scale[:, None])), mask=live)
    tl.store(place + HEAD_DIM // 2, float8_bits(tl.div_rn(second, scale[:, None])), mask=live)
    tl.store(scale_place, scale, mask=tl.max(live.to(tl.int32), 1) > 0)


@triton.jit(
    do_not_specialize_on_alignment=["positions", "row_pages", "row_slots"],
)
def write_kv_kernel(
    q,
    k,
    v,
    rotary,  # [num_positions, SIDES, HEAD_DIM // 2] float32; the last two sides are those of q
    kv,
    scales,  # of KV of eight bits, as `Float8KV` has them; None: KV has the type of k and v
    positions,
    row_pages,
    row_slots,
    out,  # [num_rows, HEADS, HEAD_DIM]
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    kv_page,
    kv_side,
    kv_slot,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    SIDES: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):
    """One program handles some heads of one row: it rotates q, or rotates k and writes k and v into their page."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions + row)
    if position < 0:
        return
    dim = tl.arange(0, HALF)
    NUM_Q_PARTS: tl.constexpr = (HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    angle = rotary + position * (SIDES * (HEAD_DIM // 2)) + dim
    if SIDES == 4:
        angle += tl.where(part < NUM_Q_PARTS, HEAD_DIM, 0)
    cos = tl.load(angle, mask=dim < HEAD_DIM // 2, other=0.0)[None, :]
    sin = tl.load(angle + HEAD_DIM // 2, mask=dim < HEAD_DIM // 2, other=0.0)[None, :]
    if part < NUM_Q_PARTS:
        head = part * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        first, second, offset, live = _rotated(q + row * q_row, head, HEADS, q_head, cos, sin, HEAD_DIM, HALF)
        place = out + row * HEADS * HEAD_DIM + offset
        tl.store(place, first.to(out.dtype.element_ty), mask=live)
        tl.store(place + HEAD_DIM // 2, second.to(out.dtype.element_ty), mask=live)
    else:
        head = (part - NUM_Q_PARTS) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        first, second, offset, live = _rotated(k + row * k_row, head, KV_HEADS, k_head, cos, sin, HEAD_DIM, HALF)
        page, slot = tl.load(row_pages + row), tl.load(row_slots + row)
        written = kv + page * kv_page + slot * kv_slot + offset
        value = v + row * v_row + head[:, None] * v_head + dim[None, :]
        if scales is None:
            tl.store(written, first.to(kv.dtype.element_ty), mask=live)
            tl.store(written + HEAD_DIM // 2, second.to(kv.dtype.element_ty), mask=live)
            for half in tl.static_range(2):
                content = tl.load(value + half * (HEAD_DIM // 2), mask=live, other=0.0)
                tl.store(written + kv_side + half * (HEAD_DIM // 2), content, mask=live)
        else:
            num_slots = kv_side // kv_slot
            scale_place = scales + page * (kv_page // 4) + head * num_slots + slot
            _store_float8(written, scale_place, first, second, live, HEAD_DIM)
            first_v = tl.load(value, mask=live, other=0.0).to(tl.float32)
            second_v = tl.load(value + HEAD_DIM // 2, mask=live, other=0.0).to(tl.float32)
            _store_float8(written + kv_side, scale_place + KV_HEADS * num_slots, first_v, second_v, live, HEAD_DIM)
