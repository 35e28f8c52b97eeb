"""Moves pages of KV between the tiers while steps run."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue

import torch

from ..memory.page_arrays import MOST_AT_ONCE, PageArray
from ..plan import MoveEnd, PageMove, Tier
from .side_stream import Mark, SideStream

_log = logging.getLogger(__name__)


class _CopyThread:
    def __init__(self, name: str, device: torch.device) -> None:
        self.pool, self.beside = ThreadPoolExecutor(1, thread_name_prefix=name), SideStream(device)


def _runs(pages: Sequence[int]) -> Iterator[slice]:
    """Slices of `pages` that lie side by side, so that no gather is needed."""
    start = 0
    for end in range(1, len(pages) + 1):
        if end == len(pages) or pages[end] != pages[end - 1] + 1 or end - start == MOST_AT_ONCE:
            yield slice(start, end)
            start = end


class PageMover:
    """Two threads that copy: one from and to disk, one for the rest, so that copies in memory never wait for a disk.

    Nothing else reads or writes the pages that a move writes until it has ended, so the order of moves does not matter.
    """

    def __init__(self, arrays: Mapping[Tier, PageArray], device: torch.device) -> None:
        """`arrays`: one of each tier that is used. `device`: of the pool."""
        self._arrays = arrays
        self._disk, self._memory = _CopyThread("disk-mover", device), _CopyThread("page-mover", device)
        self._ended: SimpleQueue[MoveEnd] = SimpleQueue()
        self.on_end: Callable[[], None] = lambda: None  # called from the mover's thread after each move

    def begin(self, move: PageMove) -> None:
        thread = self._disk if "disk" in (move.source, move.target) else self._memory
        thread.pool.submit(self._move, move, thread.beside, thread.beside.mark())

    def take_ended(self) -> tuple[MoveEnd, ...]:
        """Moves that ended since the last call."""
        ended: list[MoveEnd] = []
        try:
            while True:
                ended.append(self._ended.get_nowait())
        except Empty:
            return tuple(ended)

    def close(self) -> None:
        for thread in (self._disk, self._memory):
            thread.pool.shutdown(cancel_futures=True)

    def _move(self, move: PageMove, beside: SideStream, mark: Mark) -> None:
        began_at = time.perf_counter()
        problem = None
        try:
            with beside.after(mark):
                for piece in _runs(move.source_pages):
                    content = self._arrays[move.source].read(move.source_pages[piece])
                    self._arrays[move.target].write(move.target_pages[piece], content)
                    if move.source == "disk":
                        beside.finish()  # the next piece uses the same memory
        except Exception as error:  # the pages will be computed again
            problem = f"{len(move.source_pages)} pages from {move.source} to {move.target}: {error}"
            _log.warning("a copy between tiers failed: %s", problem)
        self._ended.put(MoveEnd(move.number, time.perf_counter() - began_at, problem))
        self.on_end()
