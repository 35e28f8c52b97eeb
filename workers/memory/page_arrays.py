"""Pages of one worker in the pool, in host memory and in a file, with one interface."""

from __future__ import annotations

import os
import tempfile
import weakref
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch

from ...kernels.pages import copy_runs, read_pages, write_pages
from .pinned_memory import pinned_pages
from .pool import PoolGeometry

MOST_AT_ONCE = 32  # pages that a disk reads or writes at once, through its own buffer


class PageLostError(Exception):
    """A page does not hold what was written to it."""


def is_run(pages: Sequence[int]) -> bool:
    """The pages lie side by side, in this order."""
    return len(pages) > 0 and list(pages) == list(range(pages[0], pages[0] + len(pages)))


class PageArray(Protocol):
    """Pages by number; content is `[len(pages), num_layers, slab]`."""

    def read(self, pages: Sequence[int]) -> torch.Tensor:
        """A copy, or a view of the pages where they lie side by side: the caller must ensure that they are not written.

        Raises PageLostError or OSError.
        """

    def write(self, pages: Sequence[int], content: torch.Tensor) -> None:
        """Raises OSError."""


class DevicePages:
    """The pool."""

    def __init__(
        self,
        pool: torch.Tensor,
        read_pages: Callable[[torch.Tensor, Sequence[int]], torch.Tensor],
        write_pages: Callable[[torch.Tensor, Sequence[int], torch.Tensor], None],
    ) -> None:
        self._pool, self._read_pages, self._write_pages = pool, read_pages, write_pages

    def read(self, pages: Sequence[int]) -> torch.Tensor:
        return self._pool[pages[0] : pages[-1] + 1] if is_run(pages) else self._read_pages(self._pool, pages)

    def write(self, pages: Sequence[int], content: torch.Tensor) -> None:
        self._write_pages(self._pool, pages, content)


class HostPages:
    """Pages in host memory, which the system allocates as they are first written.

    Two threads may copy at once, but never the same page.
    """

    def __init__(self, num_pages: int, geometry: PoolGeometry, pinned: bool) -> None:
        """`pinned`: allocates all of it at once, for copies by a GPU while it computes. Raises ValueError."""
        shape = (num_pages, geometry.num_layers, geometry.slab)
        self._pages = pinned_pages(num_pages, geometry) if pinned else torch.empty(shape, dtype=geometry.dtype)

    def read(self, pages: Sequence[int]) -> torch.Tensor:
        return self._pages[pages[0] : pages[-1] + 1] if is_run(pages) else read_pages(self._pages, pages)

    def write(self, pages: Sequence[int], content: torch.Tensor) -> None:
        copy = write_pages if content.device.type == "cpu" else copy_runs
        copy(self._pages, pages, content)


class DiskPages:
    """Pages in an unnamed temporary file, which ends with its process."""

    def __init__(self, folder: Path, geometry: PoolGeometry, pinned: bool = False) -> None:
        """`pinned`: reads and writes go through pinned memory, for a GPU.

        Raises OSError if the folder cannot be written to, ValueError.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._geometry = geometry
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115  # lives as long as this object
        weakref.finalize(self, self._file.close)
        self._checksums: dict[int, int] = {}
        self._staging = pinned_pages(MOST_AT_ONCE, geometry) if pinned else None

    def read(self, pages: Sequence[int]) -> torch.Tensor:
        """See `PageArray.read`. At most MOST_AT_ONCE pages; with pinned memory they are valid until the next call."""
        geometry = self._geometry
        shape = (len(pages), geometry.num_layers, geometry.slab)
        content = torch.empty(shape, dtype=geometry.dtype) if self._staging is None else self._staging[: len(pages)]
        for page, row in zip(pages, content, strict=True):
            data = memoryview(row.view(torch.uint8).numpy()).cast("B")
            num_bytes = os.preadv(self._file.fileno(), [data], page * geometry.page_bytes)
            if num_bytes != geometry.page_bytes or zlib.crc32(data) != self._checksums.get(page):
                raise PageLostError(f"page {page} of the disk tier is not what was written")
        return content

    def write(self, pages: Sequence[int], content: torch.Tensor) -> None:
        page_bytes = self._geometry.page_bytes
        if content.device.type != "cpu":
            assert self._staging is not None, "the pages of a GPU need pinned memory"
            content = self._staging[: len(pages)].copy_(content)
        for page, row in zip(pages, content, strict=True):
            data = memoryview(row.contiguous().view(torch.uint8).numpy()).cast("B")
            self._checksums.pop(page, None)
            if os.pwrite(self._file.fileno(), data, page * page_bytes) != page_bytes:
                raise OSError(f"page {page} of the disk tier was not fully written: the disk may be full")
            self._checksums[page] = zlib.crc32(data)
