"""Progress of loading a base: reported at each percent, and logged every few seconds."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

_log = logging.getLogger(__name__)
_INTERVAL_S = 5.0  # between two lines of the log
_GIB = 1 << 30

OnProgress = Callable[[str, int, int], None]  # what, done, total


class LoadProgress:
    """Counts bytes of the base that are done, and bytes read, which are fewer in a gang."""

    def __init__(
        self,
        total_bytes: int,
        on_progress: OnProgress | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`total_bytes`: of the base. `on_progress`: called with activity, done and total bytes, at each percent and at
        the end.
        """
        self._total_bytes, self._on_progress, self._clock = total_bytes, on_progress, clock
        self._began_at = self._logged_at = clock()
        self._num_done = self._num_read = self._num_read_when_logged = 0
        self._reported_percent = -1

    def read(self, num_bytes: int) -> None:
        """Counts bytes read from a file."""
        self._num_read += num_bytes
        now = self._clock()
        if now - self._logged_at >= _INTERVAL_S:
            rate = (self._num_read - self._num_read_when_logged) / (now - self._logged_at)
            _log.info(
                "loading weights: %.2f GiB read, %d %% of a base of %.2f GiB are done, %.2f GiB/s",
                *(self._num_read / _GIB, self._percent(), self._total_bytes / _GIB, rate / _GIB),
            )
            self._logged_at, self._num_read_when_logged = now, self._num_read

    def done(self, num_bytes: int) -> None:
        """Counts bytes of the base that are in place, or are not this worker's."""
        self._num_done += num_bytes
        percent = self._percent()
        if percent != self._reported_percent:
            self._report(self._num_done)

    def end(self) -> None:
        """Logs and reports the end."""
        took_s = max(self._clock() - self._began_at, 1e-3)
        _log.info(
            "weights are loaded: %.2f GiB read of a base of %.2f GiB in %.1f s, %.2f GiB/s",
            *(self._num_read / _GIB, self._total_bytes / _GIB, took_s, self._num_read / _GIB / took_s),
        )
        self._report(self._total_bytes)

    def _percent(self) -> int:
        return 100 * self._num_done // max(self._total_bytes, 1)

    def _report(self, num_done: int) -> None:
        self._reported_percent = self._percent()
        if self._on_progress is not None:
            self._on_progress("loading weights", num_done, self._total_bytes)
