"""Memory that GPUs of a gang share, on a CPU: each worker has its own, and a sum is exchanged otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch
import torch.distributed._symmetric_memory as memory

from motet.workers import one_shot_sums


class SymmetricSums:
    """`num`: sums that were requested, replays of graphs included."""

    def __init__(self, total: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._total = total
        self.num = 0

    def __call__(self, mapped: torch.Tensor, x: torch.Tensor, how: str, group_name: str) -> torch.Tensor:
        assert (mapped.shape, mapped.dtype, how) == (x.shape, x.dtype, "sum") and group_name
        assert mapped.is_contiguous() and x.is_contiguous()
        self.num += 1
        mapped.copy_(x)
        return self._total(mapped.clone())


@contextmanager
def symmetric_memory(total: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[SymmetricSums]:
    """For workers that start meanwhile. `total`: the sum of all workers' x.

    Numbers are float32, in which the engine's tests have theirs.
    """
    mapped: list[torch.Tensor] = []

    def empty(size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        mapped.append(torch.empty(size, dtype=dtype, device=device))
        return mapped[-1]

    def rendezvous(buffer: torch.Tensor, group_name: str) -> None:
        assert any(buffer is one for one in mapped) and group_name

    sums = SymmetricSums(total)
    library = torch.library.Library("symm_mem", "IMPL")
    library.impl("one_shot_all_reduce_copy", sums, "CPU")
    try:
        with (
            mock.patch.object(memory, "empty", empty),
            mock.patch.object(memory, "rendezvous", rendezvous),
            mock.patch.object(one_shot_sums, "DTYPE", torch.float32),
        ):
            yield sums
    finally:
        library._destroy()
