"""Threads that read adapters from the store, with retries and deadlines.

A thread that hangs in a read cannot be ended. Its read is given up at the deadline, and another thread replaces it
until the read returns. When too many hang, reads fail at once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from ...adapters.errors import StoreUnavailable

_log = logging.getLogger(__name__)
_NUM_READERS = 4  # that do not hang
_MAX_HUNG = 8
_PAUSES_S = (0.1, 0.2, 0.4, 0.8, 1.6)  # before each further try of a read that failed

Content = TypeVar("Content")


@dataclass(eq=False)
class _Read(Generic[Content]):
    digest: str
    deadline: float
    on_end: Callable[[Content | Exception], None]
    due_at: float
    read: Callable[[str], Content]
    yields: bool = False
    num_tries: int = 0
    is_over: bool = False  # its end was reported, or it was given up


class StoreReaders(Generic[Content]):
    """Reads by digest. An I/O error is tried again a few times; what else `read` raises ends the read."""

    def __init__(
        self,
        read: Callable[[str], Content],
        deadline_s: float,
    ) -> None:
        """`read`: blocks; called from several threads. `deadline_s`: for one read, all its tries together."""
        self._read, self._deadline_s = read, deadline_s
        self._changed = threading.Condition()
        self._waiting: list[_Read[Content]] = []
        self._reading: set[_Read[Content]] = set()
        self._threads: list[threading.Thread] = []
        self._closed = False
        self.num_failed = 0  # tries, since the start
        self.num_hung = 0  # reads that were given up, and have not returned yet

    def begin(
        self,
        digest: str,
        on_end: Callable[[Content | Exception], None],
        *,
        read: Callable[[str], Content] | None = None,
        after_s: float = 0.0,
        yields: bool = False,
    ) -> None:
        """Reads in another thread. `on_end` gets what was read, or StoreUnavailable, or what else `read` raised.

        It is called once, from one of these threads or this one. `read`: in place of the readers' own. `after_s`: a
        delay. `yields`: reads without it go first.
        """
        now = time.monotonic() + after_s
        with self._changed:
            has_reader = self._add_reader()
            if has_reader:
                self._waiting.append(_Read(digest, now + self._deadline_s, on_end, now, read or self._read, yields))
                self._changed.notify_all()
        if not has_reader:
            on_end(StoreUnavailable(f"the adapter store hangs in {self.num_hung} reads; try again later"))

    def close(self) -> None:
        """Ends the threads that do not hang; reads that have not ended are forgotten."""
        with self._changed:
            self._closed = True
            for read in (*self._waiting, *self._reading):
                read.is_over = True
            self._waiting.clear()
            self._changed.notify_all()
        deadline = time.monotonic() + 1.0
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _add_reader(self) -> bool:
        """Starts a thread if that is needed and may be. False: all threads hang."""
        if not self._threads:
            self._start(self._watch, "store-watch")
        num_readers = len(self._threads) - 1
        num_busy = len(self._waiting) + len(self._reading)
        if num_readers < min(num_busy + 1 + self.num_hung, _NUM_READERS + self.num_hung, _NUM_READERS + _MAX_HUNG):
            self._start(self._read_forever, f"store-reader-{num_readers}")
            num_readers += 1
        return num_readers > self.num_hung

    def _start(self, target: Callable[[], None], name: str) -> None:
        # A daemon: a process must be able to end while a read hangs.
        thread = threading.Thread(target=target, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _read_forever(self) -> None:
        while (read := self._take()) is not None:
            end: Content | Exception
            try:
                end = read.read(read.digest)
            except Exception as error:
                end = error
            if self._is_end(read, end):
                read.on_end(end)

    def _take(self) -> _Read[Content] | None:
        """The next read that is due; None: the threads are to end."""
        with self._changed:
            while not self._closed:
                now = time.monotonic()
                read = min(self._waiting, key=lambda each: (each.due_at > now, each.yields, each.due_at), default=None)
                if read is not None and read.due_at <= now:
                    self._waiting.remove(read)
                    self._reading.add(read)
                    read.num_tries += 1
                    return read
                self._changed.wait(None if read is None else read.due_at - now)
            return None

    def _is_end(self, read: _Read[Content], end: Content | Exception) -> bool:
        """Whether this try ends the read, so that its end must be reported."""
        with self._changed:
            self.num_failed += isinstance(end, StoreUnavailable)
            if read not in self._reading:
                self.num_hung -= not self._closed
                _log.warning("a read of the store returned after it was given up: adapter %s", read.digest)
                return False
            self._reading.remove(read)
            if read.is_over:
                return False
            if isinstance(end, StoreUnavailable) and read.num_tries <= len(_PAUSES_S):
                read.due_at = time.monotonic() + _PAUSES_S[read.num_tries - 1]
                self._waiting.append(read)
                self._changed.notify_all()
                return False
            read.is_over = True
            return True

    def _watch(self) -> None:
        """Gives up each read at its deadline."""
        while (late := self._take_late()) is not None:
            for read in late:
                _log.error("the store did not return adapter %s within %g s", read.digest, self._deadline_s)
                problem = f"the adapter store did not answer within {self._deadline_s:g} s; try again later"
                read.on_end(StoreUnavailable(problem))

    def _take_late(self) -> list[_Read[Content]] | None:
        """Waits until reads are late and takes them out; None: the threads are to end."""
        with self._changed:
            while not self._closed:
                now = time.monotonic()
                late = [read for read in (*self._waiting, *self._reading) if read.deadline <= now]
                for read in late:
                    read.is_over = True
                    if read in self._reading:
                        self._reading.remove(read)
                        self.num_hung += 1
                        self._add_reader()
                    else:
                        self._waiting.remove(read)
                if late:
                    return late
                deadlines = [read.deadline for read in (*self._waiting, *self._reading)]
                self._changed.wait(min(deadlines) - now if deadlines else None)
            return None
