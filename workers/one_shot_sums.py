"""Sums of small tensors over a gang's GPUs, each by one kernel that reads what the other workers have in their memory.

NCCL sends a sum around a ring or along a tree, and for the few hundred kilobytes of a decode step its hops are most of
the time. Where GPUs of one machine reach one another's memory, PyTorch's symmetric memory (`torch.ops.symm_mem`) maps a
buffer of each worker into all others. All workers sum in the same order, so that all have the same bits.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch
import torch.distributed._symmetric_memory as symmetric_memory

# By degree, at most: beyond it each worker would read more than NCCL sends. The bounds of vLLM's kernel of this kind.
MOST_BYTES: Final = {2: 1 << 20, 4: 512 << 10, 8: 256 << 10}
ALIGNMENT: Final = 16  # bytes, that the kernel reads at once
DTYPE: Final = torch.bfloat16  # what GPUs serve
# Ray lets each worker see its own GPU alone, as the first one, which torch would take for one GPU that all share.
_SHARED = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"

_log = logging.getLogger(__name__)


class OneShotSums:
    """`buffer`: `[n]`, mapped into all workers of the group."""

    def __init__(self, buffer: torch.Tensor, group_name: str) -> None:
        self._buffer, self._group_name = buffer, group_name

    def fits(self, x: torch.Tensor) -> bool:
        """The same for all workers, since all sum tensors of one shape."""
        return (
            x.dtype == self._buffer.dtype
            and x.numel() <= self._buffer.numel()
            and x.is_contiguous()
            and x.nbytes % ALIGNMENT == 0
            and x.storage_offset() * x.itemsize % ALIGNMENT == 0
        )

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all workers' x, which fits."""
        mapped = self._buffer[: x.numel()].view(x.shape)
        return torch.ops.symm_mem.one_shot_all_reduce_copy(mapped, x, "sum", self._group_name)  # type: ignore[no-any-return]


def one_shot_sums(
    rank: int, degree: int, device: torch.device, group_name: str, gather: Callable[[torch.Tensor], torch.Tensor]
) -> OneShotSums | None:
    """All workers call it together, after they have met; None for all of them: their GPUs cannot, and the log says why.

    `group_name`: of torch's process group. `gather`: all workers' x, by rank. A worker that fails signals this to the
    others, so that none waits for it.
    """

    def all_can(problem: str | None, level: int = logging.WARNING) -> bool:
        if problem is not None:
            _log.log(level, "sums over the gang's GPUs go through NCCL alone: %s", problem)
        flags = gather(torch.tensor([problem is None], dtype=torch.int32, device=device))
        return bool(flags.all())

    most_bytes = next((size for max_degree, size in MOST_BYTES.items() if degree <= max_degree), None)
    if most_bytes is None:  # with more workers NCCL is faster
        return None
    homes = gather(torch.tensor([_home()], dtype=torch.int64, device=device)).flatten()
    are_apart = bool((homes != homes[0]).any())
    if not all_can("not all of its workers are in one pod" if are_apart else None, logging.INFO):  # as they were placed
        return None
    os.environ.setdefault(_SHARED, "1")
    buffer, problem = torch.empty(0), None
    try:
        buffer = symmetric_memory.empty(most_bytes // DTYPE.itemsize, dtype=DTYPE, device=device)
    except Exception as error:  # of a driver, a container or a torch that has no such memory
        problem = _problem_of(error)
    if not all_can(problem):
        return None
    try:
        symmetric_memory.rendezvous(buffer, group_name)  # type: ignore[arg-type]  # its name, for every torch
        sums = OneShotSums(buffer, group_name)
        problem = _wrong_sum(sums, rank, degree, device)
    except Exception as error:
        problem = _problem_of(error)
    return sums if all_can(problem) else None


def _wrong_sum(sums: OneShotSums, rank: int, degree: int, device: torch.device) -> str | None:
    """What a sum gives that is known, of as many numbers as there may be; None: it is right."""
    numbers = torch.arange(sums._buffer.numel(), device=device) % 16
    gpu_sum = sums.sum((numbers + rank).to(DTYPE))
    right = (numbers * degree + degree * (degree - 1) // 2).to(DTYPE)  # below 256: exact
    return None if torch.equal(gpu_sum, right) else "a sum that is known came out wrong"


def _home() -> int:
    """The same for processes that see the same machine, processes and files: they can hand memory to one another."""
    machine = Path("/proc/sys/kernel/random/boot_id").read_text()
    spaces = [os.readlink(f"/proc/self/ns/{name}") for name in ("pid", "mnt", "net")]
    digest = hashlib.blake2b("\n".join([machine, *spaces]).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _problem_of(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
