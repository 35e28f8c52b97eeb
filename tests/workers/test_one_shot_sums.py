"""Sums over a gang's GPUs by one kernel each: all workers have them, or none, and what does not fit is NCCL's."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed._symmetric_memory as memory

from motet.tests.rigs.patience import PATIENCE_S
from motet.tests.rigs.stand_in_gpu.symmetric_memory import symmetric_memory
from motet.workers import one_shot_sums
from motet.workers.one_shot_sums import MOST_BYTES, OneShotSums

CPU = torch.device("cpu")


class Workers:
    """Threads that meet at each exchange."""

    def __init__(self, degree: int) -> None:
        self.degree = degree
        self._barrier = threading.Barrier(degree, timeout=PATIENCE_S)
        self._rank = threading.local()
        self._given: list[torch.Tensor] = [torch.empty(0)] * degree

    @property
    def rank(self) -> int:
        return int(self._rank.number)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        self._given[self.rank] = x.clone()
        self._barrier.wait()
        gathered = torch.stack(self._given)
        self._barrier.wait()
        return gathered

    def total(self, x: torch.Tensor) -> torch.Tensor:
        return self.gather(x).sum(0)

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        def as_rank(rank: int) -> Any:
            self._rank.number = rank
            return work(rank)

        with ThreadPoolExecutor(self.degree) as pool:
            return list(pool.map(as_rank, range(self.degree)))

    def start(self) -> list[OneShotSums | None]:
        return self.run(lambda rank: one_shot_sums.one_shot_sums(rank, self.degree, CPU, "all", self.gather))


@pytest.mark.parametrize("degree", [2, 3, 4, 8])
def test_all_workers_have_the_sum(degree: int) -> None:
    workers = Workers(degree)
    with symmetric_memory(workers.total):
        sums = workers.start()
        assert all(sums)
        given = [torch.randn(3, 8) for _ in range(degree)]
        found = workers.run(lambda rank: sums[rank].sum(given[rank]))  # type: ignore[union-attr]
    for one in found:
        assert torch.equal(one, torch.stack(given).sum(0))


def test_what_does_not_fit_is_nccls() -> None:
    sums = OneShotSums(torch.empty(1024), "all")
    assert sums.fits(torch.empty(256, 4)) and sums.fits(torch.empty(4))
    assert not sums.fits(torch.empty(257, 4)), "more than the buffer holds"
    assert not sums.fits(torch.empty(4, dtype=torch.bfloat16))
    assert not sums.fits(torch.empty(8, 4)[:, :2]), "not in one piece"
    assert not sums.fits(torch.empty(5)), "no multiple of 16 bytes"
    assert not sums.fits(torch.empty(9)[1:5]), "begins between what is read at once"


def test_the_more_workers_the_less_by_one_kernel() -> None:
    assert sorted(MOST_BYTES.values(), reverse=True) == list(MOST_BYTES.values())
    workers = Workers(16)
    with symmetric_memory(workers.total):
        assert workers.start() == [None] * 16


def lacking(workers: Workers) -> Any:
    """The second worker's driver has no such memory."""
    empty = memory.empty

    def fail(*given: Any, **rest: Any) -> torch.Tensor:
        if workers.rank == 1:
            raise RuntimeError("no such memory\nat all")
        made: torch.Tensor = empty(*given, **rest)
        return made

    return mock.patch.object(memory, "empty", fail)


def apart(workers: Workers) -> Any:
    """In pods of their own: handles of memory do not get from one to the other."""
    return mock.patch.object(one_shot_sums, "_home", side_effect=itertools.count())


def unreachable(workers: Workers) -> Any:
    """The first worker's GPU does not reach the others'."""

    def fail(buffer: torch.Tensor, group_name: str) -> None:
        if workers.rank == 0:
            raise RuntimeError("peer access is not supported")

    return mock.patch.object(memory, "rendezvous", fail)


def wrong(workers: Workers) -> Any:
    """The first worker reads something else than the others have."""
    wrong_sum = one_shot_sums._wrong_sum

    class Off(OneShotSums):
        def sum(self, x: torch.Tensor) -> torch.Tensor:
            return super().sum(x) + (workers.rank == 0)

    return mock.patch.object(
        one_shot_sums, "_wrong_sum", lambda sums, *rest: wrong_sum(Off(sums._buffer, sums._group_name), *rest)
    )


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (lacking, "RuntimeError: no such memory"),
        (apart, "not all of its workers are in one pod"),
        (unreachable, "RuntimeError: peer access is not supported"),
        (wrong, "a sum that is known came out wrong"),
    ],
)
def test_where_one_cannot_all_go_through_nccl(
    fault: Callable[[Workers], Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    workers = Workers(2)

    def total(x: torch.Tensor) -> torch.Tensor:  # the one that cannot does not come
        return x if fault is unreachable else workers.total(x)

    with symmetric_memory(total), fault(workers), caplog.at_level(logging.INFO):
        assert workers.start() == [None, None]
    assert f"go through NCCL alone: {said}" in caplog.text
    assert "at all" not in caplog.text
