"""The contract of LoRA over pages, for the kernels of every backend.

y += x Aᵀ B for each row, with the row's own adapter and at that adapter's own rank. A `[rank, in]` and B transposed
`[rank, out]` lie in pages of the pool as `adapters/packing/layout.py` describes; B already contains the adapter's
scaling. x, y and the pool have one dtype, float32 or bfloat16; sums are float32. A row's result depends on nothing but
the row and its own adapter: NaN or infinity from another adapter never reaches it.

The product is split in two, shrink (x Aᵀ) and expand (times B); workers that each hold a part of A's rows could
exchange the rank-sized vectors between the two, as S-LoRA's do (arXiv 2311.03285, §6). Segments of rows that share an
adapter are Punica's (arXiv 2310.18547); A and B in pages, each at its own rank, are S-LoRA's (§5).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch


@dataclass(frozen=True)
class ModuleSlice:
    """Where one module's matrices lie in the virtual array of its adapter. Rank 0: the adapter has no such module.

    In a gang a worker may hold only a part of A's rows: there are `rank / a_rows` equal parts.
    """

    rank: int  # rows of B
    a_rows: int  # rows of A on this worker
    a: int  # start of A, in elements
    b: int  # start of B, in elements


ABSENT = ModuleSlice(0, 0, 0, 0)


@dataclass(frozen=True)
class PagedEnd:
    """Where what an adapter has of the embedding or of the head lies in its end pages, in elements."""

    lora: ModuleSlice = ABSENT
    num_rows: int = 0  # of tokens
    token_ids: int = 0  # their digits
    rows: int = 0


@dataclass(frozen=True, eq=False)
class PagedEnds:
    """What an adapter has of the embedding and of the head, in pages of its own; see `model_ends.py`."""

    pages: tuple[int, ...]
    embedding: PagedEnd
    head: PagedEnd


@dataclass(frozen=True)
class PagedAdapter:
    """An adapter in the pool: its pages in order, and where each module lies."""

    pages: tuple[int, ...]
    modules: tuple[ModuleSlice, ...]  # by module index
    experts: tuple[PagedAdapter, ...] = ()  # its part for each expert, with modules of its own; empty: it has none
    outputs: tuple[int | None, ...] = ()  # by module index, where the vectors of its outputs start; empty: it has none
    ends: PagedEnds | None = None  # None: it changes neither the embedding nor the head


@dataclass(frozen=True)
class LoraGeometry:
    """The sizes that all adapters of a base share."""

    num_layers: int
    slab: int  # elements of a page in one layer
    tile: int  # elements of a run of a row; it divides slabs and rows, so that no run crosses the end of a page
    sides: tuple[tuple[int, int], ...]  # elements of a row of A and of a row of B, by module index


@dataclass(frozen=True)
class LoraSegment:
    """Rows `start : end` of a batch, which share an adapter. Rows outside all segments use the base alone."""

    start: int
    end: int
    adapter: PagedAdapter


LoraBatch = Any  # what `prepare` computes once for all layers of a batch; opaque to the caller


class LoraKernels(Protocol):
    """`modules` are indices of the modules that share the input x; their outputs lie side by side in y."""

    def prepare(self, segments: Sequence[LoraSegment], geometry: LoraGeometry, device: torch.device) -> LoraBatch:
        """The batch for the other methods. `segments` are in the order of their rows and do not overlap."""

    def add(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        pool: torch.Tensor,
        layer: int,
        batch: LoraBatch,
        modules: tuple[int, ...],
    ) -> None:
        """`shrink`, then `expand`, where this worker holds all of A and nothing has to be exchanged."""

    def shrink(
        self, x: torch.Tensor, pool: torch.Tensor, layer: int, batch: LoraBatch, modules: tuple[int, ...]
    ) -> torch.Tensor:
        """x Aᵀ of each row, with this worker's part of A: rank-sized vectors.

        x `[num_rows, in]`, pool `[num_pages, num_layers, slab]`. The result has one dimension, the backend's own order
        of vectors and the same length on every worker.
        """

    def expand(
        self,
        y: torch.Tensor,
        shrunk: torch.Tensor,
        pool: torch.Tensor,
        layer: int,
        batch: LoraBatch,
        modules: tuple[int, ...],
    ) -> None:
        """Adds the adapters' outputs to y `[num_rows, sum of out]` in place.

        `shrunk` `[num_parts, length]`: the results of `shrink`. Where workers hold different rows of A, one part from
        each worker, by the worker's rank; where A's inputs are cut instead, one part, the sum over the workers.
        """


class CapturableLora(LoraKernels, Protocol):
    """LoRA whose launches a CUDA graph can record once and replay on other batches."""

    def reserve(
        self,
        num_rows: int,
        num_segments: int,
        num_pages: int,
        ranks: int,
        geometry: LoraGeometry,
        device: torch.device,
    ) -> LoraBatch | None:
        """An empty batch with room for these numbers; None: the geometry does not allow it."""

    def part(self, reserved: LoraBatch, num_rows: int, num_segments: int) -> LoraBatch:
        """`reserved` as a batch with room for fewer rows and segments, for which less is launched.

        It is the same memory: to copy a batch into one of them leaves nothing of use in the others.
        """

    def refill(self, reserved: LoraBatch, batch: LoraBatch | None) -> bool:
        """Copies `batch` (None: an empty one) into `reserved`. False: it does not fit, and `reserved` is unchanged."""
