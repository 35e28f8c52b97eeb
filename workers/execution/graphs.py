"""Decode steps recorded as CUDA graphs: one launch in place of hundreds, for batches in which every row is a decode.

A recording has a fixed number of rows, a bucket; a smaller batch is padded with rows at position -1, which write
nothing. What it reads never moves: `DeviceRows`, into which the rows of a step are copied before a replay.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from ...kernels.attention import AttentionBatch
from ..models.step_adapters import StepAdapters
from .device_rows import DeviceInputs, DeviceRows
from .recorded_adapters import RecordedAdapters

_log = logging.getLogger(__name__)
_INTERVAL_S = 5.0  # between two lines of the log
Forward = Callable[[torch.Tensor, AttentionBatch, StepAdapters | None], torch.Tensor]  # logits of all rows


class Recording(Protocol):
    def replay(self) -> torch.Tensor:
        """Computes what was recorded with its inputs' present content. The output is always the same memory."""


Between = Callable[[], object]
Cut = Callable[[Between], object]
Compute = Callable[[Cut], torch.Tensor]  # calls `cut(between)` where each replay must call `between`
Record = Callable[[Compute], Recording]


@dataclass(frozen=True)
class Bucket:
    """A recording, and the part of the adapters' tables that it reads."""

    adapters: StepAdapters | None  # None: no row has an adapter
    recording: Recording

    def fill(self, step: StepAdapters | None, adapters: RecordedAdapters) -> bool:
        """Copies a step's adapters to where it reads them. False: they do not fit."""
        return step is None or self.adapters is None or adapters.hold(self.adapters, step)


class DecodeGraphs:
    """Recordings for a device, by number of rows, without and with adapters."""

    def __init__(
        self,
        forward: Forward,
        adapters: RecordedAdapters,
        rows: DeviceRows,
        max_rows: int,
        vocab_size: int,
        device: torch.device,
        record: Record,
    ) -> None:
        """Records all of them. `max_rows`: of a step; `record`: see `CudaRecorder`."""
        self._forward, self._adapters, self._record = forward, adapters, record
        self._rows = rows
        # Shared by all recordings, which never run at the same time.
        self._logits = torch.zeros((max_rows, vocab_size), dtype=torch.float32, device=device)
        # The largest first, so that the smaller ones fit into its memory.
        sizes = sorted(bucket_sizes(max_rows), reverse=True)
        self._buckets = {
            (size, has_adapters): self._recorded(size, has_adapters) for size in sizes for has_adapters in (False, True)
        }
        self._sizes = sizes[::-1]

    def logits(self, inputs: DeviceInputs, adapters: StepAdapters | None) -> torch.Tensor | None:
        """`[num_rows, vocab]` of decodes, valid until the next call; None: their adapters do not fit."""
        num_rows = len(inputs.sample_ids)
        size = next(size for size in self._sizes if size >= num_rows)
        bucket = self._buckets.get((size, adapters is not None))
        if bucket is None or not bucket.fill(adapters, self._adapters):
            return None
        self._rows.fill(inputs.rows, size)
        return bucket.recording.replay()[:num_rows]

    def _recorded(self, size: int, has_adapters: bool) -> Bucket | None:
        adapters = None
        if has_adapters:
            adapters = self._adapters.part(size, num_segments=size)
            if adapters is None:
                return None

        def compute(cut: Cut) -> torch.Tensor:
            # A new batch each time: backends cache what they derive from a batch, and must derive it in here.
            token_ids, batch = self._rows.fixed(size)
            return self._logits[:size].copy_(self._forward(token_ids, batch, adapters))

        return Bucket(adapters, self._record(compute))


def bucket_sizes(max_rows: int) -> list[int]:
    """Rows of each graph, ascending: powers of two and, from 16 on, one more between; padding stays under half."""
    sizes = {max_rows}
    size = 1
    while size < max_rows:
        sizes.add(size)
        if size >= 16 and size * 3 // 2 < max_rows:
            sizes.add(size * 3 // 2)
        size *= 2
    return sorted(sizes)


@contextmanager
def _no_garbage_collected() -> Iterator[None]:
    """Prevents garbage collection from freeing graphs or pinned memory during a capture, which would break it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class CudaRecorder:
    """Records computations as CUDA graphs that share their memory: they never run at the same time.

    Every few seconds it logs how many there are.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._began_at, self.num_graphs = clock, clock(), 0
        self._logged_at = self._began_at
        self._pool = torch.cuda.graph_pool_handle()
        # One stream: torch keeps a workspace of cuBLAS, 32 MiB on Hopper, for each stream that has ever multiplied.
        self._stream = torch.cuda.Stream()

    @_no_garbage_collected()
    def __call__(self, compute: Compute) -> Recording:
        """`compute` is called to compile and to warm up, and once more to be recorded. A cut begins another graph."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            compute(lambda between: None)
        torch.cuda.current_stream().wait_stream(self._stream)
        graphs, betweens = [torch.cuda.CUDAGraph()], list[Between]()
        with ExitStack() as capture:
            capture.enter_context(self._capture(graphs[0]))

            def cut(between: Between) -> None:
                capture.close()
                betweens.append(between)
                graphs.append(torch.cuda.CUDAGraph())
                capture.enter_context(self._capture(graphs[-1]))

            output = compute(cut)
        self.num_graphs += len(graphs)
        if self._clock() - self._logged_at >= _INTERVAL_S:
            self._logged_at = self._clock()
            _log.info("recording steps: %s so far", self.summary())
        return _CudaRecording(tuple(graphs), tuple(betweens), output)

    def summary(self) -> str:
        return f"{self.num_graphs} graphs in {self._clock() - self._began_at:.1f} s"

    def _capture(self, graph: torch.cuda.CUDAGraph) -> torch.cuda.graph:
        # Other threads, such as the one that copies adapters, may use the GPU meanwhile.
        return torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local")


@dataclass(frozen=True)
class _CudaRecording:
    graphs: tuple[torch.cuda.CUDAGraph, ...]
    betweens: tuple[Between, ...]  # one less
    output: torch.Tensor

    def replay(self) -> torch.Tensor:
        for graph, between in zip(self.graphs, self.betweens, strict=False):
            graph.replay()
            between()
        self.graphs[-1].replay()
        return self.output
