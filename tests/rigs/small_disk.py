"""A file system of its own, so small that a test can fill it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """64 MiB at `folder`, which is made. Skips the test where this is not allowed."""
    folder.mkdir()
    try:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "none", folder], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"a file system of its own cannot be mounted: {error}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def fill(disk: Path) -> Path:
    """A file that leaves no room on the disk, as another program's log may."""
    path = disk / "log of another program"
    with path.open("wb", buffering=0) as file:
        for piece_bytes in (1 << 20, 4096):
            try:
                while True:
                    file.write(bytes(piece_bytes))
            except OSError:
                continue  # the disk is full
    return path
