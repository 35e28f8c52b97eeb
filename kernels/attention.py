"""The contract of paged attention, for the kernels of every backend.

`kv` is one layer of the pool: `[num_pages, 2, block_size, num_kv_heads, head_dim]`, K at index 0 and V at 1. It is a
strided view, because all layers of a page lie side by side in the pool. A page may hold a part of an adapter instead of
KV; the batch lists the pages of each sequence. Where it lists slabs, `kv` has a layer's first slab and all after
it: to kernels these are pages. Where keys are values, as in latent attention, K and V are the same memory
(a stride of 0). q, k, v, the pool and the result have one dtype, float32 or bfloat16; tensors are on one
device. KV of eight bits lies in its pages as `float8_kv.py` says, and all else is as here.
The idea of KV in pages is PagedAttention's (vLLM, arXiv 2309.06180).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

import torch

# One layer of the pool, as the kernels that were chosen read it: a tensor, or `float8_kv.Float8KV`.
LayerKV = Any
T = TypeVar("T")


@dataclass(frozen=True)
class AttentionBatch:
    """Which rows of a batch belong to which sequence, and where each sequence's KV lies.

    A row is one token, of a prompt chunk or of a decode. Rows `query_starts[s] : query_starts[s + 1]` are the newest
    tokens of sequence s; `context_lens[s]` counts all its tokens, these included. These two are lists on the host, so
    that no backend has to wait for a copy from the device. What tensors hold does not change while a batch is used:
    backends keep what they derive from it (`DerivedFromBatches`).
    """

    query_starts: tuple[int, ...]  # [num_sequences + 1]
    context_lens: tuple[int, ...]  # [num_sequences], tokens
    pages: torch.Tensor  # int32, of all sequences, one after the other: nothing is padded to the longest
    page_starts: torch.Tensor  # [num_sequences] int64, where each sequence's begin in `pages`
    most_pages: int  # no sequence has more
    positions: torch.Tensor  # [num_rows] int64, of each row's token in its sequence
    row_pages: torch.Tensor  # [num_rows] int64, the page into which the row's K and V are written
    row_slots: torch.Tensor  # [num_rows] int64, the row's place in that page, in tokens


class DerivedFromBatches(Generic[T]):
    """What a backend has derived from the last two batches, of which the layers of a step use one or two in turn."""

    def __init__(self) -> None:
        self._entries: deque[tuple[AttentionBatch, object, T]] = deque(maxlen=2)

    def of(self, batch: AttentionBatch, derive: Callable[[], T], key: object = None) -> T:
        """`key`: what else it is derived from."""
        for entry_batch, entry_key, derived in self._entries:
            if entry_batch is batch and entry_key == key:
                return derived
        derived = derive()
        self._entries.append((batch, key, derived))
        return derived


def split_batch(batch: AttentionBatch, row: int) -> tuple[AttentionBatch, AttentionBatch]:
    """The rows before `row`, and those from it on; neither is empty. The second may go on with the first's sequence.

    Then the first has to be written before the second is read.
    """
    starts = batch.query_starts
    assert 0 < row < starts[-1], f"row {row} of {starts[-1]} leaves a part without rows"
    stop, first = bisect_left(starts, row), bisect_right(starts, row) - 1
    context_lens = (*batch.context_lens[: stop - 1], batch.context_lens[stop - 1] - (starts[stop] - row))

    def part(
        rows: slice, sequences: slice, query_starts: tuple[int, ...], context_lens: tuple[int, ...]
    ) -> AttentionBatch:
        return replace(
            batch,
            query_starts=query_starts,
            context_lens=context_lens,
            page_starts=batch.page_starts[sequences],
            positions=batch.positions[rows],
            row_pages=batch.row_pages[rows],
            row_slots=batch.row_slots[rows],
        )

    return (
        part(slice(row), slice(stop), (*starts[:stop], row), context_lens),
        part(
            slice(row, None),
            slice(first, None),
            (0, *[start - row for start in starts[first + 1 :]]),
            batch.context_lens[first:],
        ),
    )


def page_table(batch: AttentionBatch, sequences: torch.Tensor, width: int) -> torch.Tensor:
    """The first `width` pages of some sequences, `[len(sequences), width]` int32, for kernels that need them in rows.

    Beyond a sequence's last page a row holds any other valid page. It is made on the batch's device, which costs the
    host nothing.
    """
    places = batch.page_starts[sequences].unsqueeze(1) + torch.arange(width, device=batch.pages.device)
    return batch.pages[places.clamp_(max=len(batch.pages) - 1)]


class KVWriter(Protocol):
    """Writes the rotated k, and v, into the pages of their rows; returns the rotated q, a new tensor.

    q `[num_rows, num_heads, head_dim]`, k and v `[num_rows, num_kv_heads, head_dim]`; none of the three is changed.
    With k and v of no heads nothing is written (layers that attend to the KV of another one), with v of no heads k
    alone (latent attention).
    `rotary` `[num_positions, 2, head_dim // 2]` float32 holds cosines, then sines. Element i of a head is rotated with
    element i + head_dim // 2, as in Llama (RoFormer, arXiv 2104.09864). With 4 in the place of 2 it holds those of k,
    then those of q, which are scaled by their position (Ministral 3).
    """

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rotary: torch.Tensor,
        kv: LayerKV,
        batch: AttentionBatch,
    ) -> torch.Tensor: ...


class PagedAttention(Protocol):
    """Causal attention of the batch's rows over their sequences' pages: `[num_rows, num_heads, head_dim]`.

    q `[num_rows, num_heads, head_dim]`, rotated; the KV of the rows themselves is in their pages already. `scale`
    multiplies the scores. `window`, in tokens: a row at position p sees positions above p - window, or those of its
    `windows.AttentionChunk`; None: all up to p. `softcap`: a scaled score s becomes softcap * tanh(s / softcap) (Gemma
    2, arXiv 2408.00118, §2); None: scores are not capped. `sinks` `[num_heads]` float32: a score of each head, neither
    scaled nor capped, that takes its share of the softmax and has no value (attention sinks, arXiv 2309.17453, as
    gpt-oss learns them); None: there are none.
    What pages hold beyond a sequence's context, NaN included, has no influence. Nor has what lies before a window:
    before the first page of which a row sees a key, on a GPU 256 keys before that (they are read in tiles). There the
    list may have any valid page.
    """

    def __call__(
        self,
        q: torch.Tensor,
        kv: LayerKV,
        batch: AttentionBatch,
        scale: float,
        window: int | None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor: ...
