"""A lock that lets one process at a time use a folder."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path


class FolderLock:
    """An advisory lock, held until it is released or all processes that share its handle have ended."""

    def __init__(self, folder: Path, name: str) -> None:
        self._path = folder / name
        self._handle: int | None = None

    @property
    def handle(self) -> int:
        """The file descriptor: a child that inherits it holds the lock too."""
        assert self._handle is not None, "the lock is not held"
        return self._handle

    def acquire(self, timeout_s: float) -> None:
        """Waits for the lock. Raises BlockingIOError after `timeout_s`; its message says which process has the lock."""
        deadline = time.monotonic() + timeout_s
        handle = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    owner = os.pread(handle, 32, 0).decode(errors="replace").strip() or "unknown"
                    os.close(handle)
                    raise BlockingIOError(
                        f"{self._path.parent} is in use by another motet (process {owner}): stop it, or choose "
                        "another data folder with --data-dir"
                    ) from None
                time.sleep(0.05)
        os.ftruncate(handle, 0)
        os.pwrite(handle, str(os.getpid()).encode(), 0)
        self._handle = handle

    def release(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
