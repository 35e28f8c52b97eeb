"""Writes log lines in a thread, so that no caller waits for a disk or a pipe.

What is not written waits in memory, up to a bound. Beyond that lines are dropped and counted: a full disk, or a pipe
that is not read, costs lines of the log and nothing else.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from typing import Final

MAX_WAITING_BYTES: Final = 4 << 20
PAUSE_S: Final = 0.02  # between two writes, so that a busy process writes several lines at once
CLOSE_S: Final = 1.0  # after which what cannot be written is given up

Write = Callable[[bytes], None]  # writes all of it, however long that takes; raises OSError


class LogWriter:
    """Any thread may call `put`."""

    def __init__(self, write: Write, name: str, *, max_waiting_bytes: int = MAX_WAITING_BYTES) -> None:
        self._write = write
        self._max_waiting_bytes = max_waiting_bytes
        self._lines: list[bytes] = []
        self._num_waiting_bytes = 0
        self._num_unreported = 0  # dropped lines that no line has reported yet
        self.num_dropped = 0
        # Reentrant: a finalizer may run at any line of the thread that holds it, and may log.
        self._lock = threading.RLock()
        self._some = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._write_forever, name=f"log to {name}", daemon=True)
        self._thread.start()

    def put(self, line: bytes) -> None:
        """Returns at once. `line`: with its newline."""
        with self._lock:
            if self._num_waiting_bytes + len(line) > self._max_waiting_bytes:
                self.num_dropped += 1
                self._num_unreported += 1
                return
            self._lines.append(line)
            self._num_waiting_bytes += len(line)
        if not self._some.is_set():
            self._some.set()

    def take_unreported_drops(self) -> int:
        """How many lines were dropped since the last call; 0 until there is room for a line that reports it."""
        with self._lock:
            if self._num_waiting_bytes > self._max_waiting_bytes // 2:
                return 0
            unreported, self._num_unreported = self._num_unreported, 0
            return unreported

    def close(self) -> None:
        """Returns when all is written, or cannot be."""
        self._closing.set()
        self._some.set()
        self._thread.join(CLOSE_S)

    def _write_forever(self) -> None:
        while True:
            self._some.wait()
            self._some.clear()
            with self._lock:
                lines, self._lines = self._lines, []
            if lines:
                data = b"".join(lines)
                try:
                    self._write(data)
                except OSError:
                    self._count_dropped(len(lines))
                with self._lock:
                    self._num_waiting_bytes -= len(data)
            elif self._closing.is_set():
                return
            if self._closing.is_set():
                self._some.set()
            else:
                self._closing.wait(PAUSE_S)

    def _count_dropped(self, num_lines: int) -> None:
        with self._lock:
            self.num_dropped += num_lines
            self._num_unreported += num_lines


def to_descriptor(descriptor: int) -> Write:
    """Writes to a file descriptor of this process, whether or not it blocks."""

    def write(data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(descriptor, rest) :]
            except BlockingIOError:
                with contextlib.suppress(InterruptedError):
                    threading.Event().wait(PAUSE_S)

    return write
