"""Packed adapters in host memory, between the store on disk and the pool."""

from __future__ import annotations

import threading
from collections import OrderedDict

import numpy as np
import torch

from ...adapters.format.tensor_file import Tensor
from ...adapters.packing.layout import AdapterLayout
from ...adapters.store.store import AdapterStore


class HostAdapterCache:
    """Keeps at most `max_bytes` of them; the least recently used one goes first. For several threads."""

    def __init__(self, store: AdapterStore, layout: AdapterLayout, max_bytes: int, pinned: bool) -> None:
        """`pinned`: in page-locked memory, from which a GPU copies faster."""
        self._store, self._layout, self._max_bytes, self._pinned = store, layout, max_bytes, pinned
        self._packed: OrderedDict[str, torch.Tensor] = OrderedDict()
        self._lock = threading.Lock()
        self._moved: dict[str, None] = {}  # digests that came or went since the last take_changes()
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
            if self._pinned:
                packed = packed.pin_memory()
            with self._lock:
                self.num_reads += 1
                self._keep(digest, packed)
        return packed

    def forget(self, digest: str) -> None:
        """Drops the adapter, if it is here."""
        with self._lock:
            dropped = self._packed.pop(digest, None)
            if dropped is not None:
                self.num_bytes -= dropped.nbytes
                self._moved[digest] = None

    def take_changes(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Digests that came and that went since the last call."""
        if not self._moved:  # as after nearly every step
            return (), ()
        with self._lock:
            moved, self._moved = self._moved, {}
            return tuple(d for d in moved if d in self._packed), tuple(d for d in moved if d not in self._packed)

    def _keep(self, digest: str, packed: torch.Tensor) -> None:
        if packed.nbytes > self._max_bytes or digest in self._packed:  # another thread may have read it meanwhile
            return
        self._packed[digest] = packed
        self.num_bytes += packed.nbytes
        self._moved[digest] = None
        while self.num_bytes > self._max_bytes:
            gone, dropped = self._packed.popitem(last=False)
            self.num_bytes -= dropped.nbytes
            self._moved[gone] = None


def as_torch(tensor: Tensor) -> torch.Tensor:
    """The same memory for torch, which knows numpy's bfloat16 only by its bytes."""
    raw = torch.from_numpy(tensor.reshape(-1).view(np.uint8))
    return raw.view(getattr(torch, tensor.dtype.name)).view(tensor.shape)
