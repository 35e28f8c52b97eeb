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

from ...kernels.attention import AttentionBatch, LayerKV, PagedAttention
from ...kernels.recurrence import LayerState, RecurrentKernel, Rule, StateBatch
from ..models.step_adapters import StepAdapters
from .device_rows import MOST_ROWS, DeviceInputs, DeviceRows

# The adapters' tables that recorded steps read, shared by all recordings, which never run at the same time.


class Reserved(Protocol):
    """The part of `AdapterTables` that recordings need."""

    def reserve(self, num_rows: int, num_segments: int) -> StepAdapters | None: ...

    def part(self, reserved: StepAdapters, num_rows: int, num_segments: int) -> StepAdapters: ...

    def refill(self, reserved: StepAdapters, step: StepAdapters) -> bool: ...


class RecordedAdapters:
    """Room for the adapters of the largest recorded step, of which each recording reads as much as its own rows need.

    Tables name every page that an adapter may lie in: a room for each recording would take a good part of a GPU.
    """

    def __init__(self, tables: Reserved, max_rows: int, max_segments: int) -> None:
        self._tables = tables
        self._room = tables.reserve(max_rows, max_segments)
        self._content: tuple[StepAdapters, StepAdapters] | None = None  # a part, and the step whose adapters it holds

    def part(self, num_rows: int, num_segments: int) -> StepAdapters | None:
        """The tables for a recording of this size; None: recordings cannot hold adapters of this base."""
        return None if self._room is None else self._tables.part(self._room, num_rows, num_segments)

    def hold(self, part: StepAdapters, step: StepAdapters) -> bool:
        """Copies a step's adapters into a part, valid until the next call. False: they do not fit."""
        # Beyond a smaller part may be data of an earlier step, so another part with the same adapters is refilled.
        if self._content is None or self._content[0] is not part or self._content[1] is not step:
            self._content = (part, step) if self._tables.refill(part, step) else None
        return self._content is not None


_log = logging.getLogger(__name__)
_INTERVAL_S = 5.0  # between two lines of the log
# Logits of all rows.
Forward = Callable[[torch.Tensor, AttentionBatch, StepAdapters | None, StateBatch | None], torch.Tensor]


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
        if inputs.states is not None:
            self._rows.fill_states(inputs.states, size)
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
            states = self._rows.fixed_states(size)
            return self._logits[:size].copy_(self._forward(token_ids, batch, adapters, states))

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


# Steps with prompts recorded as CUDA graphs, one from each layer's attention or recurrence to the next.
#
# What these launch depends on how long prompts and contexts are: they are launched in each step, between the
# graphs. All else depends on the number of rows alone, and is recorded for some of these. Rows that a step does not
# fill are padding: nothing is written for them, and their results are not read.

_ROWS_APART = 64  # between two buckets: so padding costs little even where products are bound by computing

# The last layer's states of all rows, with this attention and recurrence in place of the kernels' own.
MixedForward = Callable[
    [torch.Tensor, AttentionBatch, StepAdapters | None, PagedAttention, RecurrentKernel], torch.Tensor
]


@dataclass(frozen=True)
class Widths:
    """Widths of the tensors between two graphs."""

    num_heads: int  # of this worker
    head_dim: int
    hidden: int
    rule: tuple[int, int] = (0, 0)  # columns of what a recurrence gets and gives; a base has one shape of them


