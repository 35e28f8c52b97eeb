"""Writes files so that after a crash each is either complete on disk or as it was before."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
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


def make_folder(path: Path) -> None:
    """Makes a folder, and the missing folders above it, so that they survive a crash of the machine."""
    if path.is_dir():
        return
    make_folder(path.parent)
    path.mkdir(exist_ok=True)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Writes a folder's own entries (names of its files) to disk, so that they survive a crash of the machine."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
