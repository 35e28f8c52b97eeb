"""How a worker starts on a GPU: what it holds, waits for and leaves alone, on the stand-in."""

from __future__ import annotations

import gc
import logging
import socket
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch

from motet.kernels.pinned_zeros import pinned_zeros
from motet.tests.rigs.engine_rig import EngineRig, Stock
from motet.tests.rigs.gang_rig import gang
from motet.tests.rigs.oracle import write_model
from motet.tests.rigs.patience import PATIENCE_S
from motet.tests.rigs.stand_in_gpu.gpu_worker import gpu_of_twins, run_worker_on_gpu
from motet.tests.rigs.stand_in_gpu.stand_in_gpu import StandInGpu, stand_in_gpu
from motet.workers import engine_builder, worker_builder
from motet.workers.execution.executor import WorkerLostError
from motet.workers.execution.gang_executor import Connection, WorkerFailed
from motet.workers.execution.graphs import CudaRecorder, Cut
from motet.workers.models import decoder
from motet.workers.models.device_checkpoint import STAGING_BYTES
from motet.workers.wire.messages import SamplingParams
from motet.workers.worker import WorkerSettings
from motet.workers.worker_builder import LATER_BYTES, DeviceMemory

GPU = torch.device("cuda", 0)
GIB = 1 << 30


@pytest.fixture
def gpu() -> Iterator[StandInGpu]:
    with stand_in_gpu() as gpu:
        yield gpu


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Stock:
    folder = tmp_path_factory.mktemp("start")
    return Stock.make(write_model("llama_tied_llama3_rope", folder / "model"), {}, folder / "store")


def test_a_base_comes_through_pinned_memory_that_is_given_back(stock: Stock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "motet.workers.models.device_checkpoint")
    with gpu_of_twins() as gpu, stock.engine(60, device="cuda", host_bytes=0):
        loads = [copy for copy in gpu.tally.copies if copy.line.startswith("workers/models/device_checkpoint.py")]
        waits = [wait for wait in gpu.tally.waits if wait.line.startswith("workers/models/device_checkpoint.py")]
        pinned = [region.num_bytes for region in gpu.pinned._regions]
    file_bytes = sum(path.stat().st_size for path in stock.model_path.glob("*.safetensors"))
    assert 0.9 * file_bytes < sum(copy.num_bytes for copy in loads) <= file_bytes
    assert not [copy for copy in loads if copy.waits]
    assert len(waits) == 1, "for all of it, at the end"
    assert STAGING_BYTES not in pinned
    assert "weights are loaded: 0.00 GiB read" in caplog.text


def test_all_recordings_are_made_in_one_stream(gpu: StandInGpu) -> None:
    """torch keeps 32 MiB of cuBLAS for each stream that multiplies, and hands out 32 streams in turn."""
    weight, used = torch.ones((4, 4), device=GPU), set[int]()

    def compute(cut: Cut) -> torch.Tensor:
        used.add(gpu.streams.current.number)
        return weight @ weight

    record = CudaRecorder()
    recordings = [record(compute) for _ in range(5)]
    assert len(used) == 1 and used != {gpu.streams._default.number}
    assert recordings[0].replay().tolist() == [[4.0] * 4] * 4


def test_recording_reports_its_progress(gpu: StandInGpu, caplog: pytest.LogCaptureFixture) -> None:
    """Not at each graph: of a step with prompts there are as many as layers, and one."""
    caplog.set_level(logging.INFO, "motet.workers.execution.graphs")
    now, weight = 100.0, torch.ones(4, device=GPU)

    def compute(cut: Cut) -> torch.Tensor:
        cut(lambda: None)
        return weight + 1

    record = CudaRecorder(clock=lambda: now)
    for now in (100.0, 101.0, 107.0, 108.0):  # noqa: B007
        record(compute)
    assert [each.getMessage() for each in caplog.records] == ["recording steps: 6 graphs in 7.0 s so far"]
    assert record.summary() == "8 graphs in 8.0 s"


class Ring:
    """Garbage that only a collection finds, with pinned memory in it."""

    def __init__(self) -> None:
        self.myself, self.pinned = self, pinned_zeros((4,), torch.float32, "")


