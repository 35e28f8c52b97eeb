"""Packed adapters in host memory, between the store on disk and the pool."""

from __future__ import annotations

import threading
from collections import OrderedDict

import numpy as np
import torch

from ...adapters.format.tensor_file import Tensor
from ...adapters.packing.layout import AdapterLayout
from ...adapters.store.store import AdapterStore
from ...kernels.pages import write_pages
from .pinned_memory import PinnedArena


class HostAdapterCache:
    """Keeps at most `max_bytes` of them; the least recently used one goes first. For several threads."""

    def __init__(
        self, store: AdapterStore, layout: AdapterLayout, max_bytes: int, arena: PinnedArena | None = None
    ) -> None:
        """`arena`: pinned memory of this size, from which a GPU copies beside the steps; None: any memory serves."""
        self._store, self._layout, self._max_bytes, self._arena = store, layout, max_bytes, arena
        self._packed: OrderedDict[str, torch.Tensor] = OrderedDict()
        self._lock = threading.Lock()
        self.num_bytes = 0
        self.num_reads = 0  # from the store

    def find(self, digest: str) -> torch.Tensor | None:
        """The adapter as pages, `[num_pages, num_layers, slab]`; None: it is not in host memory."""
        with self._lock:
            packed = self._packed.get(digest)
            if packed is not None:
                self._packed.move_to_end(digest)
            return packed

    def get(self, digest: str) -> torch.Tensor:
        """The same, if need be read from the store. Raises AdapterCorrupt if its copy is bad, StoreUnavailable."""
        packed = self.find(digest)
        if packed is None:
            packed = as_torch(self._store.load_packed(digest, self._layout))
            room = None if self._arena is None else self._room(self._arena, packed)
            if room is not None:
                write_pages(room, range(len(packed)), packed)
                packed = room
            with self._lock:
                self.num_reads += 1
                if self._arena is None or room is not None:
                    self._keep(digest, packed)
        return packed

    def forget(self, digest: str) -> None:
        """Drops the adapter, if it is here."""
        with self._lock:
            dropped = self._packed.pop(digest, None)
            if dropped is not None:
                self.num_bytes -= dropped.nbytes

    def _room(self, arena: PinnedArena, packed: torch.Tensor) -> torch.Tensor | None:
        """As many pinned pages; None: there is no such run, though all that is kept has made room.

        That is so for an adapter larger than all, and while others are still being copied. It is then copied from plain
        memory, for which only the loader's thread waits, and not kept.
        """
        while packed.nbytes <= self._max_bytes:
            room = arena.take(len(packed))
            with self._lock:
                if room is not None or not self._packed:
                    return room
                self._drop_oldest()
        return None

    def _keep(self, digest: str, packed: torch.Tensor) -> None:
        if packed.nbytes > self._max_bytes or digest in self._packed:  # another thread may have read it meanwhile
            return
        self._packed[digest] = packed
        self.num_bytes += packed.nbytes
        while self.num_bytes > self._max_bytes:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        _, dropped = self._packed.popitem(last=False)
        self.num_bytes -= dropped.nbytes


def as_torch(tensor: Tensor) -> torch.Tensor:
    """The same memory for torch, which knows numpy's bfloat16 only by its bytes."""
    raw = torch.from_numpy(tensor.reshape(-1).view(np.uint8))
    return raw.view(getattr(torch, tensor.dtype.name)).view(tensor.shape)
