"""Adapters that were packed again because there was no file for their layout."""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import Lock, Timer

TOLD_AFTER_S = 300.0

_log = logging.getLogger(__name__)


class Repacked:
    """Logs one line for all of a while: after an upgrade to another layout every adapter is packed again."""

    def __init__(self, timer: Callable[[float, Callable[[], None]], Timer] = Timer) -> None:
        """`timer`: calls a function after so many seconds, once it is started."""
        self._timer = timer
        self._lock = Lock()  # adapters come in several threads
        self._num, self._first = 0, ""

    def add(self, digest: str, file_name: str) -> None:
        with self._lock:
            self._num += 1
            if self._num > 1:
                return
            self._first = f"{file_name} of {digest}"
        timer = self._timer(TOLD_AFTER_S, self._tell)
        timer.daemon = True  # no process lives longer for it
        timer.start()

    def _tell(self) -> None:
        with self._lock:
            num, first, self._num = self._num, self._first, 0
        _log.warning(
            "adapters that were packed again in %g s, because their packed files were missing, as after a start that "
            "cuts adapters in another way: %d, the first one for %s",
            *(TOLD_AFTER_S, num, first),
        )
