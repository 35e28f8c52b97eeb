"""Reads pinned adapters into host memory one by one, after reads that sequences wait for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Final

import torch

from ...adapters.errors import AdapterError, StoreUnavailable
from ..memory.host_adapter_cache import HostAdapterCache
from .store_readers import StoreReaders

_MAX_REASON_CHARS: Final = 300
AGAIN_S: Final = 10.0  # after a read that failed because the store could not be read


class PinReader:
    """For several threads. `on_end` is called from any of them after each read."""

    def __init__(
        self, cache: HostAdapterCache, readers: StoreReaders[torch.Tensor], on_end: Callable[[], None]
    ) -> None:
        self._cache, self._readers, self._on_end = cache, readers, on_end
        self._lock = threading.Lock()
        self._is_reading = False

    def look(self) -> None:
        """Starts reading missing adapters, unless a read is under way, which continues with them."""
        with self._lock:
            if self._is_reading:
                return
            self._is_reading = True
        self._next(0.0)

    def _next(self, after_s: float) -> None:
        with self._lock:
            digest = self._cache.next_to_pin()
            self._is_reading = digest is not None
        if digest is not None:
            end, read = partial(self._ended, digest), self._cache.get_pinned
            self._readers.begin(digest, end, read=read, after_s=after_s, yields=True)

    def _ended(self, digest: str, packed: torch.Tensor | Exception) -> None:
        is_away = isinstance(packed, StoreUnavailable)
        if isinstance(packed, Exception):
            reason = str(packed) if isinstance(packed, AdapterError) else f"{type(packed).__name__}: {packed}"
            self._cache.fail_pin(digest, reason[:_MAX_REASON_CHARS], again=is_away)
        self._on_end()
        self._next(AGAIN_S if is_away else 0.0)
