"""LoRA over pages: what every backend's kernels take and give.

y += x Aᵀ B for each row with its own adapter, at the adapter's real rank. A and B lie in pages of the pool as
`adapters/packing/layout.py` says; the layer's scaling is already in B. A row's result depends on its own adapter
alone: not even an overflow in a neighbour's reaches it. Split in two, shrink and expand, because a gang adds the
rank-sized vectors between them over its workers (S-LoRA, arXiv 2311.03285, §6).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch


@dataclass(frozen=True)
class ModuleSlice:
    """One module's matrices in its adapter's virtual array, in elements. Rank 0: the adapter has no such module.

    In a gang a worker may have only its part of A's rows: `rank / a_rows` parts make the whole.
    """

    rank: int  # rows of B
    a_rows: int
    a: int
    b: int


ABSENT = ModuleSlice(0, 0, 0, 0)


@dataclass(frozen=True)
class PagedAdapter:
    """An adapter in the pool: its pages in order, and where each module starts."""

    pages: tuple[int, ...]
    modules: tuple[ModuleSlice, ...]  # by module index
    experts: tuple[PagedAdapter, ...] = ()  # its parts by expert, with modules of their own; empty: it has none


@dataclass(frozen=True)
class LoraGeometry:
    """The same for all adapters of a base."""

    num_layers: int
    slab: int  # elements of a page in one layer
    tile: int  # elements of the widest run that never straddles a slab
    sides: tuple[tuple[int, int], ...]  # elements of a row of A and of a row of B, by module index


@dataclass(frozen=True)
class LoraSegment:
    """Neighbouring rows that share an adapter. Rows in no segment are the base's."""

    start: int
    end: int
    adapter: PagedAdapter


LoraBatch = Any  # what a backend worked out once for a batch, used by all its layers; opaque to the caller


class LoraKernels(Protocol):
    """`modules` are indices of the modules that share the input x; their outputs lie side by side in y."""

    def prepare(self, segments: Sequence[LoraSegment], geometry: LoraGeometry, device: torch.device) -> LoraBatch: ...

    def add(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        pool: torch.Tensor,
        layer: int,
        batch: LoraBatch,
        modules: tuple[int, ...],
    ) -> None:
        """`shrink` and `expand` in one, where this worker has all of A's rows and needs nobody's help."""

    def shrink(
        self, x: torch.Tensor, pool: torch.Tensor, layer: int, batch: LoraBatch, modules: tuple[int, ...]
    ) -> torch.Tensor:
        """x Aᵀ of each row, with this worker's rows of A: the rank-sized vectors, in the backend's own order.

        x `[num_rows, in]`, pool `[num_pages, num_layers, slab]`; gives one dimension, as long on every worker.
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
        """Adds the adapters' share to y `[num_rows, sum of out]` in place.

        `shrunk` `[num_parts, length]`: what the workers' `shrink` gave, in the order of their ranks; or, where A's rows
        are not cut, one part, which is their sum.
        """


class CapturableLora(LoraKernels, Protocol):
    """LoRA whose launches can be recorded once and replayed on other batches."""

    def reserve(
        self, num_rows: int, num_pages: int, ranks: int, geometry: LoraGeometry, device: torch.device
    ) -> LoraBatch | None:
        """A batch of nothing, with room for any of so many rows, pages and ranks; None: not with this geometry."""

    def refill(self, reserved: LoraBatch, batch: LoraBatch | None) -> bool:
        """Makes `reserved` compute `batch` (None: nothing). False: it has no room for it, and is as it was."""
