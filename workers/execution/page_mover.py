"""Moves pages of KV between the tiers, beside the steps."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue

import torch

from ..memory.page_arrays import PageArray
from ..scheduling.plan import MoveEnd, PageMove, Tier
from .side_stream import Mark, SideStream

_log = logging.getLogger(__name__)


class PageMover:
    """One thread that copies, in the order of the plans. Pages under a move change for nobody until it has ended."""

    def __init__(self, arrays: Mapping[Tier, PageArray], device: torch.device) -> None:
        """`arrays`: of the tiers that there are. `device`: of the pool."""
        self._arrays, self._beside = arrays, SideStream(device)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="page-mover")
        self._ended: SimpleQueue[MoveEnd] = SimpleQueue()
        self.on_end: Callable[[], None] = lambda: None  # called from the mover's thread after each move

    def begin(self, move: PageMove) -> None:
        self._thread.submit(self._move, move, self._beside.mark())

    def take_ended(self) -> tuple[MoveEnd, ...]:
        """Moves that ended since the last call."""
        ended: list[MoveEnd] = []
        try:
            while True:
                ended.append(self._ended.get_nowait())
        except Empty:
            return tuple(ended)

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _move(self, move: PageMove, mark: Mark) -> None:
        began_at = time.perf_counter()
        problem = None
        try:
            with self._beside.after(mark):
                content = self._arrays[move.source].read(move.source_pages)
                self._arrays[move.target].write(move.target_pages, content)
        except Exception as error:  # its pages are computed again, nobody else is disturbed
            problem = f"{len(move.source_pages)} pages from {move.source} to {move.target}: {error}"
            _log.warning("a copy between tiers failed: %s", problem)
        self._ended.put(MoveEnd(move.number, time.perf_counter() - began_at, problem))
        self.on_end()
