"""Files that are either whole and on the disk, or not there."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacing(path: Path, temporary: Path) -> Iterator[BinaryIO]:
    """A file to write. Once the block ends well, `path` holds it, even if the machine dies at that moment.

    If it ends badly, `path` is what it was. `temporary` is a folder on the same file system; a process that dies leaves
    its unfinished file there.
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
    """Makes a folder and the missing ones above it, durably."""
    if path.is_dir():
        return
    make_folder(path.parent)
    path.mkdir(exist_ok=True)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Makes the names in a folder durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
