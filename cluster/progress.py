"""How far a long job is and what it waits for, shown on stderr: bars on a terminal, lines elsewhere."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

# How far a job is, as events; those of a process elsewhere on this machine come through a file.

OnEvent = Callable[[str, int, int], None]  # (what is done, in words, done, total); a total of 1 is a step

INTERVAL_S = 0.1


@contextmanager
def step(on_event: OnEvent, stage: str) -> Iterator[None]:
    """Reports that a step begins and that it ends, also by an exception."""
    on_event(stage, 0, 1)
    try:
        yield
    finally:
        on_event(stage, 1, 1)


def ignore_event(stage: str, done: int, total: int) -> None:
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


SILENCE_S = 5.0


class ProgressDisplay:
    """Call it with (stage, done, total) as often as wished, from any thread; a stage is what is being done, in words.

    A total of 1 is a step whose progress is unknown. Use it as a context manager: leaving it ends the bars.
    Where there are lines, one comes when a step begins and at each tenth of the others, and one says what is still
    being done whenever none has come for `silence_s`.
    """

    def __init__(self, console: Console, silence_s: float = SILENCE_S) -> None:
        self._console = console
        self._silence_s = silence_s
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}
        self._shown_tenths: dict[str, int] = {}
        self._current: list[str] = []  # stages that have begun and not ended
        self._began_at = self._printed_at = time.monotonic()
        self._lock = threading.Lock()
        self._exit_event = threading.Event()
        self._reminder = threading.Thread(target=self._remind, name="progress reminder", daemon=True)

    def __enter__(self) -> ProgressDisplay:
        self._began_at = self._printed_at = time.monotonic()
        self._bars.start()
        if not self._console.is_terminal:  # where bars show the time that passes
            self._reminder.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._exit_event.set()
        if self._reminder.is_alive():
            self._reminder.join()
        self._bars.stop()

    def __call__(self, stage: str, done: int, total: int) -> None:
        with self._lock:
            if self._console.is_terminal:
                self._move_bar(stage, done, total)
            else:
                self._print_progress(stage, done, total)

    def _move_bar(self, stage: str, done: int, total: int) -> None:
        is_open_step = total == 1 and not done  # its bar moves without end
        if stage not in self._tasks:
            self._tasks[stage] = self._bars.add_task(stage, total=None)
        if not is_open_step:
            self._bars.update(self._tasks[stage], completed=max(done, total == 0), total=max(total, 1))

    def _print_progress(self, stage: str, done: int, total: int) -> None:
        has_ended = done >= total
        if has_ended and stage in self._current:
            self._current.remove(stage)
        elif not has_ended and stage not in self._current:
            self._current.append(stage)
        tenths = 10 * done // total if total > 0 else 10
        if tenths > self._shown_tenths.get(stage, -1):
            self._shown_tenths[stage] = tenths
            if total != 1:
                self._print(f"{stage}: {10 * tenths}%")
            elif not has_ended:
                self._print(stage)

    def _remind(self) -> None:
        while not self._exit_event.wait(max(0.0, self._printed_at + self._silence_s - time.monotonic())):
            with self._lock:
                if time.monotonic() - self._printed_at >= self._silence_s:
                    passed_s = time.monotonic() - self._began_at
                    self._print(f"still {', '.join(self._current) or 'at it'}, after {passed_s:.0f} s")

    def _print(self, line: str) -> None:
        self._printed_at = time.monotonic()
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)
