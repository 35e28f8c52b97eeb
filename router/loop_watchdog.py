"""Reports how long the router's event loop was blocked, and by what."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Final

from .metrics import Histogram

TICK_S: Final = 0.02
LOG_HELD_S: Final = 0.1  # holds from this on are logged
_MAX_FRAMES: Final = 6

_log = logging.getLogger(__name__)


class LoopWatchdog:
    """A timer on the loop measures how late it comes; a thread looks what runs while it is very late.

    Lateness is what others wait, whether one callback took so long, many in a row, or the machine had no time for this
    process. It is observed at every tick, so that the histogram's buckets are shares of time.
    """

    def __init__(
        self, held_s: Histogram, held_cpu_s: Histogram, cpu_clock: Callable[[], float] = time.process_time
    ) -> None:
        """Both get a value at every tick: `held_s` the lateness, `held_cpu_s` as much of it as the process computed.

        `cpu_clock`: of all threads, as one that keeps the interpreter's lock holds the loop as well.
        """
        self._held_s, self._held_cpu_s, self._cpu_clock = held_s, held_cpu_s, cpu_clock
        self._computed_s = 0.0  # by `cpu_clock`, when the timer was set
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
        self._due_at, self._computed_s = time.monotonic() + TICK_S, self._cpu_clock()
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        late_s = max(0.0, time.monotonic() - self._due_at)
        self._held_s.observe(late_s)
        self._held_cpu_s.observe(min(late_s, self._cpu_clock() - self._computed_s))
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
