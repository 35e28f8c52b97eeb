"""Brings adapters from the host tier into pages of the pool, beside the steps."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue

import torch

from ...adapters.errors import AdapterError
from ...kernels.backend import Kernels
from ..memory.tiers import HostTier
from ..scheduling.plan import AdapterFailure, AdapterLoad

_log = logging.getLogger(__name__)


class AdapterLoader:
    """One thread that copies. Pages under a load belong to nobody else until the load has ended.

    On a GPU it copies on a stream of its own, beside the kernels of the steps.
    """

    def __init__(self, host: HostTier, pool: torch.Tensor, kernels: Kernels) -> None:
        self._host, self._pool, self._kernels = host, pool, kernels
        self._stream: torch.cuda.Stream | None = None
        if pool.device.type == "cuda":
            self._stream = torch.cuda.Stream(pool.device)  # type: ignore[no-untyped-call]
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="adapter-loader")
        self._ended: SimpleQueue[str | AdapterFailure] = SimpleQueue()
        self.on_end: Callable[[], None] = lambda: None  # called from the loader's thread after each load

    def begin(self, load: AdapterLoad) -> None:
        # Kernels of steps that were already launched may still write to pages that their plans took back since.
        launched = None if self._stream is None else torch.cuda.current_stream(self._pool.device).record_event()
        self._thread.submit(self._load, load, launched)

    def take_ended(self) -> tuple[tuple[str, ...], tuple[AdapterFailure, ...]]:
        """Digests of the loads that ended well since the last call, and those that failed."""
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

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _load(self, load: AdapterLoad, launched: torch.cuda.Event | None) -> None:
        residence = load.residence
        try:
            packed = self._host.get(residence.digest)
            if len(packed) != len(residence.pages):
                raise ValueError(f"{len(packed)} pages are packed, and {len(residence.pages)} follow from its ranks")
            self._write(residence.pages, packed, launched)
            self._ended.put(residence.digest)
        except AdapterError as error:
            self._ended.put(AdapterFailure(residence.digest, str(error)))
        except Exception as error:
            _log.exception("adapter %s could not be loaded", residence.digest)
            message = f"adapter {residence.digest} could not be loaded: {type(error).__name__}: {error}"
            self._ended.put(AdapterFailure(residence.digest, message))
        self.on_end()

    def _write(self, pages: tuple[int, ...], packed: torch.Tensor, launched: torch.cuda.Event | None) -> None:
        """Returns when the pages are there, for any stream."""
        if self._stream is None or launched is None:
            self._kernels.write_pages(self._pool, pages, packed)
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(launched)
            self._kernels.write_pages(self._pool, pages, packed)
        self._stream.synchronize()
