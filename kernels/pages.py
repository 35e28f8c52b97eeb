"""Page copies in plain torch: how content enters and leaves a pool."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch


def write_pages(pool: torch.Tensor, pages: Sequence[int], content: torch.Tensor) -> None:
    """Copies `content` `[len(pages), num_layers, slab]` into those pages of the pool."""
    if pool.device.type == "cpu":
        for page, one in zip(pages, content.to(pool.dtype).contiguous(), strict=True):
            _copy(pool[page], one)
        return
    pool.index_copy_(0, torch.tensor(pages, device=pool.device), content.to(pool.device, non_blocking=True))


def copy_runs(pool: torch.Tensor, pages: Sequence[int], content: torch.Tensor) -> None:
    """As `write_pages`, one copy for each run of neighbouring pages: from pinned memory the copy engine does it alone,
    and kernels that run beside it lose nothing."""
    start = 0
    for end in range(1, len(pages) + 1):
        if end == len(pages) or pages[end] != pages[end - 1] + 1:
            pool[pages[start] : pages[end - 1] + 1].copy_(content[start:end], non_blocking=True)
            start = end


def read_pages(pool: torch.Tensor, pages: Sequence[int]) -> torch.Tensor:
    """A copy of those pages, `[len(pages), num_layers, slab]`, on the pool's device."""
    if pool.device.type == "cpu":
        content = torch.empty((len(pages), *pool.shape[1:]), dtype=pool.dtype)
        for page, one in zip(pages, content, strict=True):
            _copy(one, pool[page])
        return content
    return pool.index_select(0, torch.tensor(pages, device=pool.device))


def _copy(to: torch.Tensor, of: torch.Tensor) -> None:
    """A page on the CPU, which is contiguous: as fast as memory goes, and three times index_copy_.

    Not torch's own copy, whose threads would stand in the way of those that compute.
    """
    assert to.is_contiguous() and of.is_contiguous() and to.nbytes == of.nbytes, "whole pages, alike"
    ctypes.memmove(to.data_ptr(), of.data_ptr(), of.nbytes)
