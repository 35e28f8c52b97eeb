"""Copies adapters from host memory into pages of the pool while steps run."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from functools import partial
from queue import Empty, SimpleQueue
from typing import Final

import torch

from ...adapters.errors import AdapterError, StoreUnavailable
from ...adapters.packing.packed_file import PagesPart
from ...kernels.backend import Kernels
from ..plan import AdapterFailure, AdapterLoad, HostAdapterStats
from .host_adapter_cache import HostAdapterCache
from .page_mover import CopyThread, Mark, SideStream
from .store_readers import StoreReaders

# Reads pinned adapters into host memory one by one, after reads that sequences wait for.

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


_log = logging.getLogger(__name__)


class AdapterLoader:
    """One thread that copies. No step uses the pages of a load until it has ended.

    An adapter in host memory never waits for the store. One that is read after its load was given up stays in host
    memory and is not copied, since its pages may have another owner by then. One that is larger than host memory for
    adapters is read and copied part by part. On a GPU copies have their own stream.
    """

    def __init__(self, cache: HostAdapterCache, pool: torch.Tensor, kernels: Kernels, store_deadline_s: float) -> None:
        """`store_deadline_s`: a load whose read of the store takes longer fails."""
        self._cache, self._pool, self._kernels = cache, pool, kernels
        self._beside = SideStream(pool.device)
        self._thread = CopyThread("adapter-loader")
        self._readers: StoreReaders[torch.Tensor] = StoreReaders(cache.get, store_deadline_s)
        self._pin_reader = PinReader(cache, self._readers, lambda: self.on_end())
        self._ended: SimpleQueue[str | AdapterFailure] = SimpleQueue()
        self.on_end: Callable[[], None] = lambda: None  # called from a thread of the loader's after each load

    def begin(self, load: AdapterLoad) -> None:
        mark, digest = self._beside.mark(), load.residence.digest
        packed = self._cache.find(digest)
        if packed is not None:
            self._copy_later(load, mark, packed)
        else:
            self._read(load, mark, 0)

    def forget(self, digest: str) -> None:
        """Drops the adapter from host memory, unless it is pinned."""
        self._cache.forget(digest)

    def pin(self, changes: Mapping[str, bool]) -> None:
        """Pins (True) or unpins adapters in host memory."""
        self._cache.pin(changes)
        self._pin_reader.look()

    def take_ended(self) -> tuple[tuple[str, ...], tuple[AdapterFailure, ...]]:
        """Digests of the loads that succeeded since the last call, and the loads that failed."""
        ended: list[str | AdapterFailure] = []
        try:
            while True:
                ended.append(self._ended.get_nowait())
        except Empty:
            pass
        return (
            tuple(end for end in ended if isinstance(end, str)),
            tuple(end for end in ended if isinstance(end, AdapterFailure)),
        )

    def host_adapter_stats(self) -> HostAdapterStats:
        """State of the cache in host memory, its changes since the last call, and counts of its reads."""
        cache, readers = self._cache, self._readers
        came, went = cache.take_changes()
        failed, hung = readers.num_failed, readers.num_hung
        return HostAdapterStats(cache.num_bytes, cache.num_reads, failed, hung, came, went, cache.take_pin_news())

    def close(self) -> None:
        """Returns although a read or a copy hangs."""
        self._readers.close()
        self._thread.close()

    def _read(self, load: AdapterLoad, mark: Mark, start: int) -> None:
        """Reads the adapter, or a part of it from page `start` on, and then copies it."""
        digest, part = load.residence.digest, self._cache.part(start, len(load.residence.pages))
        if part is None:
            self._readers.begin(digest, partial(self._copy_later, load, mark))
        else:
            read = partial(self._cache.get_part, part)
            self._readers.begin(digest, partial(self._copy_later, load, mark, part=part), read=read)

    def _copy_later(
        self, load: AdapterLoad, mark: Mark, packed: torch.Tensor | Exception, part: PagesPart | None = None
    ) -> None:
        self._thread.submit(partial(self._copy, load, mark, packed, part))

    def _copy(
        self, load: AdapterLoad, mark: Mark, packed: torch.Tensor | Exception, part: PagesPart | None = None
    ) -> None:
        """Ends a load, or goes on with its next part. `packed`: the adapter or part, or why it could not be read."""
        residence = load.residence
        start, stop = (0, len(residence.pages)) if part is None else (part.start, part.stop)
        try:
            if isinstance(packed, Exception):
                raise packed
            if len(packed) != stop - start:
                raise ValueError(f"{len(packed)} pages are packed, and {stop - start} follow from its ranks")
            with self._beside.after(mark):
                self._kernels.write_pages(self._pool, residence.pages[start:stop], packed)
            if stop < len(residence.pages):
                self._read(load, mark, stop)
                return
            self._ended.put(residence.digest)
        except AdapterError as error:
            is_unavailable = isinstance(error, StoreUnavailable)
            self._ended.put(AdapterFailure(residence.digest, str(error), is_unavailable))
        except Exception:  # its text is not for clients
            _log.exception("adapter %s could not be loaded", residence.digest)
            self._ended.put(AdapterFailure(residence.digest, f"adapter {residence.digest} could not be loaded"))
        self.on_end()
