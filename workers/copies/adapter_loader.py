"""Copies adapters from host memory into pages of the pool while steps run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from queue import Empty, SimpleQueue

import torch

from ...adapters.errors import AdapterError, StoreUnavailable
from ...adapters.packing.packed_file import PagesPart
from ...kernels.backend import Kernels
from ..memory.host_adapter_cache import HostAdapterCache
from ..plan import AdapterFailure, AdapterLoad, HostAdapterStats
from .copy_thread import CopyThread
from .pin_reader import PinReader
from .side_stream import Mark, SideStream
from .store_readers import StoreReaders

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
