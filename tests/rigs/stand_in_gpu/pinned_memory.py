"""Pinned memory of the host: what the device may copy from and to while the host does something else."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable

import numpy as np
import torch

from motet.tests.rigs.stand_in_gpu.tally import Tally, product_line
from motet.tests.rigs.stand_in_gpu.timeline import Timeline
from motet.tests.rigs.stand_in_gpu.watched_memory import WatchedMemory

_CELL_BYTES = 64  # of memory that was registered, whose rows are not known: no two pages share one


class PinnedMemory:
    """All pinned memory of the host, by address. What was allocated stays until the stand-in ends."""

    def __init__(self, timeline: Timeline, tally: Tally) -> None:
        self._timeline, self._tally = timeline, tally
        self._starts: list[int] = []
        self._regions: list[WatchedMemory] = []  # by start
        self._kept: list[np.ndarray] = []

    def allocate(self, like: torch.Tensor) -> torch.Tensor:
        """A pinned tensor of the same shape, with the same numbers."""
        num_bytes = max(like.untyped_storage().nbytes(), 1)
        memory = np.zeros(num_bytes, np.uint8)
        self._kept.append(memory)
        made = torch.from_numpy(memory)[: like.untyped_storage().nbytes()].view(like.dtype)
        made = made.as_strided(like.size(), like.stride(), 0)
        made.copy_(like)
        rows = len(like) if like.dim() and len(like) else 1
        self._add("pinned memory", memory.ctypes.data, num_bytes, num_bytes // rows)
        self._tally.pinned.append(product_line())
        return made

    def register(self, address: int, num_bytes: int) -> None:
        assert not any(self._overlaps(region, address, num_bytes) for region in self._regions), "registered already"
        self._add("registered memory", address, num_bytes, _CELL_BYTES)

    def unregister(self, address: int) -> None:
        """Raises OrderError if the device may still copy from or to it."""
        at = self._starts.index(address)
        region = self._regions[at]
        region.use_on_host(slice(None), product_line(), writes=True)
        del self._starts[at], self._regions[at]

    def of(self, tensor: torch.Tensor) -> WatchedMemory | None:
        """The pinned memory in which a tensor of the host lies."""
        if not self._starts or tensor.device.type != "cpu" or tensor.numel() == 0:
            return None
        address = tensor.data_ptr()
        at = bisect_right(self._starts, address) - 1
        region = self._regions[at] if at >= 0 else None
        return region if region is not None and address < region.address + region.num_bytes else None

    def use_on_host(self, reads: Iterable[torch.Tensor], writes: Iterable[torch.Tensor]) -> None:
        for tensors, is_write in ((reads, False), (writes, True)):
            for tensor in tensors:
                region = self.of(tensor)
                if region is not None:
                    region.use_on_host(region.cells_of(tensor), product_line(), writes=is_write)

    def touch_on_host(self, address: int, num_bytes: int, *, writes: bool) -> None:
        """The host uses memory by its address."""
        at = bisect_right(self._starts, address) - 1
        region = self._regions[at] if at >= 0 else None
        if region is not None and address < region.address + region.num_bytes:
            region.use_on_host(region.cells_at(address - region.address, num_bytes), product_line(), writes=writes)

    def _add(self, what: str, address: int, num_bytes: int, cell_bytes: int) -> None:
        at = bisect_right(self._starts, address)
        self._starts.insert(at, address)
        self._regions.insert(at, WatchedMemory(self._timeline, what, address, num_bytes, cell_bytes))

    @staticmethod
    def _overlaps(region: WatchedMemory, address: int, num_bytes: int) -> bool:
        return address < region.address + region.num_bytes and region.address < address + num_bytes


def poison(tensor: torch.Tensor) -> None:
    """Fills memory that holds nothing yet with numbers that no result may depend on."""
    if tensor.is_floating_point():
        tensor.fill_(math.nan)
    elif tensor.dtype != torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).max // 2)
