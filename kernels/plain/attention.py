"""Paged attention in plain torch: the plain twin, which the fast kernels are tested against."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention

from ..attention import AttentionBatch, page_table
from ..windows import AttentionChunk, reach_of


def write_kv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rotary: torch.Tensor,
    kv: torch.Tensor,
    batch: AttentionBatch,
) -> torch.Tensor:
    """See `attention.KVWriter`."""
    of_k, of_q = angles(rotary, batch)
    if k.shape[1]:
        kv[:, 0][batch.row_pages, batch.row_slots] = rotated(k, *of_k).to(k.dtype)
    if v.shape[1]:
        kv[:, 1][batch.row_pages, batch.row_slots] = v
    return rotated(q, *of_q).to(q.dtype)


def paged_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    batch: AttentionBatch,
    scale: float,
    window: int | None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `attention.PagedAttention`."""
    return attend_pages(q, kv.__getitem__, kv.shape[2], batch, scale, window, softcap, sinks)


def attend_pages(
    q: torch.Tensor,
    read: Callable[[torch.Tensor], torch.Tensor],
    block_size: int,
    batch: AttentionBatch,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention over pages that `read` gives. Prompt chunks one by one; decodes together, in groups of similar context.

    `read`: pages of any shape → their KV, `[*shape, 2, block_size, num_kv_heads, head_dim]` in q's dtype.
    """
    out = torch.empty_like(q)
    decodes: list[int] = []
    for sequence, context_len in enumerate(batch.context_lens):
        start, end = batch.query_starts[sequence], batch.query_starts[sequence + 1]
        if end - start == 1:
            decodes.append(sequence)
            continue
        # Pages before those that the first row sees may hold anything.
        first = context_len - (end - start)
        skipped = 0 if window is None else max(0, first + 1 - reach_of(window, first)) // block_size
        first_page = int(batch.page_starts[sequence])
        pages = batch.pages[first_page + skipped : first_page - (-context_len // block_size)]
        seen_len = context_len - skipped * block_size
        rows, before = q[start:end], skipped * block_size
        out[start:end] = _attend_chunk(rows, read(pages), seen_len, before, scale, window, softcap, sinks)
    for group in _by_length(decodes, batch.context_lens):
        rows = torch.tensor([batch.query_starts[sequence] for sequence in group], device=q.device)
        num_pages = -(-max(batch.context_lens[sequence] for sequence in group) // block_size)
        table = page_table(batch, torch.tensor(group, device=q.device), num_pages)
        lengths = batch.positions[rows] + 1
        out[rows] = _attend_decodes(q[rows], read(table), lengths, scale, window, softcap, sinks)
    return out


def angles(
    rotary: torch.Tensor, batch: AttentionBatch
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Cosines and sines of k, and of q, of each row, `[num_rows, head_dim // 2]` each."""
    sides = rotary[batch.positions].unbind(1)
    return (sides[0], sides[1]), (sides[-2], sides[-1])


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x `[num_rows, heads, head_dim]` in float32, rotated by the angles of its rows `[num_rows, head_dim // 2]`."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _by_length(sequences: list[int], context_lens: tuple[int, ...]) -> list[list[int]]:
    """Groups whose shortest context is at least half of the longest, so that at most half of a group is padding."""
    groups: list[list[int]] = []
    for sequence in sorted(sequences, key=lambda s: context_lens[s]):
        if groups and context_lens[groups[-1][0]] * 2 >= context_lens[sequence]:
            groups[-1].append(sequence)
        else:
            groups.append([sequence])
    return groups


def _attend_chunk(
    q: torch.Tensor,
    pages: torch.Tensor,
    context_len: int,
    num_before: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of q `[n, heads, dim]`, the last n rows of a context in `pages` `[p, 2, block, kv_heads, dim]`.

    `num_before`: tokens of the sequence before these pages.
    """
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = pages.shape[3]
    group = num_heads // num_kv_heads
    k, v = (pages[:, i].flatten(0, 1)[:context_len].transpose(0, 1) for i in (0, 1))  # [kv_heads, context, dim]
    position = torch.arange(context_len - num_rows, context_len, device=q.device).unsqueeze(1)
    key = torch.arange(context_len, device=q.device).unsqueeze(0)
    seen = key <= position
    if isinstance(window, AttentionChunk):
        seen &= (key + num_before) // window == (position + num_before) // window
    elif window is not None:
        seen &= key > position - window
    grouped = q.view(num_rows, num_kv_heads, group, head_dim).permute(1, 2, 0, 3).flatten(1, 2)
    if sinks is not None:
        sinks = sinks.view(num_kv_heads, group).repeat_interleave(num_rows, 1)
    queries, seen = grouped.unsqueeze(0), seen.repeat(group, 1)
    attended = _attend(queries, k.unsqueeze(0), v.unsqueeze(0), seen, scale, softcap, sinks)
    return attended.view(num_kv_heads, group, num_rows, head_dim).permute(2, 0, 1, 3).reshape(q.shape)


def _attend_decodes(
    q: torch.Tensor,
    pages: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of q `[n, heads, dim]`, one row for each sequence; row i of `pages` holds those of its sequence.

    `pages` is `[n, p, 2, block, kv_heads, dim]`.
    """
    num_rows, _, head_dim = q.shape
    num_kv_heads = pages.shape[4]
    k, v = (pages[:, :, i].flatten(1, 2).transpose(1, 2) for i in (0, 1))  # [n, kv_heads, p * block, dim]
    key = torch.arange(k.shape[2], device=q.device).unsqueeze(0)
    seen = key < lengths.unsqueeze(1)
    if isinstance(window, AttentionChunk):
        seen &= key // window == ((lengths - 1) // window).unsqueeze(1)
    elif window is not None:
        seen &= key >= (lengths - window).unsqueeze(1)
    # Beyond a sequence's end and before its window pages may hold NaN, and a weight of zero times NaN is NaN.
    hidden = ~seen[:, None, :, None]
    k, v = k.masked_fill(hidden, 0), v.masked_fill(hidden, 0)
    grouped = q.view(num_rows, num_kv_heads, -1, head_dim)  # the heads of a group are rows that see the same keys
    sinks = None if sinks is None else sinks.view(num_kv_heads, -1)
    return _attend(grouped, k, v, seen[:, None, None, :], scale, softcap, sinks).reshape(q.shape)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: torch.Tensor,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of q `[n, heads, rows, dim]` over k and v `[n, heads, keys, dim]`.

    `seen`, a mask, broadcasts to `[n, heads, rows, keys]`; sinks are `[heads, rows]`.
    """
    if softcap is None and sinks is None:
        return scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)
    scores = (q @ k.transpose(2, 3) * scale).float()
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is None:
        return scores.softmax(-1).to(v.dtype) @ v
    with_sinks = torch.cat((scores, sinks[:, :, None].expand(*scores.shape[:3], 1)), dim=-1)
    return with_sinks.softmax(-1)[..., :-1].to(v.dtype) @ v
