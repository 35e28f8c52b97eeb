"""A gang whose workers are threads of one process, to count what they exchange. Not for speed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from motet.workers.parallel import CollectiveTraffic, EndedSum

T = TypeVar("T")


class ThreadGroup:
    """`parallel.Parallel` of one thread among `degree`; all share `board` and `barrier`."""

    def __init__(self, rank: int, board: list[torch.Tensor | None], barrier: threading.Barrier) -> None:
        self.rank, self.degree = rank, len(board)
        self.traffic = CollectiveTraffic()
        self._board, self._barrier = board, barrier

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self.traffic.count_all_reduce(x, self.degree)
        return x.copy_(torch.stack(self._exchange(x)).float().sum(0))

    def begin_all_reduce(self, x: torch.Tensor) -> EndedSum:
        total = self.all_reduce(x.clone())
        x.fill_(torch.nan)  # as it may be until the sum has ended
        return EndedSum(total)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        self.traffic.count_all_gather(x, self.degree)
        return torch.stack(self._exchange(x))

    def meet(self) -> None:
        self._barrier.wait()

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        self._board[self.rank] = x.clone()
        self._barrier.wait()
        taken = [part for part in self._board if part is not None]
        self._barrier.wait()
        return taken


def run_threads(degree: int, work: Callable[[ThreadGroup], T]) -> list[T]:
    """Runs `work` on each worker, and returns the results by rank."""
    board: list[torch.Tensor | None] = [None] * degree
    barrier = threading.Barrier(degree, timeout=120)
    with ThreadPoolExecutor(degree) as threads:
        return list(threads.map(lambda rank: work(ThreadGroup(rank, board, barrier)), range(degree)))
