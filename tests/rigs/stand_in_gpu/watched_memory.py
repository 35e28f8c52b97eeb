"""A stretch of memory, and what used each part of it last."""

from __future__ import annotations

import weakref
from collections.abc import Mapping

import numpy as np
import torch

from motet.tests.rigs.stand_in_gpu.timeline import OrderError, Timeline, Work

_MOST_CELLS = 1 << 24  # their tables take memory only where they are used
Cells = slice | np.ndarray


class Lease:
    """Held by the tensors that the product can reach: when the last one is gone, their memory is free."""


class WatchedMemory:
    """Memory of the device, or pinned memory of the host that it copies from and to.

    It is watched by cells: rows of what it was first allocated as, so that a page of the pool is one.
    """

    def __init__(self, timeline: Timeline, what: str, address: int, num_bytes: int, cell_bytes: int) -> None:
        self.what, self.address, self.num_bytes = what, address, num_bytes
        self.cell_bytes = max(cell_bytes, -(-num_bytes // _MOST_CELLS), 1)
        self.timeline = timeline
        self._num_cells = max(-(-num_bytes // self.cell_bytes), 1)
        self._writes: dict[int, np.ndarray] = {}  # by stream, each cell's last work
        self._reads: dict[int, np.ndarray] = {}
        self.lease: weakref.ref[Lease] | None = None  # None: never freed

    @property
    def is_free(self) -> bool:
        return self.lease is not None and self.lease() is None

    def use(self, cells: Cells, work: Work, *, writes: bool) -> None:
        """A work of the device uses these cells. Raises OrderError if others may be at it."""
        self._check(cells, work.clock, writes, self.timeline.line_of(work.number), but=work.stream)
        table = self._writes if writes else self._reads
        if work.stream not in table:
            table[work.stream] = np.zeros(self._num_cells, np.int64)
        table[work.stream][cells] = work.number

    def use_on_host(self, cells: Cells, line: str, *, writes: bool) -> None:
        """The host uses these cells. Raises OrderError if it has not waited for what the device does to them."""
        self._check(cells, self.timeline.done, writes, line, but=None)

    def unfinished(self, stream: int) -> str | None:
        """A line of another stream that may still use this memory when `stream` does its next work; None: none may."""
        for table in (self._writes, self._reads):
            for other, numbers in table.items():
                latest = int(numbers.max(initial=0))
                if other != stream and not self.timeline.is_done_for(stream, other, latest):
                    return self.timeline.line_of(latest)
        return None

    def cells_at(self, offset: int, num_bytes: int) -> slice:
        if num_bytes <= 0:
            return slice(0, 0)
        return slice(offset // self.cell_bytes, (offset + num_bytes - 1) // self.cell_bytes + 1)

    def cells_of(self, tensor: torch.Tensor) -> slice:
        """From the first to the last byte of a tensor that lies in this memory."""
        return self.cells_at(tensor.data_ptr() - self.address, span(tensor))

    def cells_of_rows(self, tensor: torch.Tensor, dim: int, indices: torch.Tensor) -> Cells:
        """Those of the tensor's slices at `indices` of `dim`, as far as these lie apart."""
        others = [(size, stride) for at, (size, stride) in enumerate(zip(tensor.shape, tensor.stride())) if at != dim]  # noqa: B905
        apart = max(tensor.stride(dim), self.cell_bytes // tensor.itemsize)  # slabs of a page may overlap within it
        if any(size > 1 and stride > apart for size, stride in others) or indices.numel() == 0:
            return self.cells_of(tensor)
        num_bytes = (sum((size - 1) * stride for size, stride in others) + 1) * tensor.itemsize
        rows = np.unique(indices.detach().numpy().astype(np.int64))
        rows = np.where(rows < 0, rows + tensor.shape[dim], rows)
        first = tensor.data_ptr() - self.address + rows * tensor.stride(dim) * tensor.itemsize
        begins, ends = first // self.cell_bytes, (first + num_bytes - 1) // self.cell_bytes
        longest = int((ends - begins).max(initial=0)) + 1
        return np.unique(np.minimum(begins[:, None] + np.arange(longest)[None, :], ends[:, None]))

    def _check(self, cells: Cells, clock: Mapping[int, int], writes: bool, line: str, but: int | None) -> None:
        for done, table in (("written", self._writes), ("read", self._reads if writes else {})):
            for other, numbers in table.items():
                latest = int(numbers[cells].max(initial=0)) if other != but else 0
                if latest > clock.get(other, 0):
                    verb = "writes" if writes else "reads"
                    earlier = self.timeline.line_of(latest)
                    problem = f"{line} {verb} {self.what} before it is known that {earlier} has {done} it"
                    why = "no event, wait or synchronisation is between the two"
                    raise self.timeline.problem(OrderError(f"{problem}: {why}"))


def span(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element to its last."""
    if tensor.numel() == 0:
        return 0
    furthest = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (furthest + 1) * tensor.itemsize
