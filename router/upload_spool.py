"""Where the tensors of uploads lie while they arrive."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_PREFIX: Final = "upload-"
_ABANDONED_S: Final = 24 * 3600.0  # an upload in progress touches its file far more often


class UploadSpool:
    """A folder of files that live as long as their upload. Routers of one machine may share it."""

    def __init__(self, path: Path) -> None:
        """Makes the folder, and removes what a router left there that was killed long ago."""
        self._path = path
        path.mkdir(parents=True, exist_ok=True)
        oldest = time.time() - _ABANDONED_S
        for left in path.glob(f"{_PREFIX}*"):
            if left.stat().st_mtime < oldest:
                left.unlink(missing_ok=True)

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
