"""Decode steps recorded as CUDA graphs: one launch in place of hundreds, for batches in which every row is a decode.

A graph has a fixed number of rows, a bucket; a smaller batch is padded with rows at position -1, which write nothing.
What a graph reads never moves: `DeviceRows`, into which the rows of a step are copied before a replay.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from ...kernels.attention import AttentionBatch
from ..models.step_adapters import StepAdapters
from .device_rows import DeviceInputs, DeviceRows

Forward = Callable[[torch.Tensor, AttentionBatch, StepAdapters | None], torch.Tensor]  # logits of all rows


class Reserved(Protocol):
    """`AdapterTables`, as far as graphs need them."""

    def reserve(self, num_rows: int) -> StepAdapters | None: ...

    def refill(self, reserved: StepAdapters, step: StepAdapters) -> bool: ...


class Recording(Protocol):
    def replay(self) -> torch.Tensor:
        """Computes what was recorded again, from what its inputs hold now. The output is always the same memory."""


Record = Callable[[Callable[[], torch.Tensor]], Recording]


@dataclass
class _Bucket:
    num_rows: int
    adapters: StepAdapters | None  # None: no row has an adapter
    recording: Recording
    filled_with: StepAdapters | None = None


class DecodeGraphs:
    """Recordings for a device, by number of rows, without and with adapters."""

    def __init__(
        self,
        forward: Forward,
        adapters: Reserved,
        rows: DeviceRows,
        vocab_size: int,
        device: torch.device,
        record: Record,
    ) -> None:
        """Records all of them. `record`: see `CudaRecorder`."""
        self._forward, self._adapters, self._record = forward, adapters, record
        self._rows, max_rows = rows, rows.tables.num_sequences
        # Of all recordings, of which each would keep its own: they never run at the same time.
        self._logits = torch.zeros((max_rows, vocab_size), dtype=torch.float32, device=device)
        # The largest first: the smaller ones then fit into its memory.
        sizes = sorted(bucket_sizes(max_rows), reverse=True)
        self._buckets = {
            (size, has_adapters): self._recorded(size, has_adapters) for size in sizes for has_adapters in (False, True)
        }
        self._sizes = sizes[::-1]

    def logits(self, inputs: DeviceInputs, adapters: StepAdapters | None) -> torch.Tensor | None:
        """`[num_rows, vocab]`, valid until the next call; None: this step is not one that was recorded."""
        if not inputs.is_decode:
            return None
        num_rows = len(inputs.sample_ids)
        size = next(size for size in self._sizes if size >= num_rows)
        bucket = self._buckets.get((size, adapters is not None))
        if bucket is None or not self._filled(bucket, adapters):
            return None
        self._rows.fill(inputs.rows, size)
        return bucket.recording.replay()[:num_rows]

    def _recorded(self, size: int, has_adapters: bool) -> _Bucket | None:
        adapters = None
        if has_adapters:
            adapters = self._adapters.reserve(size)
            if adapters is None:
                return None

        def compute() -> torch.Tensor:
            # A new batch each time: backends remember what they derived from a batch, and must derive it in here.
            token_ids, batch = self._rows.fixed(size)
            return self._logits[:size].copy_(self._forward(token_ids, batch, adapters))

        return _Bucket(size, adapters, self._record(compute))

    def _filled(self, bucket: _Bucket, adapters: StepAdapters | None) -> bool:
        if adapters is None or bucket.adapters is None or bucket.filled_with is adapters:
            return True
        bucket.filled_with = None
        if not self._adapters.refill(bucket.adapters, adapters):
            return False
        bucket.filled_with = adapters
        return True


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
    """Garbage in cycles may hold graphs or pinned memory, and to free these in the middle of a capture breaks it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class CudaRecorder:
    """Records computations as CUDA graphs that share their memory: they never run at the same time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        # One for all: torch keeps a workspace of cuBLAS, 32 MiB on Hopper, for each stream that has ever multiplied.
        self._stream = torch.cuda.Stream()

    @_no_garbage_collected()
    def __call__(self, compute: Callable[[], torch.Tensor]) -> Recording:
        """`compute` is called to compile and to warm up, and once more to be recorded."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            compute()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as the one that copies adapters, may use the GPU meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            output = compute()
        return _CudaRecording(graph, output)


@dataclass(frozen=True)
class _CudaRecording:
    graph: torch.cuda.CUDAGraph
    output: torch.Tensor

    def replay(self) -> torch.Tensor:
        self.graph.replay()
        return self.output
