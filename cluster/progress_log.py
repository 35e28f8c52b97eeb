"""How far a job is, as events; those of a process elsewhere on this machine come through a file."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

OnEvent = Callable[[str, int, int], None]  # (what is done, in words, done, total); a total of 1 is a step

INTERVAL_S = 0.1


@contextmanager
def step(on_event: OnEvent, what: str) -> Iterator[None]:
    """Reports that a step begins and that it ends, also by an exception."""
    on_event(what, 0, 1)
    try:
        yield
    finally:
        on_event(what, 1, 1)


def ignore_event(what: str, done: int, total: int) -> None:
    """An `OnEvent` that does nothing."""


class ProgressWriter:
    """Appends events to a file, at most one per name and `INTERVAL_S`, and each name's last."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written_at: dict[str, float] = {}

    def __call__(self, name: str, done: int, total: int) -> None:
        now = time.monotonic()
        if done < total and now - self._written_at.get(name, -INTERVAL_S) < INTERVAL_S:
            return
        self._written_at[name] = now
        try:
            with self._path.open("a") as file:  # one write of one line: writers in several processes do not mix
                file.write(json.dumps([name, done, total]) + "\n")
        except OSError:
            pass  # a failure to report progress must not stop the work


class ProgressReader:
    """Passes on what was appended since the last call. The file need not exist yet."""

    def __init__(self, path: Path, on_event: OnEvent) -> None:
        self._path = path
        self._on_event = on_event
        self._position = 0

    def __call__(self) -> None:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._position)
            data = file.read()
        complete = data[: data.rfind(b"\n") + 1]
        self._position += len(complete)
        for line in complete.splitlines():
            name, done, total = json.loads(line)
            self._on_event(name, done, total)
