"""The files that hold the tensors of uploads while they arrive."""

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
_NUM_COPIES: Final = 3  # in the spool, in the store as uploaded, in the store as pages
_ABANDONED_S: Final = 24 * 3600.0  # a file that was not written for this long belongs to no upload any more


class UploadSpool:
    """A folder with a file for each upload in progress. Routers of one machine may share it."""

    def __init__(self, path: Path, min_free_bytes: int = 0) -> None:
        """Makes the folder, and removes files that routers left there when they were killed long ago."""
        self._path = path
        self._min_free_bytes = min_free_bytes
        path.mkdir(parents=True, exist_ok=True)
        oldest = time.time() - _ABANDONED_S
        for left in path.glob(f"{_PREFIX}*"):
            if left.stat().st_mtime < oldest:
                left.unlink(missing_ok=True)

    def has_room(self, num_bytes: int) -> bool:
        """Whether the disk has room for an upload in the spool and in the store, and `min_free_bytes` beside it.

        Other uploads that arrive at the same time are not counted; an upload that fills the disk then fails.
        """
        return shutil.disk_usage(self._path).free >= _NUM_COPIES * num_bytes + self._min_free_bytes

    @contextmanager
    def file(self) -> Iterator[Path]:
        """An empty file, which is removed when the block ends, also by an error."""
        handle, name = tempfile.mkstemp(prefix=_PREFIX, dir=self._path)
        os.close(handle)
        path = Path(name)
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)
