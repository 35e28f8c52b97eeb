"""Workers on stand-in GPUs, with the plain twins for kernels: Triton's take minutes to interpret."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from motet.kernels import pages
from motet.kernels.backend import Kernels, plain_kernels
from motet.tests.rigs.stand_in_gpu.stand_in_gpu import StandInGpu, stand_in_gpu
from motet.tests.rigs.stand_in_gpu.symmetric_memory import symmetric_memory
from motet.workers import worker_builder
from motet.workers import worker_builder as worker_builder_module
from motet.workers.worker import WorkerSettings, run_worker

UNEVEN_BYTES = 48 << 20  # that the GPU of each worker of a gang has less than the one before


def twins() -> Kernels:
    """What a GPU computes, by plain torch; pages are copied as on a GPU."""
    return replace(plain_kernels(), write_pages=pages.copy_runs)


@contextmanager
def gpu_of_twins() -> Iterator[StandInGpu]:
    """Workers that are built in this context, with device cuda, compute on a stand-in GPU."""
    kernels = twins()
    with stand_in_gpu() as gpu, mock.patch.object(worker_builder, "choose_kernels", return_value=kernels):
        yield gpu


def total(x: torch.Tensor) -> torch.Tensor:
    torch.distributed.all_reduce(x)
    return x


@contextmanager
def gloo_for_nccl(least_sums: int = 2) -> Iterator[None]:
    """`least_sums`: by one kernel each; the first is that of the start."""
    join = torch.distributed.init_process_group

    def init(backend: str, *, device_id: torch.device | None, **rest: Any) -> None:
        assert (backend, device_id) == ("nccl", torch.device("cuda", 0))
        join("gloo", **rest)

    with mock.patch.object(torch.distributed, "init_process_group", init), symmetric_memory(total) as sums:
        yield
    assert sums.num >= least_sums, "sums went through NCCL alone"


def run_worker_on_gpu(settings: WorkerSettings, least_sums: int = 2) -> None:
    """`run_worker` of a gang. The process fails if the stand-in finds a problem.

    Its workers' GPUs have different sizes, a little over `device_memory.LATER_BYTES`.
    """
    with gpu_of_twins() as gpu, gloo_for_nccl(least_sums):
        gpu.streams.total_bytes = worker_builder_module.LATER_BYTES + (10 - settings.rank) * UNEVEN_BYTES
        run_worker(settings)


def run_recording_worker(settings: WorkerSettings) -> None:
    """The same with Triton's kernels, interpreted. The process fails if no decode was replayed, too."""
    with stand_in_gpu() as gpu, gloo_for_nccl():
        run_worker(settings)
        assert gpu.tally.replays > 0, "every decode was launched kernel by kernel"
