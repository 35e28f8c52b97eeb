"""Tenants' files, or their stored responses, on the disk: beside the adapters, so that all routers have them.

```
root/
├── tmp/               files that arrive
└── <tenant_id>/
    ├── file-…         as uploaded
    ├── file-…o        answers of a batch, whole or growing
    ├── file-…e        its lines that failed
    └── resp_…         a stored response, under a root of their own
```
All methods block: call them from a thread.
"""

from __future__ import annotations

import asyncio
import errno
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Final

from starlette.types import Receive, Scope, Send

from ...adapters.registry.batches.records import FileRecord
from ...adapters.store.durable_file import make_folder, sync_folder

# A file as an answer: sent from the disk, no faster than its client reads.

_PIECE_BYTES: Final = 256 << 10


class FileContent:
    """An `Answer` of endpoint.py. It must be called once."""

    status_code = 200

    def __init__(self, file: BinaryIO, num_bytes: int, media_type: bytes = b"application/octet-stream") -> None:
        """`file`: is closed when the answer has ended, however it ends. `num_bytes`: that are left of it."""
        self._file = file
        self.raw_headers: list[tuple[bytes, bytes]] = [
            (b"content-type", media_type),
            (b"content-length", b"%d" % num_bytes),
            (b"cache-control", b"no-store"),
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._file:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            if scope["method"] != "HEAD":
                while piece := await asyncio.to_thread(self._file.read, _PIECE_BYTES):
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})


class FileStore:
    def __init__(self, root: Path, min_free_bytes: Callable[[], int] = lambda: 0) -> None:
        """Makes no folder before there is a file. `min_free_bytes`: that results leave to others."""
        self.root, self._min_free_bytes = root, min_free_bytes

    @property
    def arriving(self) -> Path:
        return self.root / "tmp"

    def path(self, tenant_id: str, file_id: str) -> Path:
        """Both are motet's own, as records have them, and never what a request says."""
        return self.root / tenant_id / file_id

    def make_folder_of(self, tenant_id: str) -> None:
        make_folder(self.root / tenant_id)

    def keep(self, arrived: Path, file: FileRecord) -> None:
        """Moves a file that has arrived to its place. Then it survives a crash of the machine."""
        self.make_folder_of(file.tenant_id)
        with arrived.open("rb") as opened:
            os.fsync(opened.fileno())
        path = self.path(file.tenant_id, file.id)
        os.replace(arrived, path)
        sync_folder(path.parent)

    def write(self, file: FileRecord, pieces: Iterable[bytes]) -> None:
        """A new file. Then it survives a crash of the machine. Raises OSError, and leaves nothing then."""
        self.check_room(file.num_bytes)
        self.make_folder_of(file.tenant_id)
        path = self.path(file.tenant_id, file.id)
        try:
            with path.open("xb") as opened:
                opened.writelines(pieces)
                opened.flush()
                os.fsync(opened.fileno())
            sync_folder(path.parent)
        except OSError:
            path.unlink(missing_ok=True)
            raise

    def is_there(self, tenant_id: str) -> bool:
        """Whether the tenant has had a file here; False: its file system may not be mounted now."""
        return (self.root / tenant_id).is_dir()

    def check_room(self, num_bytes: int) -> None:
        """Raises OSError (ENOSPC) where the disk has no room for so many bytes more."""
        make_folder(self.root)
        if shutil.disk_usage(self.root).free < num_bytes + self._min_free_bytes():
            raise OSError(errno.ENOSPC, "the disk has no room for results")

    def open(self, tenant_id: str, file_id: str) -> BinaryIO:
        """Raises FileNotFoundError."""
        return self.path(tenant_id, file_id).open("rb")

    def delete(self, tenant_id: str, file_id: str) -> None:
        self.path(tenant_id, file_id).unlink(missing_ok=True)

    def retire(self, tenant_id: str) -> None:
        """Deletes all files of a tenant."""
        shutil.rmtree(self.root / tenant_id, ignore_errors=True)

    def old_files(self, older_than_s: float) -> Iterator[tuple[str, list[str]]]:
        """Tenant ids, each with the ids of its files that were not written for this time."""
        oldest = time.time() - older_than_s
        folders = [*self.root.iterdir()] if self.root.is_dir() else []
        for folder in folders:
            if folder != self.arriving:
                yield folder.name, [path.name for path in folder.iterdir() if _written_at(path) < oldest]


def _written_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # deleted meanwhile
        return math.inf
