"""The files that hold the tensors of uploads while they arrive."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_PREFIX: Final = "upload-"
OF_ADAPTERS: Final = 3  # copies: in the spool, in the store as uploaded, in the store as pages
_ABANDONED_S: Final = 24 * 3600.0  # a file that was not written for this long belongs to no upload any more


class UploadSpool:
    """A folder with a file for each upload in progress. Routers of one machine may share it."""

    def __init__(self, path: Path, min_free_bytes: int = 0, num_copies: int = OF_ADAPTERS) -> None:
        """Makes the folder, and removes files that routers left there when they were killed long ago.

        `num_copies`: of an upload that there may be on the disk.
        """
        self._path, self.num_copies = path, num_copies
        self._min_free_bytes = min_free_bytes
        self._num_promised = 0  # bytes on the disk of uploads in progress, by what they declared, or what has come
        self._num_written = 0  # of these, to the spool
        path.mkdir(parents=True, exist_ok=True)
        oldest = time.time() - _ABANDONED_S
        for left in path.glob(f"{_PREFIX}*"):
            if left.stat().st_mtime < oldest:
                left.unlink(missing_ok=True)

    @contextmanager
    def room(self, num_bytes: int) -> Iterator[UploadRoom]:
        """Room on the disk for an upload of `num_bytes`; see `UploadRoom`. It is given back when the block ends."""
        room = UploadRoom(self)
        try:
            room.grow(num_bytes)
            yield room
        finally:
            self._num_promised -= room.num_promised
            self._num_written -= room.num_written

    def _promise(self, num_bytes: int) -> None:
        left = self._num_promised + num_bytes - self._num_written  # to be written by uploads in progress
        if shutil.disk_usage(self._path).free < left + self._min_free_bytes:
            raise OSError(errno.ENOSPC, "the disk has no room for this upload")
        self._num_promised += num_bytes

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


class UploadRoom:
    """What the disk must have for one upload: in the spool, in the store, and as pages, beside `min_free_bytes`.

    Uploads in progress are counted with what they may still write, so that they do not fill the disk together.
    """

    def __init__(self, spool: UploadSpool) -> None:
        self._spool = spool
        self._num_bytes = 0  # of the upload
        self.num_promised = 0  # bytes on the disk
        self.num_written = 0

    def grow(self, num_bytes: int) -> None:
        """The upload turns out to have `num_bytes`. Raises OSError (ENOSPC) where there is no room for them."""
        if num_bytes > self._num_bytes:
            self._promise(self._spool.num_copies * num_bytes)
            self._num_bytes = num_bytes

    def pack(self, num_bytes: int) -> None:
        """Its pages turn out to take `num_bytes`. Raises as `grow`."""
        self._promise((self._spool.num_copies - 1) * self._num_bytes + num_bytes)

    def _promise(self, num_bytes: int) -> None:
        more = num_bytes - self.num_promised
        if more > 0:
            self._spool._promise(more)
            self.num_promised = num_bytes

    def wrote(self, num_bytes: int) -> None:
        """So many bytes more are in the spool, and no longer in what the disk has free."""
        self.num_written += num_bytes
        self._spool._num_written += num_bytes