def test_no_garbage_is_collected_in_a_capture(gpu: StandInGpu) -> None:
    """What it would free, a graph or pinned memory, CUDA does not free in the middle of a capture."""
    weight = torch.ones(4, device=GPU)

    def compute(cut: Cut) -> torch.Tensor:
        Ring()
        return weight + len([[each] for each in range(2000)])

    before = gc.get_threshold()
    gc.set_threshold(100, 2, 100_000)  # Ring is in one of the two young generations
    try:
        CudaRecorder()(compute)
        assert gc.isenabled() and gpu.problems == []
        with mock.patch.object(gc, "disable"), mock.patch.object(sys, "unraisablehook"):
            CudaRecorder()(compute)
    finally:
        gc.set_threshold(*before)
    gc.collect()
    assert gpu.problems and all("pinned memory is unpinned while a graph" in problem for problem in gpu.problems)
    gpu.problems.clear()


def test_what_passes_in_a_step_is_room_beside_the_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs have memory of their own, which chunks cannot use: 10 GiB are weights, 3 pass, 2 are graphs'."""
    allocated, peak, cached, private, empties = 0, 0, 0, 0, 0

    def take(kept: int, passing: int = 0) -> None:
        nonlocal allocated, peak, cached
        allocated += kept
        peak, cached = max(peak, allocated + passing), cached + passing

    def empty() -> None:
        nonlocal cached, empties
        cached, empties = 0, empties + 1

    def reset(_: object) -> None:
        nonlocal peak
        peak = allocated

    def reserved(_: object = None) -> int:
        return allocated + cached + private

    fake: dict[str, Any] = {
        "memory_allocated": lambda _: allocated,
        "reset_peak_memory_stats": reset,
        "max_memory_allocated": lambda _: peak,
        "memory_reserved": reserved,
        "mem_get_info": lambda _: (80 * GIB - GIB - reserved(), 80 * GIB),  # a GiB is others'
        "empty_cache": empty,
    }
    for name, function in fake.items():
        monkeypatch.setattr(torch.cuda, name, function)
    memory = DeviceMemory(GPU)
    with memory.part("weights"):
        take(10 * GIB, 4 * GIB)
    with memory.part("the pool"):
        take(1000)
    with memory.part("chunks of prompts", recurs=True):
        take(0, 3 * GIB)
    with memory.part("graphs"):
        empty()  # as a capture does
        private = 2 * GIB
        take(0, GIB)  # by the last one's warm-up
    assert memory.room_for_pool(1.0, 1000) == 80 * GIB - (1 + 10 + 2 + 3) * GIB - LATER_BYTES


def run_worker_that_waits(settings: WorkerSettings) -> None:
    """The first worker fails if it computes with others before the second has loaded, which takes a while."""
    flag = Path(settings.config.store_path).parent / "second has loaded"
    load, exchange = decoder.load_decoder, torch.distributed.all_reduce

    def load_late(*given: Any) -> Any:
        loaded = load(*given)
        if settings.rank == 1:
            time.sleep(1.0)
            flag.touch()
        return loaded

    def exchange_then(*given: Any, **named: Any) -> Any:
        assert flag.exists(), "a deadline of a step runs while another worker still loads"
        return exchange(*given, **named)

    with (
        mock.patch.object(worker_builder, "load_decoder", load_late),
        mock.patch.object(torch.distributed, "all_reduce", exchange_then),
    ):
        run_worker_on_gpu(settings, least_sums=1)  # which comes too early here, so that all others are NCCL's


def test_workers_wait_for_the_slowest_load_without_a_steps_deadline(stock: Stock) -> None:
    with gang(stock.gang_config(60, 2, device="cuda"), run_worker_that_waits) as (engine, workers):
        rig = EngineRig(engine, {})
        rig.submit(0, [1, 2, 3], None, SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True))
        rig.finish()
        assert len(rig.outputs[0].token_ids) == 2
    assert [worker.exitcode for worker in workers] == [0, 0]


def test_a_worker_that_is_lost_while_others_wait_for_it_ends_the_start() -> None:
    """The first worker waits in silence for the second, which cannot load."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = [Connection(socket.create_connection(listener.getsockname())) for _ in range(2)]
        ours = [Connection(listener.accept()[0]) for _ in range(2)]
    with ThreadPoolExecutor(1) as thread:
        start = thread.submit(engine_builder._await_all_ready, ours, None)
        theirs[1].send(msgspec.msgpack.encode(WorkerFailed("the file was cut short")))
        try:
            with pytest.raises(WorkerLostError, match="worker 1 could not load the model: the file was cut short"):
                start.result(PATIENCE_S)
        finally:
            for connection in theirs:
                connection.close()
