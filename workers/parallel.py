"""What the workers of a gang exchange while they compute."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from .config import SmallSums

if TYPE_CHECKING:
    from .one_shot_sums import OneShotSums

_LOOK_AGAIN_S = 0.05  # for a worker that others wait for


class PendingSum(Protocol):
    """An all-reduce that was begun. Its input is undefined until it has ended."""

    def wait(self) -> torch.Tensor:
        """The sum of all workers' tensors; on a GPU, what is launched later waits for it, and not the host."""


class Parallel(Protocol):
    """Collectives among a gang's workers. Every worker calls the same ones in the same order."""

    rank: int
    degree: int

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all workers' x, in whose memory it may be."""

    def begin_all_reduce(self, x: torch.Tensor) -> PendingSum:
        """The same, under way while this worker computes."""

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """All workers' x, by rank: `[degree, *x.shape]`."""

    def meet(self) -> None:
        """Returns when all workers have called it, however late one is. Once, before a step's deadline applies."""


class CollectiveTraffic:
    """Collectives that a worker took part in, and bytes that it sends if it sends in a ring: the least they can take.

    What a CUDA graph replays is not counted again.
    """

    def __init__(self) -> None:
        self.num_collectives = self.sent_bytes = 0

    def count_all_reduce(self, x: torch.Tensor, degree: int) -> None:
        self._count(2 * (degree - 1) * x.nbytes // degree)

    def count_all_gather(self, x: torch.Tensor, degree: int) -> None:
        self._count((degree - 1) * x.nbytes)

    def _count(self, sent_bytes: int) -> None:
        self.num_collectives += 1
        self.sent_bytes += sent_bytes


@dataclass(frozen=True)
class EndedSum:
    total: torch.Tensor

    def wait(self) -> torch.Tensor:
        return self.total


@dataclass(frozen=True)
class GroupSum:
    """One of torch.distributed, which sums in place."""

    x: torch.Tensor
    work: torch.distributed.Work

    def wait(self) -> torch.Tensor:
        self.work.wait()
        return self.x


class Alone:
    """A gang of one worker: nothing to exchange."""

    rank = 0
    degree = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def begin_all_reduce(self, x: torch.Tensor) -> EndedSum:
        return EndedSum(x)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x.unsqueeze(0)

    def meet(self) -> None:
        pass


class ProcessGroup:
    """Workers in processes of their own, over torch.distributed: NCCL on GPUs, gloo on CPUs."""

    def __init__(
        self,
        rank: int,
        degree: int,
        store: TCPStore,
        timeout_s: float,
        device: torch.device,
        small_sums: SmallSums = "one-shot",
    ) -> None:
        """Returns when all workers have come. A worker that dies or hangs later makes a collective raise.

        `small_sums`: of a decode step's tensors on GPUs: by one kernel each where the GPUs can, or by NCCL.
        """
        self.rank, self.degree = rank, degree
        self._store = store
        self.traffic = CollectiveTraffic()
        torch.distributed.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            rank=rank,
            world_size=degree,
            store=store,
            timeout=timedelta(seconds=timeout_s),
            device_id=device if device.type == "cuda" else None,  # NCCL connects now, not in the first step
        )
        self._one_shot: OneShotSums | None = None
        if device.type == "cuda" and small_sums == "one-shot":
            from .one_shot_sums import one_shot_sums

            assert torch.distributed.group.WORLD is not None
            name = torch.distributed.group.WORLD.group_name
            self._one_shot = one_shot_sums(rank, degree, device, name, self.all_gather)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if x.numel() > 0:
            self.traffic.count_all_reduce(x, self.degree)
            if self._one_shot is not None and self._one_shot.fits(x):
                return self._one_shot.sum(x)
            torch.distributed.all_reduce(x)
        return x

    def begin_all_reduce(self, x: torch.Tensor) -> PendingSum:
        if x.numel() == 0 or (self._one_shot is not None and self._one_shot.fits(x)):
            return EndedSum(self.all_reduce(x))
        self.traffic.count_all_reduce(x, self.degree)
        work = torch.distributed.all_reduce(x, async_op=True)
        assert work is not None, "every worker is in the group"
        return GroupSum(x, work)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        gathered = x.new_empty(self.degree * x.numel())
        if x.numel() > 0:
            self.traffic.count_all_gather(x, self.degree)
            torch.distributed.all_gather_into_tensor(gathered, x.flatten())
        return gathered.view(self.degree, *x.shape)

    def meet(self) -> None:
        """Raises an error if the leader, whose process has the store, is gone."""
        keys = [f"worker {rank} is here" for rank in range(self.degree)]
        self._store.set(keys[self.rank], "")
        while not self._store.check(keys):  # a wait in the store itself would keep NCCL's own threads from using it
            time.sleep(_LOOK_AGAIN_S)

    def close(self) -> None:
        torch.distributed.destroy_process_group()
