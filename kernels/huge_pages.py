"""Host memory in the system's huge pages."""

from __future__ import annotations

import mmap

import torch

_HUGE_PAGE_BYTES = 2 << 20


def zeros_in_huge_pages(num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    """`[num_elements]` of zeros, in huge pages where the system has them to give, and nothing taken until it is used.

    Reads that jump through gigabytes in pages of 4 KiB wait for address translation, and what the CPU fetches ahead by
    itself ends with each page. The advice must come before the first touch, and only whole huge pages count.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(num_elements, dtype=dtype)
    memory = mmap.mmap(-1, num_elements * dtype.itemsize + _HUGE_PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        pass  # a kernel without them: its own pages serve
    start = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % _HUGE_PAGE_BYTES
    return torch.frombuffer(memory, dtype=dtype, count=num_elements, offset=start)
