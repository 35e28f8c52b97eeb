"""Adapters inside a mixture of experts: to a pair of a row and an expert belongs the row's adapter's part for it."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise

import torch

from ...kernels.experts import ExpertGroups
from ...kernels.lora import LoraBatch, LoraSegment
from .context import ForwardContext
from .layers import ADAPTERS

GATE_UP, DOWN = (0, 1), (2,)  # indices in EXPERT_MODULES


@dataclass(frozen=True)
class ExpertLora:
    """A layer's pairs as the LoRA kernels see them: neighbours that share an expert and an adapter are one segment."""

    batch: LoraBatch
    is_cut: bool  # workers share the features of each expert; else each has its experts' adapters whole

    def add_gate_up(self, x: torch.Tensor, y: torch.Tensor, layer: int, context: ForwardContext) -> None:
        """As in `ColumnLinear`. x `[num_pairs, hidden]`, y `[num_pairs, 2 * features]`."""
        lora = context.kernels.lora
        if not self.is_cut:
            return lora.add(y, x, context.pool, layer, self.batch, GATE_UP)
        shrunk = lora.shrink(x, context.pool, layer, self.batch, GATE_UP)
        gathered = context.parallel.all_gather(shrunk, ADAPTERS)
        lora.expand(y, gathered, context.pool, layer, self.batch, GATE_UP)

    def add_down(self, x: torch.Tensor, y: torch.Tensor, layer: int, context: ForwardContext) -> None:
        """As in `RowLinear`. x `[num_pairs, features]`, y `[num_pairs, hidden]`, a partial sum."""
        lora, parallel = context.kernels.lora, context.parallel
        if not self.is_cut:
            return lora.add(y, x, context.pool, layer, self.batch, DOWN)
        shrunk = parallel.all_reduce(lora.shrink(x, context.pool, layer, self.batch, DOWN), ADAPTERS)
        width = y.shape[1] // parallel.degree
        own = y[:, parallel.rank * width : (parallel.rank + 1) * width]
        lora.expand(own, shrunk.unsqueeze(0), context.pool, layer, self.batch, DOWN)


def expert_lora(groups: ExpertGroups, first: int, is_cut: bool, context: ForwardContext) -> ExpertLora | None:
    """What the pairs of this worker's experts, `first` and following, need; None: none has an adapter."""
    segments = [segment for segment in context.segments if segment.adapter.experts]
    if not segments or context.expert_geometry is None:
        return None
    rows, found = groups.rows.tolist(), []
    for expert, (start, end) in enumerate(pairwise(groups.offsets.tolist())):
        for segment in segments:  # the rows of one expert's pairs rise
            low, high = (bisect_left(rows, row, start, end) for row in (segment.start, segment.end))
            if low < high:
                found.append(LoraSegment(low, high, segment.adapter.experts[first + expert]))
    if not found:
        return None
    return ExpertLora(context.kernels.lora.prepare(found, context.expert_geometry, groups.rows.device), is_cut)
