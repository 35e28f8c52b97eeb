"""Moves pages of KV between the tiers while steps run."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue

import torch

from ..plan import MoveEnd, PageMove, Tier
from .page_arrays import MOST_AT_ONCE, PageArray

# One thread that copies, one call after the other.

_log = logging.getLogger(__name__)
_CLOSING_S = 1.0  # for a copy that is under way at the end; one that hangs is left behind


class CopyThread:
    """A daemon, since a process must be able to end while a read or a write hangs."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], None]) -> None:
        """Calls it in the thread, after all earlier ones. No-op once closed."""
        self._calls.put(call)

    def close(self) -> None:
        """Ends the thread after the current call, which it does not wait for if that hangs; forgets the others."""
        self._closed.set()
        self._calls.put(None)
        self._thread.join(_CLOSING_S)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None and not self._closed.is_set():
            try:
                call()
            except Exception:
                _log.exception("a copy failed")
            del call  # what it copied may be needed for something else


# Copies while steps run: on a GPU on their own stream, on the CPU only in their own thread.

Mark = torch.cuda.Event | None  # None: on the CPU, where nothing is asynchronous


class SideStream:
    """The stream of one thread that copies."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)

    def mark(self) -> Mark:
        """A point in time after all that the calling thread has launched.

        A copy waits for it: kernels of steps that were launched may still use pages that a later plan gave to the copy.
        """
        return None if self._stream is None else torch.cuda.current_stream(self._device).record_event()

    @contextmanager
    def after(self, mark: Mark) -> Iterator[None]:
        """What is launched within this context runs after the mark, and is done when the context ends."""
        if self._stream is None or mark is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(mark)
            try:
                yield
            finally:  # a copy that was launched goes on after an exception
                self._stream.synchronize()

    def finish(self) -> None:
        """Waits for all that was launched here."""
        if self._stream is not None:
            self._stream.synchronize()


DISK_DEADLINE_S = 10.0  # for a disk to read or write MOST_AT_ONCE pages


def _runs(pages: Sequence[int]) -> Iterator[slice]:
    """Slices of `pages` that lie side by side, so that no gather is needed."""
    start = 0
    for end in range(1, len(pages) + 1):
        if end == len(pages) or pages[end] != pages[end - 1] + 1 or end - start == MOST_AT_ONCE:
            yield slice(start, end)
            start = end


@dataclass(eq=False)
class _Move:
    plan: PageMove
    mark: Mark
    is_over: bool = False  # its end was reported, so its pages may have another owner


class PageMover:
    """Two threads that copy: one from and to disk, one for the rest, so that copies in memory never wait for a disk.

    Nothing else reads or writes the pages that a move writes until it has ended, so the order of moves does not matter.
    A disk that makes no progress until a deadline hangs: its moves fail at once, as later ones do until it goes on.
    """

    def __init__(
        self, arrays: Mapping[Tier, PageArray], device: torch.device, disk_deadline_s: float = DISK_DEADLINE_S
    ) -> None:
        """`arrays`: one of each tier that is used. `device`: of the pool."""
        self._arrays, self._disk_deadline_s = arrays, disk_deadline_s
        self._beside, self._beside_disk = SideStream(device), SideStream(device)
        self._memory_thread = CopyThread("page-mover")
        self._disk_thread: CopyThread | None = None  # the first move from or to disk starts it
        self._changed = threading.Condition()  # guards what follows
        self._at_disk: list[_Move] = []  # moves from and to disk that have not ended, oldest first
        self._progress_at = 0.0  # when the disk last ended a piece, or began after a pause
        self._hangs = self._closed = False
        self._ended: SimpleQueue[MoveEnd] = SimpleQueue()
        self.on_end: Callable[[], None] = lambda: None  # called from a thread of the mover's after each move

    def begin(self, move: PageMove) -> None:
        if "disk" not in (move.source, move.target):
            move_task = _Move(move, self._beside.mark())
            self._memory_thread.submit(partial(self._move, move_task, self._beside))
            return
        move_task = _Move(move, self._beside_disk.mark())
        if self._disk_thread is None:
            self._disk_thread = CopyThread("disk-mover")
            threading.Thread(target=self._watch, name="disk-watch", daemon=True).start()
        with self._changed:
            hangs = self._hangs
            if not hangs:
                if not self._at_disk:
                    self._progress_at = time.monotonic()
                self._at_disk.append(move_task)
                self._changed.notify_all()
        if hangs:
            self._end(move_task, 0.0, "the disk hangs")
        else:
            self._disk_thread.submit(partial(self._move, move_task, self._beside_disk))

    def take_ended(self) -> tuple[MoveEnd, ...]:
        """Moves that ended since the last call."""
        ended: list[MoveEnd] = []
        try:
            while True:
                ended.append(self._ended.get_nowait())
        except Empty:
            return tuple(ended)

    def close(self) -> None:
        """Returns although a disk hangs."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in (self._disk_thread, self._memory_thread):
            if thread is not None:
                thread.close()

    def _move(self, move: _Move, beside: SideStream) -> None:
        began_at = time.perf_counter()
        problem = None
        try:
            with beside.after(move.mark):
                for piece in _runs(move.plan.source_pages):
                    self._copy(move, piece, beside)
        except Exception as error:  # the pages will be computed again
            problem = str(error)
        self._end(move, time.perf_counter() - began_at, problem)

    def _copy(self, move: _Move, piece: slice, beside: SideStream) -> None:
        """Copies a part of a move, unless the move was given up."""
        if move.is_over:
            return
        source, target = self._arrays[move.plan.source], self._arrays[move.plan.target]
        source_pages, target_pages = move.plan.source_pages[piece], move.plan.target_pages[piece]
        is_at_disk = "disk" in (move.plan.source, move.plan.target)
        try:
            content = source.read(source_pages)
            if move.plan.source != "disk":
                target.write(target_pages, content)
                return
            with self._changed:  # it is not given up while its target is written
                if not move.is_over:
                    target.write(target_pages, content)
                    beside.finish()  # the next piece uses the same memory
        finally:
            if is_at_disk:
                with self._changed:
                    self._progress_at, self._hangs = time.monotonic(), False

    def _end(self, move: _Move, seconds: float, problem: str | None) -> None:
        """Reports the end of a move once."""
        plan = move.plan
        with self._changed:
            if move in self._at_disk:
                self._at_disk.remove(move)
            was_over, move.is_over = move.is_over, True
        if was_over:
            return
        if problem is not None:
            problem = f"{len(plan.source_pages)} pages from {plan.source} to {plan.target}: {problem}"
            _log.warning("a copy between tiers failed: %s", problem)
        self._ended.put(MoveEnd(plan.number, seconds, problem))
        self.on_end()

    def _watch(self) -> None:
        """Gives up the moves of a disk that makes no progress."""
        while True:
            with self._changed:
                while not self._closed and (not self._at_disk or self._left_s() > 0):
                    self._changed.wait(self._left_s() if self._at_disk else None)
                if self._closed:
                    return
                self._hangs, late = True, self._at_disk[:]
            for move in late:
                self._end(move, self._disk_deadline_s, f"the disk did nothing for {self._disk_deadline_s:g} s")

    def _left_s(self) -> float:
        return self._progress_at + self._disk_deadline_s - time.monotonic()
