"""Host memory in huge pages of the operating system."""

from __future__ import annotations

import mmap
from pathlib import Path

import torch

_HUGE_PAGE_BYTES = 2 << 20


def zeros_in_huge_pages(num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    """`[num_elements]` zeros, in huge pages if the system has some free. Memory that is never touched is never taken.

    Random reads over gigabytes in pages of 4 KiB wait for address translation, and the CPU's own prefetching stops at
    the end of each page. The system must be advised before memory is touched, and backs only whole, aligned huge pages.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(num_elements, dtype=dtype)
    memory = mmap.mmap(-1, num_elements * dtype.itemsize + _HUGE_PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        pass  # this system has no huge pages: ordinary ones serve
    start = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % _HUGE_PAGE_BYTES
    return torch.frombuffer(memory, dtype=dtype, count=num_elements, offset=start)


def huge_page_bytes(smaps: Path = Path("/proc/self/smaps")) -> tuple[int, int] | None:
    """Bytes in memory where this process asked for huge pages, and how many of them lie in such; None: not known."""
    try:
        lines = smaps.read_text().splitlines()
    except OSError:
        return None
    total = huge = 0
    sizes: dict[str, int] = {}  # of a mapping; its flags are the last line
    for line in lines:
        key, _, value = line.partition(":")
        if key in ("Rss", "AnonHugePages"):
            sizes[key] = int(value.split()[0]) * 1024
        elif key == "VmFlags" and "hg" in value.split():
            total, huge = total + sizes["Rss"], huge + sizes["AnonHugePages"]
    return total, huge
