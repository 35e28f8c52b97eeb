"""Steps with prompts recorded as CUDA graphs, one from each layer's attention to the next.

What attention launches depends on how long prompts and contexts are: it is launched in each step, between the graphs.
All else depends on the number of rows alone, and is recorded for some of these. Rows that a step does not fill are
padding, as in `graphs.py`: nothing is written for them, and their results are not read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ...kernels.attention import AttentionBatch, LayerKV, PagedAttention
from ..models.step_adapters import StepAdapters
from .device_rows import MOST_ROWS, DeviceInputs, DeviceRows
from .graphs import Bucket, Cut, Record
from .recorded_adapters import RecordedAdapters

_ROWS_APART = 64  # between two buckets: so padding costs little even where products are bound by computing

# The last layer's states of all rows, with this attention in place of the kernels' own.
Forward = Callable[[torch.Tensor, AttentionBatch, StepAdapters | None, PagedAttention], torch.Tensor]


@dataclass(frozen=True)
class Widths:
    """Widths of the tensors between two graphs."""

    num_heads: int  # of this worker
    head_dim: int
    hidden: int


class MixedGraphs:
    """Recordings for a device, by number of rows, without and with adapters."""

    def __init__(
        self,
        forward: Forward,
        attend: PagedAttention,
        widths: Widths,
        dtype: torch.dtype,
        adapters: RecordedAdapters,
        rows: DeviceRows,
        max_rows: int,
        record: Record,
    ) -> None:
        """Records all of them. `max_rows`: of a step; `record`: see `CudaRecorder`."""
        self._forward, self._attend, self._adapters, self._record = forward, attend, adapters, record
        self._rows = rows
        self._batch: AttentionBatch | None = None  # of the step under way
        sizes = mixed_sizes(max_rows)
        heads, device = (sizes[-1], widths.num_heads, widths.head_dim), rows.tables.pages.device
        # Buffers between graphs and attention, shared by all recordings, which never run at the same time. Padding of
        # `_attended` is zero, or has rows of an earlier, larger step.
        self._queries = torch.zeros(heads, dtype=dtype, device=device)
        self._attended = torch.zeros(heads, dtype=dtype, device=device)
        self._hidden = torch.zeros((sizes[-1], widths.hidden), dtype=dtype, device=device)
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
        self._batch = inputs.attention
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
            ) -> torch.Tensor:
                self._queries[:size].copy_(q)
                cut(lambda: self._attend_rows(kv, scale, window, softcap))
                return self._attended[:size]

            return self._hidden[:size].copy_(self._forward(token_ids, batch, adapters, attend))

        return Bucket(adapters, self._record(compute))

    def _attend_rows(self, kv: LayerKV, scale: float, window: int | None, softcap: float | None) -> None:
        """Attention of the step under way."""
        assert self._batch is not None, "what is recorded is replayed for a step"
        num_rows = len(self._batch.positions)
        attended = self._attend(self._queries[:num_rows], kv, self._batch, scale, window, softcap)
        self._attended[:num_rows].copy_(attended)


def mixed_sizes(max_rows: int) -> list[int]:
    """Rows of each recording, ascending."""
    most = min(max_rows, MOST_ROWS)
    return [*range(_ROWS_APART, most, _ROWS_APART), most]