class MixedGraphs:
    """Recordings for a device, by number of rows, without and with adapters."""

    def __init__(
        self,
        forward: MixedForward,
        attend: PagedAttention,
        recur: RecurrentKernel,
        widths: Widths,
        dtype: torch.dtype,
        adapters: RecordedAdapters,
        rows: DeviceRows,
        max_rows: int,
        record: Record,
    ) -> None:
        """Records all of them. `max_rows`: of a step; `record`: see `CudaRecorder`."""
        self._forward, self._attend, self._recur = forward, attend, recur
        self._adapters, self._record, self._rows = adapters, record, rows
        self._batch: AttentionBatch | None = None  # of the step under way
        self._states: StateBatch | None = None  # likewise
        sizes = mixed_sizes(max_rows)
        heads, device = (sizes[-1], widths.num_heads, widths.head_dim), rows.tables.pages.device
        # Buffers between graphs and what is launched, shared by all recordings, which never run at the same time.
        # Padding of `_attended` and `_mixed` is zero, or has rows of an earlier, larger step.
        self._queries = torch.zeros(heads, dtype=dtype, device=device)
        self._attended = torch.zeros(heads, dtype=dtype, device=device)
        self._columns, self._mixed, self._hidden = (
            torch.zeros((sizes[-1], width), dtype=dtype, device=device) for width in (*widths.rule, widths.hidden)
        )
        # The largest first, so that the smaller ones fit into its memory.
        self._buckets = {
            (size, has_adapters): self._recorded(size, has_adapters)
            for size in reversed(sizes)
            for has_adapters in (False, True)
        }
        self._sizes = sizes

    def hidden_states(self, inputs: DeviceInputs, adapters: StepAdapters | None) -> torch.Tensor | None:
        """`[num_rows, hidden]`, valid until the next call; None: the rows or their adapters do not fit."""
        num_rows = inputs.rows.shape[1]
        size = next((size for size in self._sizes if size >= num_rows), None)
        bucket = None if size is None else self._buckets[size, adapters is not None]
        if size is None or bucket is None or not bucket.fill(adapters, self._adapters):
            return None
        self._rows.fill(inputs.rows, size)
        self._batch, self._states = inputs.attention, inputs.states
        return bucket.recording.replay()[:num_rows]

    def _recorded(self, size: int, has_adapters: bool) -> Bucket | None:
        adapters = None
        if has_adapters:
            adapters = self._adapters.part(size, num_segments=min(size, self._rows.tables.num_sequences))
            if adapters is None:
                return None

        def compute(cut: Cut) -> torch.Tensor:
            token_ids, batch = self._rows.fixed(size)

            def attend(
                q: torch.Tensor,
                kv: LayerKV,
                batch: AttentionBatch,
                scale: float,
                window: int | None,
                softcap: float | None = None,
                sinks: torch.Tensor | None = None,
            ) -> torch.Tensor:
                self._queries[:size].copy_(q)
                cut(lambda: self._attend_rows(kv, scale, window, softcap, sinks))
                return self._attended[:size]

            def recur(
                x: torch.Tensor, rule: Rule, pool: torch.Tensor, state: LayerState, batch: StateBatch
            ) -> torch.Tensor:
                self._columns[:size].copy_(x)
                cut(lambda: self._recur_rows(rule, pool, state))
                return self._mixed[:size]

            return self._hidden[:size].copy_(self._forward(token_ids, batch, adapters, attend, recur))

        return Bucket(adapters, self._record(compute))

    def _attend_rows(
        self, kv: LayerKV, scale: float, window: int | None, softcap: float | None, sinks: torch.Tensor | None
    ) -> None:
        """Attention of the step under way."""
        assert self._batch is not None, "what is recorded is replayed for a step"
        num_rows = len(self._batch.positions)
        attended = self._attend(self._queries[:num_rows], kv, self._batch, scale, window, softcap, sinks)
        self._attended[:num_rows].copy_(attended)

    def _recur_rows(self, rule: Rule, pool: torch.Tensor, state: LayerState) -> None:
        """A layer with a recurrent state, of the step under way."""
        assert self._batch is not None and self._states is not None, "what is recorded is replayed for a step"
        num_rows = len(self._batch.positions)
        self._mixed[:num_rows].copy_(self._recur(self._columns[:num_rows], rule, pool, state, self._states))


def mixed_sizes(max_rows: int) -> list[int]:
    """Rows of each recording, ascending."""
    limit = min(max_rows, MOST_ROWS)
    return [*range(_ROWS_APART, limit, _ROWS_APART), limit]
