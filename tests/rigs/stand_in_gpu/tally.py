"""What a stand-in GPU was given: launches, copies and waits, each with the product's line."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import motet

_ROOT = Path(motet.__file__).resolve().parent
_PRODUCT = ("kernels", "adapters", "workers", "router", "cluster", "benchmarks")
_lines: dict[str, str | None] = {}  # by file: its name from the root; None: not the product's  (grows with files only)


@dataclass(frozen=True)
class Copy:
    kind: Literal["to device", "to host"]
    num_bytes: int
    waits: bool  # the host waits for it: not `non_blocking`, or the host's memory is not pinned
    line: str
    thread: str


@dataclass(frozen=True)
class Wait:
    """The host waits for the device."""

    why: str
    line: str
    thread: str
    leaves_idle: bool = False  # the stream that was waited for has nothing more to do when the host goes on


@dataclass
class Tally:
    """All since the start, or since `clear`."""

    copies: list[Copy] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)  # those of copies included
    launches: Counter[str] = field(default_factory=Counter)  # by operation
    replays: int = 0  # of graphs
    pinned: list[str] = field(default_factory=list)  # the lines that allocated pinned memory

    def clear(self) -> None:
        for each in (self.copies, self.waits, self.launches, self.pinned):
            each.clear()
        self.replays = 0

    def waits_of(self, thread: str) -> list[Wait]:
        """Those of threads whose name begins so."""
        return [wait for wait in self.waits if wait.thread.startswith(thread)]

    def copies_of(self, thread: str) -> list[Copy]:
        return [copy for copy in self.copies if copy.thread.startswith(thread)]


def thread_name() -> str:
    return threading.current_thread().name


def product_line() -> str:
    """Where the product is now: `workers/execution/runner.py:12`; else the test's line."""
    frame = sys._getframe(1)
    fallback = "nowhere"
    while frame is not None:
        name = frame.f_code.co_filename
        if name not in _lines:
            _lines[name] = _from_root(name)
        found = _lines[name]
        if found is not None:
            line = f"{found}:{frame.f_lineno}"
            if found.startswith(_PRODUCT):
                return line
            if fallback == "nowhere" and "stand_in_gpu/" not in found:
                fallback = line
        frame = frame.f_back  # type: ignore[assignment]
    return fallback


def _from_root(name: str) -> str | None:
    path = Path(name)
    if not path.is_absolute() or not path.is_relative_to(_ROOT):
        return None
    inside = path.relative_to(_ROOT)
    return None if inside.parts[0].startswith(".") else str(inside)
