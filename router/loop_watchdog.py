"""Reports how long the router's event loop was blocked, and by what."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from typing import Final

from .histogram import Histogram

TICK_S: Final = 0.02
LOG_HELD_S: Final = 0.1  # holds from this on are logged
_MAX_FRAMES: Final = 6

_log = logging.getLogger(__name__)


class LoopWatchdog:
    """A timer on the loop measures how late it comes; a thread looks what runs while it is very late.

    Lateness is what others wait, whether one callback took so long, many in a row, or the machine had no time for this
    process. It is observed at every tick, so that the histogram's buckets are shares of time.
    """

    def __init__(self, held_s: Histogram) -> None:
        """`held_s` gets a value at every tick."""
        self._held_s = held_s
        self._timer: asyncio.TimerHandle | None = None
        self._due_at = 0.0
        self._seen = ""  # what ran on the loop's thread while the timer was late
        self._loop_thread = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look_on, name="loop watchdog", daemon=True)

    def start(self) -> None:
        """To be called on the loop."""
        self._loop_thread = threading.get_ident()
        self._set()
        self._thread.start()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._ended.set()

    def _set(self) -> None:
        self._due_at = time.monotonic() + TICK_S
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        late_s = max(0.0, time.monotonic() - self._due_at)
        self._held_s.observe(late_s)
        if late_s >= LOG_HELD_S:
            _log.warning("the event loop was held for %.3f s; it was at: %s", late_s, self._seen or "nothing slow")
        self._seen = ""
        self._set()

    def _look_on(self) -> None:
        while not self._ended.wait(LOG_HELD_S / 2):
            if self._seen or time.monotonic() - self._due_at < LOG_HELD_S / 2:
                continue
            frame = sys._current_frames().get(self._loop_thread)
            if frame is not None:
                lines = traceback.extract_stack(frame)[-_MAX_FRAMES:]
                self._seen = " < ".join(f"{line.name} ({line.filename}:{line.lineno})" for line in reversed(lines))
