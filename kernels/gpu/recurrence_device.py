"""Layers with a recurrent state in Triton, the device side. The host side is `recurrence.py`.

A program goes through the segments of its sequence in order, and a barrier lies between what it writes to pages and
what it reads. It alone reads and writes its part of the sequence's states, so source and target may be the same pages.
Tiles have one size in every step, so a row's result has the same bits in a decode and in a prompt of any cut.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .rows_device import activated

# Tables of a batch, which may lie at any place in a step's one copy.
_TABLES = ["segment_rows", "sequence_segments", "source", "target", "is_fresh"]


@triton.jit
def _inputs(
    x, row, channel, mask, X_ROW: tl.constexpr, FIRST: tl.constexpr, CHANNELS: tl.constexpr, GATED: tl.constexpr
):
    """What the convolution reads of some rows of x, `[rows, channels]`; zeros where the mask is off."""
    place = x + row.to(tl.int64)[:, None] * X_ROW + FIRST + channel[None, :]
    value = tl.load(place, mask=mask, other=0.0)
    if GATED:
        other = tl.load(place + 2 * CHANNELS, mask=mask, other=0.0)
        value = (value.to(tl.float32) * other.to(tl.float32)).to(value.dtype)
    return value


@triton.jit(do_not_specialize=["conv_page"], do_not_specialize_on_alignment=_TABLES)
def convolution_kernel(
    x,  # [num_rows, X_ROW]
    taps,  # [KEPT + 1, CHANNELS] float32
    bias,  # [CHANNELS] float32 or None
    out,  # [num_rows, CHANNELS]
    pool,  # [num_pages, page_stride], of x's dtype
    segment_rows,
    sequence_segments,
    source,
    target,
    is_fresh,  # [num_segments] uint8
    page_stride,
    conv_offset,
    conv_page,
    num_state_pages,
    X_ROW: tl.constexpr,
    FIRST: tl.constexpr,  # where the convolution's inputs begin in a row of x
    CHANNELS: tl.constexpr,
    KEPT: tl.constexpr,
    GATED: tl.constexpr,  # the inputs are products of two columns, and a third one multiplies the results
    KEY_BLOCKS: tl.constexpr,  # heads of q, then of k, which get the length 1; each is a block
    KEY_DIM: tl.constexpr,
    WIDTH: tl.constexpr,  # channels of the other blocks
    NUM_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    KEPT_ROWS: tl.constexpr,
):
    """One program convolves a block of a sequence's channels, and keeps the newest inputs after each segment."""
    sequence, block = tl.program_id(0) // NUM_BLOCKS, tl.program_id(0) % NUM_BLOCKS
    is_key = block < KEY_BLOCKS
    begin = tl.where(is_key, block * KEY_DIM, KEY_BLOCKS * KEY_DIM + (block - KEY_BLOCKS) * WIDTH)
    channel = tl.arange(0, BLOCK)
    live = (channel < tl.where(is_key, KEY_DIM, WIDTH)) & (begin + channel < CHANNELS)
    channel += begin
    first_segment = tl.load(sequence_segments + sequence)
    for turn in range(0, tl.load(sequence_segments + sequence + 1) - first_segment):
        segment = first_segment + turn
        start, end = tl.load(segment_rows + segment), tl.load(segment_rows + segment + 1)
        oldest = start - tl.where(tl.load(is_fresh + segment) == 0, KEPT, 0)  # inputs before it are zeros
        state = segment.to(tl.int64) * num_state_pages + conv_page
        before = pool + tl.load(source + state).to(tl.int64) * page_stride + conv_offset
        for first in range(0, end - start, ROWS):
            row = start + first + tl.arange(0, ROWS)
            inside = row < end
            total = tl.zeros((ROWS, BLOCK), tl.float32)
            for tap in tl.static_range(KEPT + 1):
                at = row + (tap - KEPT)
                is_new = inside & (at >= start)
                value = _inputs(x, at, channel, is_new[:, None] & live[None, :], X_ROW, FIRST, CHANNELS, GATED)
                if KEPT > 0:
                    is_kept = inside & (at < start) & (at >= oldest)
                    place = before + (at - start + KEPT)[:, None] * CHANNELS + channel[None, :]
                    state_value = tl.load(place, mask=is_kept[:, None] & live[None, :], other=0.0)
                    value = tl.where(is_new[:, None], value, state_value)
                factor = tl.load(taps + tap * CHANNELS + channel, mask=live, other=0.0)
                total += value.to(tl.float32) * factor[None, :]
            if bias is not None:
                total += tl.load(bias + channel, mask=live, other=0.0)[None, :]
            y = total.to(x.dtype.element_ty).to(tl.float32)
            mask = inside[:, None] & live[None, :]
            if GATED:
                place = x + row.to(tl.int64)[:, None] * X_ROW + CHANNELS + channel[None, :]
                y *= tl.load(place, mask=mask, other=0.0).to(tl.float32)
            else:
                y = activated(y, "silu").to(x.dtype.element_ty).to(tl.float32)
            if KEY_BLOCKS > 0:
                length = tl.where(block < KEY_BLOCKS // 2, KEY_DIM**-0.5, 1.0)
                scale = tl.rsqrt(tl.sum(y * y, 1) + 1e-6) * length
                y *= tl.where(is_key, scale, 1.0)[:, None]
            place = out + row.to(tl.int64)[:, None] * CHANNELS + channel[None, :]
            tl.store(place, y.to(out.dtype.element_ty), mask=mask)
        if KEPT > 0:
            at = end - KEPT + tl.arange(0, KEPT_ROWS)
            is_new = (at < end) & (at >= start)
            value = _inputs(x, at, channel, is_new[:, None] & live[None, :], X_ROW, FIRST, CHANNELS, GATED)
            is_kept = (at < start) & (at >= oldest)
            place = before + (at - start + KEPT)[:, None] * CHANNELS + channel[None, :]
            state_value = tl.load(place, mask=is_kept[:, None] & live[None, :], other=0.0)
            value = tl.where(is_new[:, None], value, state_value)
            page = tl.load(target + state)
            after = pool + page.to(tl.int64) * page_stride + conv_offset
            place = after + (at - end + KEPT)[:, None] * CHANNELS + channel[None, :]
            tl.debug_barrier()
            stop = tl.where(page >= 0, end, start - KEPT)
            tl.store(place, value, mask=(at < stop)[:, None] & live[None, :])
            tl.debug_barrier()


@triton.jit
def _softplus(x):
    small = tl.exp(-tl.abs(x))
    plus_one = 1.0 + small
    # The logarithm of 1 + small, whose sum has lost digits of it: what is left of them is divided out.
    log = tl.where(plus_one == 1.0, small, tl.log(plus_one) * (small / tl.where(plus_one == 1.0, 1.0, plus_one - 1.0)))
    return tl.where(x > 0.0, x, 0.0) + log


@triton.jit(do_not_specialize_on_alignment=_TABLES)
def recurrence_kernel(
    x,  # [num_rows, X_ROW]
    mixed,  # [num_rows, CHANNELS], what `convolution_kernel` gives
    decay,  # [HEADS] float32
    dt_bias,  # [HEADS] float32
    skip,  # [HEADS] float32; None: the rule is Gated DeltaNet
    out,  # [num_rows, HEADS, VALUE_DIM]
    floats,  # the pool as float32, [num_pages, page_stride]
    head_pages,
    head_offsets,
    segment_rows,
    sequence_segments,
    source,
    target,
    is_fresh,  # [num_segments] uint8
    page_stride,
    num_state_pages,
    smallest_step,
    largest_step,
    X_ROW: tl.constexpr,
    FIRST_KEYS: tl.constexpr,  # where keys, queries and values begin in a row of `mixed`
    FIRST_QUERIES: tl.constexpr,
    FIRST_VALUES: tl.constexpr,
    FIRST_STEPS: tl.constexpr,  # where a or dt begins in a row of x, and b
    FIRST_BETAS: tl.constexpr,
    CHANNELS: tl.constexpr,
    HEADS: tl.constexpr,
    PER_KEY: tl.constexpr,  # heads that share keys and queries
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    ALIGNED: tl.constexpr,  # matrices begin at multiples of 16 bytes
    STAGES: tl.constexpr,
):
    """One program follows a sequence's rows with some columns of a head's matrix, which it holds in registers.

    What is read of later rows is copied while a row is computed.
    """
    block, unit = tl.program_id(0) % NUM_BLOCKS, tl.program_id(0) // NUM_BLOCKS
    sequence, head = unit // HEADS, unit % HEADS
    key, column = tl.arange(0, KEYS), block * COLUMNS + tl.arange(0, COLUMNS)
    is_key, is_column = key < KEY_DIM, column < VALUE_DIM
    own_page, offset = tl.load(head_pages + head), tl.load(head_offsets + head)
    if ALIGNED:
        offset = tl.multiple_of(offset, 4)
    place = offset + key[:, None] * VALUE_DIM + column[None, :]
    own_decay, own_bias = tl.load(decay + head), tl.load(dt_bias + head)
    first_key = head // PER_KEY * KEY_DIM + key
    first_segment = tl.load(sequence_segments + sequence)
    for turn in range(0, tl.load(sequence_segments + sequence + 1) - first_segment):
        segment = first_segment + turn
        start = tl.load(segment_rows + segment).to(tl.int64)
        count = (tl.load(segment_rows + segment + 1) - start).to(tl.int32)
        state = segment.to(tl.int64) * num_state_pages + own_page
        before = floats + tl.load(source + state).to(tl.int64) * page_stride
        num_before = tl.where(tl.load(is_fresh + segment) == 0, KEY_DIM, 0)
        matrix = tl.load(before + place, mask=(key < num_before)[:, None] & is_column[None, :], other=0.0)
        for index in tl.range(0, count, num_stages=STAGES):
            row = start + index
            of_row = mixed + row * CHANNELS
            k = tl.load(of_row + FIRST_KEYS + first_key, mask=is_key, other=0.0).to(tl.float32)
            q = tl.load(of_row + FIRST_QUERIES + first_key, mask=is_key, other=0.0).to(tl.float32)
            v = tl.load(of_row + FIRST_VALUES + head * VALUE_DIM + column, mask=is_column, other=0.0).to(tl.float32)
            step = _softplus(tl.load(x + row * X_ROW + FIRST_STEPS + head).to(tl.float32) + own_bias)
            # Unlike a minimum and a maximum these keep NaN.
            step = tl.where(step < smallest_step, smallest_step, step)
            step = tl.where(step > largest_step, largest_step, step)
            factor = tl.exp(own_decay * step)
            if skip is None:
                b = tl.load(x + row * X_ROW + FIRST_BETAS + head).to(tl.float32)
                beta = (1.0 / (1.0 + tl.exp(-b))).to(x.dtype.element_ty).to(tl.float32)
                change = (v - tl.sum(matrix * k[:, None], 0) * factor) * beta
                y = tl.sum(matrix * q[:, None], 0) * factor + change * tl.sum(k * q, 0)
                matrix = matrix * factor + k[:, None] * change[None, :]
            else:
                matrix = matrix * factor + k[:, None] * (v * step)[None, :]
                y = tl.sum(matrix * q[:, None], 0) + tl.load(skip + head) * v
            result = out + (row * HEADS + head) * VALUE_DIM + column
            tl.store(result, y.to(out.dtype.element_ty), mask=is_column)
        page = tl.load(target + state)
        num_after = tl.where(page >= 0, KEY_DIM, 0)
        after = floats + page.to(tl.int64) * page_stride
        tl.debug_barrier()
        tl.store(after + place, matrix, mask=(key < num_after)[:, None] & is_column[None, :])
        tl.debug_barrier()


@triton.jit
def gated_norm_kernel(
    x,  # [num_rows, X_ROW]
    weight,  # [PARTS, WIDTH] float32, or [WIDTH] of Gated DeltaNet; None: nothing is normed
    y,  # [num_rows, PARTS, WIDTH], normed and gated in place
    eps,
    X_ROW: tl.constexpr,
    FIRST: tl.constexpr,  # where the gates begin in a row of x
    PARTS: tl.constexpr,  # that are normed each by itself
    WIDTH: tl.constexpr,
    IS_DELTA: tl.constexpr,  # parts share their weights, and each product is rounded
    GATES_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
    TOGETHER: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
):
    """One program computes TOGETHER parts of a row."""
    row = (tl.program_id(0) // NUM_BLOCKS).to(tl.int64)
    part = tl.program_id(0) % NUM_BLOCKS * TOGETHER + tl.arange(0, TOGETHER)
    column = tl.arange(0, BLOCK)
    live = (part < PARTS)[:, None] & (column < WIDTH)[None, :]
    at = part[:, None] * WIDTH + column[None, :]
    place = y + row * (PARTS * WIDTH) + at
    wide = tl.load(place, mask=live, other=0.0).to(tl.float32)
    gate = activated(tl.load(x + row * X_ROW + FIRST + at, mask=live, other=0.0).to(tl.float32), "silu")
    if GATES_FIRST:
        wide *= gate
    if weight is not None:
        wide *= tl.rsqrt(tl.sum(wide * wide, 1) / WIDTH + eps)[:, None]
        if IS_DELTA:
            factor = tl.load(weight + column, mask=column < WIDTH, other=0.0)[None, :]
            wide = wide.to(y.dtype.element_ty).to(tl.float32) * factor
            wide = wide.to(y.dtype.element_ty).to(tl.float32)
        else:
            wide *= tl.load(weight + at, mask=live, other=0.0)
    if not GATES_FIRST:
        wide *= gate
    tl.store(place, wide.to(y.dtype.element_ty), mask=live)
