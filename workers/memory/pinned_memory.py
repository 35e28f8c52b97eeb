"""Pinned pages of host memory, allocated once when a worker starts."""

from __future__ import annotations

import threading
import weakref
from bisect import insort
from itertools import pairwise

import torch

from ...kernels.pinned_zeros import pinned_zeros
from .pool import PoolGeometry


def pinned_pages(num_pages: int, geometry: PoolGeometry) -> torch.Tensor:
    """`[num_pages, num_layers, slab]` zeros; see `pinned_zeros`."""
    shape = (num_pages, geometry.num_layers, geometry.slab)
    advice = "host_bytes and kv_host_bytes together must fit into this machine's free memory"
    return pinned_zeros(shape, geometry.dtype, advice)


class PinnedArena:
    """Pinned pages, handed out in runs that lie side by side. For several threads."""

    def __init__(self, num_pages: int, geometry: PoolGeometry) -> None:
        """Raises ValueError if the driver cannot pin that much."""
        self._pages = pinned_pages(num_pages, geometry)
        self._free = [(0, num_pages)]  # runs `[start, end)`, ascending; no two touch
        self._lock = threading.RLock()  # a finalizer may release a run in the thread that takes one

    def take(self, num_pages: int) -> torch.Tensor | None:
        """A run of pages, released when the last reference to this tensor is gone; None: no run is long enough."""
        with self._lock:
            for place, (start, end) in enumerate(self._free):
                if end - start >= num_pages:
                    self._free[place : place + 1] = [(start + num_pages, end)] if end - start > num_pages else []
                    break
            else:
                return None
        taken = self._pages[start : start + num_pages]
        weakref.finalize(taken, self._give_back, start, start + num_pages)
        return taken

    @property
    def num_free(self) -> int:
        """Pages, of all runs together."""
        with self._lock:
            return sum(end - start for start, end in self._free)

    def _give_back(self, start: int, end: int) -> None:
        with self._lock:
            insort(self._free, (start, end))
            joined: list[tuple[int, int]] = []
            for run in self._free:
                if joined and joined[-1][1] == run[0]:
                    joined[-1] = (joined[-1][0], run[1])
                else:
                    joined.append(run)
            self._free = joined

    def check_integrity(self) -> None:
        """Raises AssertionError if free runs touch, overlap or lie outside."""
        with self._lock:
            edges = [edge for run in self._free for edge in run]
        assert all(before < after for before, after in pairwise(edges)), "free runs touch"
        assert not edges or (edges[0] >= 0 and edges[-1] <= len(self._pages)), "a run lies outside"
