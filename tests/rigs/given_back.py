"""Pages that a sequence with a window has given back: whatever holds them now must not be seen."""

from __future__ import annotations

import itertools

import torch

from motet.kernels.attention import AttentionBatch
from motet.kernels.float8_kv import Float8KV


def poison_before_window(kv: torch.Tensor | Float8KV, batch: AttentionBatch, window: int | None) -> None:
    """Fills a layer's pages of which no row of the batch sees a key with NaN, those beyond the contexts left out."""
    if window is None:
        return
    numbers, block_size = (kv.scales, kv.values.shape[2]) if isinstance(kv, Float8KV) else (kv, kv.shape[2])
    for sequence, (start, end) in enumerate(itertools.pairwise(batch.query_starts)):
        first_seen = max(0, batch.context_lens[sequence] - (end - start) + 1 - window)
        first_page = int(batch.page_starts[sequence])
        numbers[batch.pages[first_page : first_page + first_seen // block_size].long()] = torch.nan
