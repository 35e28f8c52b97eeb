"""The free bytes of the disk of the data folder, measured again and again."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

from ...adapters.ended_tasks import end_tasks
from ..settings.setting_field import format_byte_size

INTERVAL_S = 30.0
ANSWER_S = 10.0  # after which a disk counts as one that cannot be read

_log = logging.getLogger(__name__)


class DiskWatch:
    """Calls `on_free_bytes` at each look, with None if the disk cannot be read. Belongs to one event loop."""

    def __init__(
        self,
        path: Path,
        on_free_bytes: Callable[[int | None], None],
        measure: Callable[[Path], int] = lambda path: shutil.disk_usage(path).free,
    ) -> None:
        """`measure` is called in a thread: it blocks while a shared volume is away."""
        self._path, self._on_free_bytes, self._measure = path, on_free_bytes, measure
        self._reading: asyncio.Future[int] | None = None
        self._is_readable = True
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._look_forever(), name="disk watch")

    async def stop(self) -> None:
        await end_tasks(self._task)

    async def look(self) -> None:
        """Measures once. A measurement that hangs is waited for again: it never blocks a second thread."""
        if self._reading is None:
            self._reading = asyncio.ensure_future(asyncio.to_thread(self._measure, self._path))
        done, _ = await asyncio.wait([self._reading], timeout=ANSWER_S)
        if not done:
            return self._note(None, f"no answer in {ANSWER_S:g} s")
        reading, self._reading = self._reading, None
        try:
            self._note(reading.result())
        except OSError as error:
            self._note(None, str(error))

    def _note(self, free_bytes: int | None, problem: str = "") -> None:
        if free_bytes is None and self._is_readable:
            _log.warning("the free bytes of %s cannot be read, so its alert is silent: %s", self._path, problem)
        self._is_readable = free_bytes is not None
        self._on_free_bytes(free_bytes)

    async def _look_forever(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(INTERVAL_S)


def full_disk_warning(path: Path, min_free_bytes: int) -> str | None:
    """What to say to a person if fewer bytes are free than uploads must leave. Raises OSError. It may block."""
    free_bytes = shutil.disk_usage(path).free
    if free_bytes >= min_free_bytes:
        return None
    return (
        f"the disk of {path} has {format_byte_size(free_bytes)} free, less than --min-free-bytes "
        f"{format_byte_size(min_free_bytes)}: uploads and results of batches are refused, and where nothing is left, "
        "so is every change that Redis must write: make room there"
    )
