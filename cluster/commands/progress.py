"""How far a long job is, shown on stderr: a bar on a terminal, a line for each tenth elsewhere."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


class ProgressDisplay:
    """Call it with (stage, done, total) as often as wished; a stage is what is being done, in words.

    Use it as a context manager: leaving it ends the bars.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
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

    def __enter__(self) -> ProgressDisplay:
        self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._bars.stop()

    def __call__(self, stage: str, done: int, total: int) -> None:
        if self._console.is_terminal:
            if stage not in self._tasks:
                self._tasks[stage] = self._bars.add_task(stage)
            self._bars.update(self._tasks[stage], completed=done, total=max(total, 1))
        else:
            self._print_line(stage, done, total)

    def _print_line(self, stage: str, done: int, total: int) -> None:
        tenths = 10 * done // total if total > 0 else 10
        if tenths > self._shown_tenths.get(stage, -1):
            self._shown_tenths[stage] = tenths
            self._console.print(f"{stage}: {10 * tenths}%", highlight=False, markup=False)
