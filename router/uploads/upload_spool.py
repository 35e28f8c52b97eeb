"""Where the tensors of uploads lie while they arrive."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_PREFIX: Final = "upload-"
_NUM_COPIES: Final = 3  # spooled, stored as it came, stored as pages
_ABANDONED_S: Final = 24 * 3600.0  # an upload in progress touches its file far more often


class UploadSpool:
    """A folder of files that live as long as their upload. Routers of one machine may share it."""

    def __init__(self, path: Path, min_free_bytes: int = 0) -> None:
        """Makes the folder, and removes what a router left there that was killed long ago."""
        self._path = path
        self._min_free_bytes = min_free_bytes
        path.mkdir(parents=True, exist_ok=True)
        oldest = time.time() - _ABANDONED_S
        for left in path.glob(f"{_PREFIX}*"):
            if left.stat().st_mtime < oldest:
                left.unlink(missing_ok=True)

    def has_room(self, num_bytes: int) -> bool:
        """Whether the disk has room for an upload, and for its being stored beside the spool, above what is kept free.

        Uploads that arrive at the same time are not counted: those that fill the disk nevertheless fail when they do.
        """
        return shutil.disk_usage(self._path).free >= _NUM_COPIES * num_bytes + self._min_free_bytes

    @contextmanager
    def file(self) -> Iterator[Path]:
        """An empty file, gone at the end however it comes."""
        handle, name = tempfile.mkstemp(prefix=_PREFIX, dir=self._path)
        os.close(handle)
        path = Path(name)
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)
