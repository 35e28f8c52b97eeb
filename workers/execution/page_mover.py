"""Moves pages of KV between the tiers, beside the steps."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue

import torch

from ..memory.page_arrays import PageArray
from ..plan import MoveEnd, PageMove, Tier
from .side_stream import Mark, SideStream

_log = logging.getLogger(__name__)


class _Hand:
    def __init__(self, name: str, device: torch.device) -> None:
        self.thread, self.beside = ThreadPoolExecutor(1, thread_name_prefix=name), SideStream(device)


class PageMover:
    """Two threads that copy: one what comes from disk or goes there, one the rest, so that none waits for a disk.

    Pages under a move change for nobody until it has ended, so the moves' order does not matter.
    """

    def __init__(self, arrays: Mapping[Tier, PageArray], device: torch.device) -> None:
        """`arrays`: of the tiers that there are. `device`: of the pool."""
        self._arrays = arrays
        self._slow, self._fast = _Hand("disk-mover", device), _Hand("page-mover", device)
        self._ended: SimpleQueue[MoveEnd] = SimpleQueue()
        self.on_end: Callable[[], None] = lambda: None  # called from the mover's thread after each move

    def begin(self, move: PageMove) -> None:
        hand = self._slow if "disk" in (move.source, move.target) else self._fast
        hand.thread.submit(self._move, move, hand.beside, hand.beside.mark())

    def take_ended(self) -> tuple[MoveEnd, ...]:
        """Moves that ended since the last call."""
        ended: list[MoveEnd] = []
        try:
            while True:
                ended.append(self._ended.get_nowait())
        except Empty:
            return tuple(ended)

    def close(self) -> None:
        for hand in (self._slow, self._fast):
            hand.thread.shutdown(cancel_futures=True)

    def _move(self, move: PageMove, beside: SideStream, mark: Mark) -> None:
        began_at = time.perf_counter()
        problem = None
        try:
            with beside.after(mark):
                content = self._arrays[move.source].read(move.source_pages)
                self._arrays[move.target].write(move.target_pages, content)
        except Exception as error:  # its pages are computed again, nobody else is disturbed
            problem = f"{len(move.source_pages)} pages from {move.source} to {move.target}: {error}"
            _log.warning("a copy between tiers failed: %s", problem)
        self._ended.put(MoveEnd(move.number, time.perf_counter() - began_at, problem))
        self.on_end()
