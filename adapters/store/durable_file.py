"""Writes files so that after a crash each is either complete on disk or as it was before."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacing(path: Path, temporary: Path) -> Iterator[BinaryIO]:
    """A file to write, which replaces `path` when the block ends, and then survives a crash of the machine.

    If the block raises, `path` stays as it was. `temporary` is a folder on the same file system; a process that dies
    leaves its unfinished file there.
    """
    handle, name = tempfile.mkstemp(dir=temporary)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
    sync_folder(path.parent)


class NewFiles:
    """Files of one folder, written elsewhere on its file system. Those that are durable are synced while others are
    written, and a file system commits syncs that run at the same time together."""

    def __init__(self, temporary: Path, threads: ThreadPoolExecutor) -> None:
        self.written: dict[str, Path] = {}
        self._temporary, self._threads = temporary, threads
        self._syncs: list[Future[None]] = []

    @contextmanager
    def write(self, name: str, *, durable: bool = True) -> Iterator[BinaryIO]:
        """The file to write. One that is not `durable` may be damaged after a crash of the machine."""
        handle, path = tempfile.mkstemp(dir=self._temporary)
        self.written[name] = Path(path)
        with os.fdopen(handle, "wb") as file:
            yield file
        if durable:
            self._syncs.append(self._threads.submit(_sync, self.written[name]))

    def wait_until_synced(self) -> None:
        for sync in self._syncs:
            sync.result()


@contextmanager
def replacing_all(folder: Path, temporary: Path) -> Iterator[NewFiles]:
    """Files that replace those of their names in `folder`, which is made, in the order in which they were written.

    When the block ends, all that are durable survive a crash of the machine. If it raises, all stays as it was.
    `temporary`: as of `replacing`.
    """
    with ThreadPoolExecutor() as threads:
        files = NewFiles(temporary, threads)
        try:
            yield files
            files.wait_until_synced()
            changed = [folder, *_make_folders(folder)]
            for name, path in files.written.items():
                os.replace(path, folder / name)
        except BaseException:
            for path in files.written.values():
                path.unlink(missing_ok=True)
            raise
        for sync in [threads.submit(_sync, path) for path in changed]:
            sync.result()


def make_folder(path: Path) -> None:
    """Makes a folder, and the missing folders above it, so that they survive a crash of the machine."""
    for changed in _make_folders(path):
        _sync(changed)


def _make_folders(path: Path) -> list[Path]:
    """Makes a folder and the missing ones above it. Returns those that have a new entry, the uppermost first."""
    if path.is_dir():
        return []
    changed = _make_folders(path.parent)
    path.mkdir(exist_ok=True)
    return [*changed, path.parent]


def sync_folder(path: Path) -> None:
    """Writes a folder's own entries (names of its files) to disk, so that they survive a crash of the machine."""
    _sync(path)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
