"""Copies adapters from host memory into pages of the pool, beside the steps."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue

import torch

from ...adapters.errors import AdapterError
from ...kernels.backend import Kernels
from ..memory.host_adapter_cache import HostAdapterCache
from ..plan import AdapterFailure, AdapterLoad, HostAdapterStats
from .side_stream import Mark, SideStream

_log = logging.getLogger(__name__)


class AdapterLoader:
    """One thread that copies. No step uses the pages of a load until it has ended.

    On a GPU it copies on a stream of its own, beside the kernels of the steps.
    """

    def __init__(self, cache: HostAdapterCache, pool: torch.Tensor, kernels: Kernels) -> None:
        self._cache, self._pool, self._kernels = cache, pool, kernels
        self._beside = SideStream(pool.device)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="adapter-loader")
        self._ended: SimpleQueue[str | AdapterFailure] = SimpleQueue()
        self.on_end: Callable[[], None] = lambda: None  # called from the loader's thread after each load

    def begin(self, load: AdapterLoad) -> None:
        self._thread.submit(self._load, load, self._beside.mark())

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
        """What the cache in host memory holds at this moment."""
        return HostAdapterStats(self._cache.num_bytes, self._cache.num_reads)

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _load(self, load: AdapterLoad, mark: Mark) -> None:
        residence = load.residence
        try:
            packed = self._cache.get(residence.digest)
            if len(packed) != len(residence.pages):
                raise ValueError(f"{len(packed)} pages are packed, and {len(residence.pages)} follow from its ranks")
            with self._beside.after(mark):
                self._kernels.write_pages(self._pool, residence.pages, packed)
            self._ended.put(residence.digest)
        except AdapterError as error:
            self._ended.put(AdapterFailure(residence.digest, str(error)))
        except Exception as error:
            _log.exception("adapter %s could not be loaded", residence.digest)
            message = f"adapter {residence.digest} could not be loaded: {type(error).__name__}: {error}"
            self._ended.put(AdapterFailure(residence.digest, message))
        self.on_end()
