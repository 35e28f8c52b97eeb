"""A file of lines that never grows beyond a bound: when it is full it becomes the older half, and a new one begins."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

MAX_FILE_BYTES: Final = 16 << 20
SUFFIX: Final = ".log"
OLDER: Final = ".1"  # a shipper that watches *.log has read it, and one that watches *.log* knows it by its inode


class LogFile:
    """One writer. At most twice `max_bytes` and one batch of lines are on the disk."""

    def __init__(self, path: Path, *, max_bytes: int = MAX_FILE_BYTES) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._descriptor: int | None = None
        self._num_bytes = 0
        self._is_torn = False

    def write(self, data: bytes) -> None:
        """Appends lines. Raises OSError if they cannot be written; the next lines are tried again."""
        if self._descriptor is not None and self._num_bytes + len(data) > self._max_bytes:
            self.close()
            self._path.replace(self._path.with_name(self._path.name + OLDER))
        if self._descriptor is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640)
            self._num_bytes = os.fstat(self._descriptor).st_size
        rest = memoryview(b"\n" + data if self._is_torn else data)
        while rest:
            self._is_torn = True  # until all of it is there: the last line may be half a one
            written = os.write(self._descriptor, rest)
            self._num_bytes += written
            rest = rest[written:]
        self._is_torn = False

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def forget_old_files(folder: Path, keep: int) -> None:
    """Removes the files of processes that are gone, except the newest. `keep`: the most files.

    A file's name is KIND-PID-TIME of its process.
    """
    with suppress(OSError):  # others of this machine do the same
        files = sorted(folder.glob(f"*{SUFFIX}*"), key=lambda file: file.stat().st_mtime)
        for file in files[: max(0, len(files) - keep)]:
            if not Path("/proc", file.name.split("-")[1]).exists():
                file.unlink(missing_ok=True)
