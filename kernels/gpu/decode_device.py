"""Paged attention of decodes in Triton, the device side: splits of a sequence's keys, brought together in order.

The host side is `decode.py`. Splitting a decode over its keys is Flash-Decoding's (Dao et al., 2023). A few programs
go through a list of splits that lies on the device, so that a recorded launch serves sequences of any lengths.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .attention_device import FLOOR, add_keys, pages_of, with_sinks

# More splits than a sequence has: a work item is the number of its decode times this, plus its split.
SPLITS_OF_ITEM = tl.constexpr(128)


@triton.jit
def _seen(length, window, WINDOW: tl.constexpr):
    """The first key that the newest row of a sequence sees."""
    first = length * 0
    if WINDOW == 2:  # chunks; of padding, which has no tokens, the first key is 0
        first = tl.maximum(length - 1, 0) // window * window
    elif WINDOW:
        first = tl.maximum(length - window, 0)
    return first


@triton.jit
def _share(num_seen, keys, BLOCK: tl.constexpr):
    """Keys of a split, for a sequence that sees `num_seen`: `keys`, or as many as make no more than 128 splits."""
    return tl.maximum(tl.cdiv(tl.cdiv(num_seen, SPLITS_OF_ITEM), BLOCK) * BLOCK, keys)


@triton.jit
def _num_splits(num_seen, keys, BLOCK: tl.constexpr):
    """Splits of a sequence; one for a row that is padding, which gives zeros."""
    return tl.maximum(tl.cdiv(num_seen, _share(num_seen, keys, BLOCK)), 1)


@triton.jit
def _length(positions, rows, index, there):
    """Tokens of the sequences of some decodes, the newest included; 0 for padding, and where not `there`."""
    row = index
    if rows is not None:
        row = tl.load(rows + index, mask=there, other=0)
    return (tl.load(positions + row, mask=there, other=-1) + 1).to(tl.int32)


@triton.jit
def _num_before(positions, rows, end, window, keys, WINDOW: tl.constexpr, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr):
    """Splits of the decodes before `end`."""
    counts = tl.zeros((AT_ONCE,), tl.int32)
    for first in range(0, end, AT_ONCE):
        index = first + tl.arange(0, AT_ONCE)
        length = _length(positions, rows, index, index < end)
        num_splits = _num_splits(length - _seen(length, window, WINDOW), keys, BLOCK)
        counts += tl.where(index < end, num_splits, 0)
    return tl.sum(counts, 0)


@triton.jit(
    do_not_specialize=["num_decodes", "window", "room"],
    do_not_specialize_on_alignment=["positions", "rows", "items", "starts"],
)
def split_kernel(
    positions,  # [num_rows] int64; negative: the row is padding
    rows,  # [num_decodes] int32, the row of each decode; None: decode i is row i
    items,  # [room] int32, as `SPLITS_OF_ITEM` says
    starts,  # [num_decodes + 2] int32: the first item of each decode, then of all; then the keys of a split
    num_decodes,
    window,
    room,
    WINDOW: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """One program lists the splits of one decode.

    A sequence's splits depend only on the keys that it sees, unless all together need more room than there is: then
    every split gets twice as many keys, or four times, until all fit. One split of each sequence always fits.
    """
    mine = tl.program_id(0)
    keys = tl.full((), KEYS, tl.int32)
    total = _num_before(positions, rows, num_decodes, window, keys, WINDOW, BLOCK, AT_ONCE)
    while total > room:
        keys *= 2
        total = _num_before(positions, rows, num_decodes, window, keys, WINDOW, BLOCK, AT_ONCE)
    start = _num_before(positions, rows, mine, window, keys, WINDOW, BLOCK, AT_ONCE)
    end = _num_before(positions, rows, mine + 1, window, keys, WINDOW, BLOCK, AT_ONCE)
    tl.store(starts + mine, start)
    if mine == 0:
        tl.store(starts + num_decodes, total)
        tl.store(starts + num_decodes + 1, keys)
    split = tl.arange(0, SPLITS_OF_ITEM)
    tl.store(items + start + split, mine * SPLITS_OF_ITEM + split, mask=split < end - start)


@triton.jit(
    do_not_specialize=["num_decodes", "window"],
    do_not_specialize_on_alignment=["pages", "page_starts", "positions", "rows", "sequences", "items", "starts"],
)
def decode_kernel(
    q,  # [num_rows, num_heads, HEAD_DIM]
    kv,  # [num_pages, 2, PAGE, num_kv_heads, HEAD_DIM]
    scales,  # [num_pages, 2, num_kv_heads, PAGE] float32, of KV of eight bits; None: KV has q's dtype
    sinks,  # [num_heads] float32 or None
    pages,  # int32, of all sequences
    page_starts,  # [num_sequences] int64, where each sequence's begin in `pages`
    positions,  # [num_rows] int64; negative: the row is padding
    rows,  # [num_decodes] int32, the row of each decode; None: decode i is row i and sequence i
    sequences,  # [num_decodes] int32
    items,  # as `split_kernel` wrote it
    starts,
    out,  # [num_rows, num_heads, HEAD_DIM]
    partial,  # [room, num_kv_heads, GROUP, HEAD_DIM] float32, of sequences with more than one split
    stats,  # [room, num_kv_heads, GROUP, 2] float32: largest score, sum of weights
    num_decodes,
    scale_in,
    scale_out,
    window,
    q_row,
    q_head,
    out_row,
    kv_page,
    kv_side,
    kv_slot,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program i of n computes splits i, i + n, i + 2n … for the heads that share one KV head."""
    head, num_kv_heads = tl.program_id(1), tl.num_programs(1)
    member, dim = tl.arange(0, GROUP_ROWS), tl.arange(0, DIM)
    live = (member < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    kv += head * HEAD_DIM
    if scales is not None:
        scales += head * PAGE
    num_items, keys = tl.load(starts + num_decodes), tl.load(starts + num_decodes + 1)
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        entry = tl.load(items + item)
        index, split = entry // SPLITS_OF_ITEM, entry % SPLITS_OF_ITEM
        row, sequence = index, index
        if rows is not None:
            row, sequence = tl.load(rows + index), tl.load(sequences + index)
        length = (tl.load(positions + row) + 1).to(tl.int32)
        first = _seen(length, window, WINDOW)
        share = _share(length - first, keys, BLOCK)
        start = first + split * share
        end = tl.minimum(start + share, length)
        q_place = q + row.to(tl.int64) * q_row + (head * GROUP + member)[:, None] * q_head + dim[None, :]
        queries = tl.load(q_place, mask=live, other=0.0)
        acc = tl.zeros((GROUP_ROWS, DIM), tl.float32)
        largest = tl.full((GROUP_ROWS,), FLOOR, tl.float32)
        total = tl.zeros((GROUP_ROWS,), tl.float32)
        low = tl.zeros((GROUP_ROWS,), tl.int32) + start
        high = tl.zeros((GROUP_ROWS,), tl.int32) + end
        table = pages + tl.load(page_starts + sequence)
        page = pages_of(table, start, end, BLOCK, PAGE)
        for block in range(start, end, BLOCK):
            upcoming = pages_of(table, block + BLOCK, end, BLOCK, PAGE)
            acc, largest, total = add_keys(
                q=queries,
                acc=acc,
                largest=largest,
                total=total,
                kv=kv,
                scales=scales,
                page=page,
                start=block,
                low=low,
                high=high,
                scale_in=scale_in,
                scale_out=scale_out,
                kv_page=kv_page,
                kv_side=kv_side,
                kv_slot=kv_slot,
                MASKED=True,
                SOFTCAP=SOFTCAP,
                HEAD_DIM=HEAD_DIM,
                DIM=DIM,
                BLOCK=BLOCK,
                PAGE=PAGE,
                PRECISION=PRECISION,
            )
            page = upcoming
        if length - first <= share:
            total = with_sinks(total, largest, sinks, head * GROUP + member, member < GROUP)
            attended = acc / tl.where(total > 0, total, 1.0)[:, None]
            out_place = out + row.to(tl.int64) * out_row + (head * GROUP + member)[:, None] * HEAD_DIM + dim[None, :]
            tl.store(out_place, attended.to(out.dtype.element_ty), mask=live)
        else:
            at = (item * num_kv_heads + head) * GROUP + member
            tl.store(partial + at[:, None] * HEAD_DIM + dim[None, :], acc, mask=live)
            tl.store(stats + at * 2, largest, mask=member < GROUP)
            tl.store(stats + at * 2 + 1, total, mask=member < GROUP)


@triton.jit(do_not_specialize_on_alignment=["rows", "starts"])
def combine_kernel(
    partial,
    stats,
    sinks,  # as `decode_kernel` has them: they count once, with all splits
    rows,
    starts,
    out,
    out_row,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """One program adds up the splits of one decode and head, always in the same order, SPLITS at a time."""
    index, head = tl.program_id(0), tl.program_id(1)
    num_kv_heads = tl.num_programs(1) // GROUP
    start, end = tl.load(starts + index), tl.load(starts + index + 1)
    if end - start == 1:  # `decode_kernel` has written the result
        return
    row = index
    if rows is not None:
        row = tl.load(rows + index)
    split, dim = tl.arange(0, SPLITS), tl.arange(0, DIM)
    acc = tl.zeros((DIM,), tl.float32)
    peak = tl.full((), FLOOR, tl.float32)
    weight = tl.zeros((), tl.float32)
    for first in range(start, end, SPLITS):
        used = first + split < end
        at = ((first + split) * num_kv_heads + head // GROUP) * GROUP + head % GROUP
        largest = tl.load(stats + at * 2, mask=used, other=FLOOR)
        total = tl.load(stats + at * 2 + 1, mask=used, other=0.0)
        there = used[:, None] & (dim < HEAD_DIM)[None, :]
        values = tl.load(partial + at[:, None] * HEAD_DIM + dim[None, :], mask=there, other=0.0)
        new_peak = tl.maximum(peak, tl.max(largest, 0))
        weights = tl.where(used, tl.exp2(largest - new_peak), 0.0)
        shrink = tl.exp2(peak - new_peak)
        acc = acc * shrink + tl.sum(values * weights[:, None], 0)
        weight = weight * shrink + tl.sum(weights * total, 0)
        peak = new_peak
    weight = with_sinks(weight, peak, sinks, head, head >= 0)
    attended = acc / tl.where(weight > 0, weight, 1.0)
    place = out + row.to(tl.int64) * out_row + head * HEAD_DIM + dim
    tl.store(place, attended.to(out.dtype.element_ty), mask=dim < HEAD_DIM)
