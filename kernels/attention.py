"""Paged attention: what every backend's kernels take and give.

A pool's layer view holds KV as `[num_pages, 2, block_size, num_kv_heads, head_dim]` (K at 0, V at 1), strided, because
a page's layers lie next to each other. Any page of the pool may hold an adapter instead: the page table says which
pages are a sequence's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class AttentionBatch:
    """Which rows of a batch belong to which sequence, and where its KV lies. Prompt chunks and decodes alike.

    Rows of sequence s are `query_starts[s] : query_starts[s + 1]`, its newest tokens; `context_lens[s]` counts all its
    tokens, these included. Host lists stand beside the tensors so that no backend has to ask the device for them.
    """

    query_starts: tuple[int, ...]  # [num_sequences + 1]
    context_lens: tuple[int, ...]  # [num_sequences], tokens
    page_table: torch.Tensor  # [num_sequences, max_pages] int64, rows padded with a valid page
    positions: torch.Tensor  # [num_rows] int64, of each row's token in its sequence
    row_pages: torch.Tensor  # [num_rows] int64, page that takes the row's K and V
    row_slots: torch.Tensor  # [num_rows] int64, token of that page


class WriteKV(Protocol):
    """Rotates q and k in place of copies and writes k and v into the pages of their rows; gives the rotated q.

    q `[num_rows, num_heads, head_dim]`, k and v `[num_rows, num_kv_heads, head_dim]`, rotary table
    `[num_positions, 2, head_dim // 2]` float32 (cosines, sines; halves convention of Llama).
    """

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rotary: torch.Tensor,
        kv: torch.Tensor,
        batch: AttentionBatch,
    ) -> torch.Tensor: ...


class PagedAttention(Protocol):
    """Causal attention of the batch's rows over their sequences' pages: `[num_rows, num_heads, head_dim]`.

    `window`: a row at position p sees positions above p - window; None: all up to p. `softcap`: a scaled score s counts
    as softcap * tanh(s / softcap) (Gemma 2, arXiv 2408.00118, §2); None: as it is. What pages hold beyond a sequence's
    context, NaN included, has no influence.
    """

    def __call__(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        batch: AttentionBatch,
        scale: float,
        window: int | None,
        softcap: float | None = None,
    ) -> torch.Tensor: ...
