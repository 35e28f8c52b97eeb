"""Adapters that were packed again because there was no file for their layout."""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import Lock, Timer

LOG_AFTER_S = 300.0

_log = logging.getLogger(__name__)


class Repacked:
    """Logs one line for all of a while: after an upgrade to another layout every adapter is packed again."""

    def __init__(self, timer: Callable[[float, Callable[[], None]], Timer] = Timer) -> None:
        """`timer`: as `threading.Timer`."""
        self._timer = timer
        self._lock = Lock()  # adapters come in several threads
        self._num, self._first = 0, ""

    def add(self, digest: str, file_name: str) -> None:
        with self._lock:
            self._num += 1
            if self._num > 1:
                return
            self._first = f"{file_name} of {digest}"
        timer = self._timer(LOG_AFTER_S, self._log_all)
        timer.daemon = True  # it does not keep the process alive
        timer.start()

    def _log_all(self) -> None:
        with self._lock:
            num, first, self._num = self._num, self._first, 0
        _log.warning(
            "adapters that were packed again in %g s, because their packed files were missing, as after a start that "
            "cuts adapters in another way: %d, the first one for %s",
            *(LOG_AFTER_S, num, first),
        )
