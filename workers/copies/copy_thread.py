"""One thread that copies, one call after the other."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

_log = logging.getLogger(__name__)
_CLOSING_S = 1.0  # for a copy that is under way at the end; one that hangs is left behind


class CopyThread:
    """A daemon, since a process must be able to end while a read or a write hangs."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], None]) -> None:
        """Calls it in the thread, after all earlier ones. No-op once closed."""
        self._calls.put(call)

    def close(self) -> None:
        """Ends the thread after the current call, which it does not wait for if that hangs; forgets the others."""
        self._closed.set()
        self._calls.put(None)
        self._thread.join(_CLOSING_S)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None and not self._closed.is_set():
            try:
                call()
            except Exception:
                _log.exception("a copy failed")
            del call  # what it copied may be needed for something else
