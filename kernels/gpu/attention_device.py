"""Paged attention in Triton, the device side: one pass over the keys with a running maximum and sum.

The host side is `attention.py`. Online softmax is FlashAttention's (arXiv 2205.14135); splitting a decode over its keys
is Flash-Decoding's (Dao et al., 2023). A tile of keys is gathered from their pages; the heads that share a KV head are
rows of one tile of queries, so that each key is read once for all of them. Exponentials are powers of two: the host
multiplies log2(e) into `scale_in`.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Triton compiles a kernel again for special values (1, multiples of 16) of its arguments. `do_not_specialize` excludes
# arguments that change from step to step, so that requests never wait for the compiler.
_FLOOR = tl.constexpr(-1.0e30)  # below every score, but finite, so that the difference of two is not NaN


@triton.jit
def _add_keys(
    q,
    acc,
    largest,
    total,
    kv,
    table,
    start,
    low,
    high,
    scale_in,
    scale_out,
    kv_page,
    kv_side,
    kv_slot,
    MASKED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """acc, largest and total after the keys `start : start + BLOCK`.

    Query row i sees the keys `low[i] : high[i]`; without MASKED every row sees the whole tile. q and acc are
    `[rows, DIM]`, largest and total `[rows]`. `kv` points to the KV head, `table` to the sequence's first page.
    """
    key = start + tl.arange(0, BLOCK)
    dim = tl.arange(0, DIM)
    inside = key < tl.max(high, 0)
    if MASKED:
        page = tl.load(table + key // PAGE, mask=inside, other=0).to(tl.int64)
    else:
        page = tl.load(table + key // PAGE).to(tl.int64)
    place = kv + page[:, None] * kv_page + (key % PAGE)[:, None] * kv_slot + dim[None, :]
    if MASKED:
        # Beyond the context pages may hold NaN, and a weight of zero times NaN is NaN.
        there = inside[:, None] & (dim < HEAD_DIM)[None, :]
        k = tl.load(place, mask=there, other=0.0)
        v = tl.load(place + kv_side, mask=there, other=0.0)
    elif HEAD_DIM == DIM:
        k = tl.load(place)
        v = tl.load(place + kv_side)
    else:
        k = tl.load(place, mask=(dim < HEAD_DIM)[None, :], other=0.0)
        v = tl.load(place + kv_side, mask=(dim < HEAD_DIM)[None, :], other=0.0)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_in
    if SOFTCAP:
        scores = scale_out * (1.0 - 2.0 / (1.0 + tl.exp2(scores)))  # tanh
    if MASKED:
        seen = (key[None, :] >= low[:, None]) & (key[None, :] < high[:, None])
        scores = tl.where(seen, scores, _FLOOR)
    risen = tl.maximum(largest, tl.max(scores, 1))
    weights = tl.exp2(scores - risen[:, None])
    if MASKED:
        weights = tl.where(seen, weights, 0.0)
    shrink = tl.exp2(largest - risen)
    total = total * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return acc, risen, total


@triton.jit
def _share(length, window, WINDOW: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr, LEAST: tl.constexpr):
    """The first key that a decode sees, and the number of keys of each of its splits."""
    first = 0
    if WINDOW:
        first = tl.maximum(length - window, 0)
    share = tl.cdiv(tl.cdiv(length - first, SPLITS), BLOCK) * BLOCK
    return first, tl.maximum(share, LEAST)


@triton.jit(
    do_not_specialize=["window"],
    do_not_specialize_on_alignment=["pages", "page_starts", "positions", "rows", "sequences"],
)
def decode_kernel(
    q,  # [num_rows, num_heads, HEAD_DIM]
    kv,  # [num_pages, 2, PAGE, num_kv_heads, HEAD_DIM]
    pages,  # int32, of all sequences
    page_starts,  # [num_sequences] int64, where each sequence's begin in `pages`
    positions,  # [num_rows] int64; negative: the row is padding
    rows,  # [num_decodes] int32, the row of each decode; None: decode i is row i and sequence i
    sequences,  # [num_decodes] int32
    out,  # [num_rows, num_heads, HEAD_DIM]
    partial,  # [num_decodes, num_kv_heads, SPLITS, GROUP, HEAD_DIM] float32
    stats,  # [num_decodes, num_kv_heads, SPLITS, GROUP, 2] float32: largest score, sum of weights
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
    SPLITS: tl.constexpr,
    LEAST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program computes one split of one decode, for the heads that share one KV head."""
    index, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_kv_heads = tl.num_programs(1)
    row, sequence = index, index
    if rows is not None:
        row, sequence = tl.load(rows + index), tl.load(sequences + index)
    length = (tl.load(positions + row) + 1).to(tl.int32)
    first, share = _share(length, window, WINDOW, SPLITS, BLOCK, LEAST)
    start = first + split * share
    end = tl.minimum(start + share, length)
    if (SPLITS > 1) & (start >= end):
        return
    member, dim = tl.arange(0, GROUP_ROWS), tl.arange(0, DIM)
    live = (member < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    q_place = q + row.to(tl.int64) * q_row + (head * GROUP + member)[:, None] * q_head + dim[None, :]
    queries = tl.load(q_place, mask=live, other=0.0)
    acc = tl.zeros((GROUP_ROWS, DIM), tl.float32)
    largest = tl.full((GROUP_ROWS,), _FLOOR, tl.float32)
    total = tl.zeros((GROUP_ROWS,), tl.float32)
    low = tl.zeros((GROUP_ROWS,), tl.int32) + start
    high = tl.zeros((GROUP_ROWS,), tl.int32) + end
    table = pages + tl.load(page_starts + sequence)
    kv += head * HEAD_DIM
    for block in range(start, end, BLOCK):
        acc, largest, total = _add_keys(
            q=queries,
            acc=acc,
            largest=largest,
            total=total,
            kv=kv,
            table=table,
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
    if SPLITS == 1:
        attended = acc / tl.where(total > 0, total, 1.0)[:, None]
        out_place = out + row.to(tl.int64) * out_row + (head * GROUP + member)[:, None] * HEAD_DIM + dim[None, :]
        tl.store(out_place, attended.to(out.dtype.element_ty), mask=live)
    else:
        at = ((index * num_kv_heads + head).to(tl.int64) * SPLITS + split) * GROUP + member
        tl.store(partial + at[:, None] * HEAD_DIM + dim[None, :], acc, mask=live)
        tl.store(stats + at * 2, largest, mask=member < GROUP)
        tl.store(stats + at * 2 + 1, total, mask=member < GROUP)


@triton.jit(
    do_not_specialize=["window"],
    do_not_specialize_on_alignment=["positions", "rows"],
)
def combine_kernel(
    partial,
    stats,
    positions,
    rows,
    out,
    window,
    out_row,
    WINDOW: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    LEAST: tl.constexpr,
):
    """One program adds up the splits of one decode and head, always in the same order."""
    index, head = tl.program_id(0), tl.program_id(1)
    num_kv_heads = tl.num_programs(1) // GROUP
    row = index
    if rows is not None:
        row = tl.load(rows + index)
    length = (tl.load(positions + row) + 1).to(tl.int32)
    first, share = _share(length, window, WINDOW, SPLITS, BLOCK, LEAST)
    num_used = tl.cdiv(length - first, share)
    split, dim = tl.arange(0, SPLITS), tl.arange(0, DIM)
    used = split < num_used
    at = ((index * num_kv_heads + head // GROUP).to(tl.int64) * SPLITS + split) * GROUP + head % GROUP
    largest = tl.load(stats + at * 2, mask=used, other=_FLOOR)
    total = tl.load(stats + at * 2 + 1, mask=used, other=0.0)
    there = used[:, None] & (dim < HEAD_DIM)[None, :]
    acc = tl.load(partial + at[:, None] * HEAD_DIM + dim[None, :], mask=there, other=0.0)
    weights = tl.where(used, tl.exp2(largest - tl.max(largest, 0)), 0.0)
    weight = tl.sum(weights * total, 0)
    attended = tl.sum(acc * weights[:, None], 0) / tl.where(weight > 0, weight, 1.0)
    place = out + row.to(tl.int64) * out_row + head * HEAD_DIM + dim
    tl.store(place, attended.to(out.dtype.element_ty), mask=dim < HEAD_DIM)


@triton.jit(
    do_not_specialize=["window"],
    do_not_specialize_on_alignment=["pages", "page_starts", "positions", "blocks"],
)
def chunk_kernel(
    q,
    kv,
    pages,
    page_starts,
    positions,
    blocks,  # [num_blocks, 3] int32: sequence, first row, number of rows
    out,
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
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program computes some neighbouring rows of one sequence, for the heads that share one KV head."""
    index, head = tl.program_id(0), tl.program_id(1)
    sequence = tl.load(blocks + index * 3)
    first_row, num_rows = tl.load(blocks + index * 3 + 1), tl.load(blocks + index * 3 + 2)
    position = tl.load(positions + first_row).to(tl.int32)
    member, dim = tl.arange(0, BLOCK_ROWS), tl.arange(0, DIM)
    token, query_head = member // GROUP, head * GROUP + member % GROUP
    live = (token < num_rows)[:, None] & (dim < HEAD_DIM)[None, :]
    row = (first_row + token).to(tl.int64)
    queries = tl.load(q + row[:, None] * q_row + query_head[:, None] * q_head + dim[None, :], mask=live, other=0.0)
    acc = tl.zeros((BLOCK_ROWS, DIM), tl.float32)
    largest = tl.full((BLOCK_ROWS,), _FLOOR, tl.float32)
    total = tl.zeros((BLOCK_ROWS,), tl.float32)
    high = position + tl.minimum(token, num_rows - 1) + 1
    low = tl.zeros((BLOCK_ROWS,), tl.int32)
    end, begin = position + num_rows, 0
    if WINDOW:
        low = tl.maximum(high - window, 0)
        begin = tl.maximum(position + 1 - window, 0) // BLOCK * BLOCK
    table = pages + tl.load(page_starts + sequence)
    kv += head * HEAD_DIM
    clear = begin
    if not WINDOW:
        clear = (position + 1) // BLOCK * BLOCK  # every row sees these keys
        for block in range(0, clear, BLOCK):
            acc, largest, total = _add_keys(
                q=queries,
                acc=acc,
                largest=largest,
                total=total,
                kv=kv,
                table=table,
                start=block,
                low=low,
                high=high,
                scale_in=scale_in,
                scale_out=scale_out,
                kv_page=kv_page,
                kv_side=kv_side,
                kv_slot=kv_slot,
                MASKED=False,
                SOFTCAP=SOFTCAP,
                HEAD_DIM=HEAD_DIM,
                DIM=DIM,
                BLOCK=BLOCK,
                PAGE=PAGE,
                PRECISION=PRECISION,
            )
    for block in range(clear, end, BLOCK):
        acc, largest, total = _add_keys(
            q=queries,
            acc=acc,
            largest=largest,
            total=total,
            kv=kv,
            table=table,
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
    attended = (acc / total[:, None]).to(out.dtype.element_ty)
    # Rows and heads are computed a second time, because keeping them through the loop would take registers from the
    # sums. Adding a difference that is zero, but not known to the compiler, keeps it from reusing the first ones.
    member += tl.load(blocks + index * 3 + 2, volatile=True) - num_rows
    token, query_head = member // GROUP, head * GROUP + member % GROUP
    live = (token < num_rows)[:, None] & (dim < HEAD_DIM)[None, :]
    row = (first_row + token).to(tl.int64)
    tl.store(out + row[:, None] * out_row + query_head[:, None] * HEAD_DIM + dim[None, :], attended, mask=live)
