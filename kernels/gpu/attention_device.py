"""Paged attention in Triton, the device side: one pass over the keys with a running maximum and sum.

The host side is `attention.py`; decodes are in `decode_device.py`. Online softmax is FlashAttention's
(arXiv 2205.14135). A tile of keys is gathered from their pages; the heads that share a KV head are rows of one tile of
queries, so that each key is read once for all of them. Exponentials are powers of two: the host multiplies log2(e) into
`scale_in`.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Triton compiles a kernel again for special values (1, multiples of 16) of its arguments. `do_not_specialize` excludes
# arguments that change from step to step, so that requests never wait for the compiler.
FLOOR = tl.constexpr(-1.0e30)  # below every score, but finite, so that the difference of two is not NaN


_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def with_sinks(total, largest, sinks, head, live):
    """The sums of some heads' weights, which are relative to their largest scores, with the weights of their sinks.

    That of a sink far above all scores is bounded, or it would be infinite: nothing is left of the values either way.
    """
    if sinks is not None:
        sink = tl.load(sinks + head, mask=live, other=FLOOR) * _LOG2_E
        total += tl.exp2(tl.minimum(sink - largest, 126.0))
    return total


@triton.jit
def pages_of(table, start, end, BLOCK: tl.constexpr, PAGE: tl.constexpr):
    """The pages of the keys `start : start + BLOCK`, a page of the sequence's for each, and 0 from `end` on.

    Loops look them up one tile ahead: where an address is loaded in the same round as what lies there, the compiler's
    pipelines hold one tile of K and V instead of two.
    """
    key = start + tl.arange(0, BLOCK)
    return tl.load(table + key // PAGE, mask=key < end, other=0)


@triton.jit
def add_keys(
    q,
    acc,
    largest,
    total,
    kv,
    scales,
    page,
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
    `[rows, DIM]`, largest and total `[rows]`. `kv` points to the KV head; `page` is `pages_of` these keys.
    `scales` points to those of that head where KV has eight bits: K's multiply the scores, V's the weights.
    """
    key = start + tl.arange(0, BLOCK)
    dim = tl.arange(0, DIM)
    inside = key < tl.max(high, 0)
    place = kv + page.to(tl.int64)[:, None] * kv_page + (key % PAGE)[:, None] * kv_slot + dim[None, :]
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
    if scales is not None:
        k = k.to(tl.float8e4nv, bitcast=True).to(q.dtype)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_in
    if scales is not None:
        scale_place = scales + page.to(tl.int64) * (kv_page // 4) + key % PAGE
        if MASKED:
            k_scale = tl.load(scale_place, mask=inside, other=0.0)
            v_scale = tl.load(scale_place + kv_side // HEAD_DIM, mask=inside, other=0.0)
        else:
            k_scale = tl.load(scale_place)
            v_scale = tl.load(scale_place + kv_side // HEAD_DIM)
        scores *= k_scale[None, :]
    if SOFTCAP:
        scores = scale_out * (1.0 - 2.0 / (1.0 + tl.exp2(scores)))  # tanh
    if MASKED:
        seen = (key[None, :] >= low[:, None]) & (key[None, :] < high[:, None])
        scores = tl.where(seen, scores, FLOOR)
    risen = tl.maximum(largest, tl.max(scores, 1))
    weights = tl.exp2(scores - risen[:, None])
    if MASKED:
        weights = tl.where(seen, weights, 0.0)
    shrink = tl.exp2(largest - risen)
    total = total * shrink + tl.sum(weights, 1)
    if scales is not None:
        weights *= v_scale[None, :]
        v = v.to(tl.float8e4nv, bitcast=True).to(q.dtype)
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return acc, risen, total


@triton.jit(
    do_not_specialize=["window"],
    do_not_specialize_on_alignment=["pages", "page_starts", "positions", "blocks"],
)
def chunk_kernel(
    q,
    kv,
    scales,  # of KV of eight bits, as `Float8KV` has them; None: KV has q's dtype
    sinks,  # [num_heads] float32 or None
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
    largest = tl.full((BLOCK_ROWS,), FLOOR, tl.float32)
    total = tl.zeros((BLOCK_ROWS,), tl.float32)
    high = position + tl.minimum(token, num_rows - 1) + 1
    low = tl.zeros((BLOCK_ROWS,), tl.int32)
    end, begin = position + num_rows, 0
    if WINDOW == 2:  # chunks
        low = (high - 1) // window * window
        begin = position // window * window // BLOCK * BLOCK
    elif WINDOW:
        low = tl.maximum(high - window, 0)
        begin = tl.maximum(position + 1 - window, 0) // BLOCK * BLOCK
    table = pages + tl.load(page_starts + sequence)
    kv += head * HEAD_DIM
    if scales is not None:
        scales += head * PAGE
    clear = begin
    page = pages_of(table, begin, end, BLOCK, PAGE)
    if not WINDOW:
        clear = (position + 1) // BLOCK * BLOCK  # every row sees these keys
        for block in range(0, clear, BLOCK):
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
                MASKED=False,
                SOFTCAP=SOFTCAP,
                HEAD_DIM=HEAD_DIM,
                DIM=DIM,
                BLOCK=BLOCK,
                PAGE=PAGE,
                PRECISION=PRECISION,
            )
            page = upcoming
    for block in range(clear, end, BLOCK):
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
    if sinks is not None:
        member_head = head * GROUP + tl.arange(0, BLOCK_ROWS) % GROUP
        total = with_sinks(total, largest, sinks, member_head, member_head >= 0)
    attended = (acc / total[:, None]).to(out.dtype.element_ty)
    # Rows and heads are computed a second time, because keeping them through the loop would take registers from the
    # sums. Adding a difference that is zero, but not known to the compiler, keeps it from reusing the first ones.
    member += tl.load(blocks + index * 3 + 2, volatile=True) - num_rows
    token, query_head = member // GROUP, head * GROUP + member % GROUP
    live = (token < num_rows)[:, None] & (dim < HEAD_DIM)[None, :]
    row = (first_row + token).to(tl.int64)
    tl.store(out + row[:, None] * out_row + query_head[:, None] * HEAD_DIM + dim[None, :], attended, mask=live)
