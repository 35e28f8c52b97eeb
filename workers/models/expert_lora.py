"""Adapters in a mixture of experts: a pair of a row and an expert uses this expert's part of the row's adapter."""

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
    """The LoRA batch of a layer's pairs: neighbours that share an expert and an adapter are one segment."""

    batch: LoraBatch
    is_cut: bool  # True: workers share the features of each expert; False: each has the adapters of its experts whole

    def add_gate_up(self, x: torch.Tensor, y: torch.Tensor, layer: int, context: ForwardContext) -> None:
        """Adds the adapters' outputs to y, as `ColumnLinear` does.

        x `[num_pairs, hidden]`, y `[num_pairs, 2 * width]`.
        """
        lora = context.kernels.lora
        if not self.is_cut:
            return lora.add(y, x, context.pool, layer, self.batch, GATE_UP)
        shrunk = lora.shrink(x, context.pool, layer, self.batch, GATE_UP)
        gathered = context.parallel.all_gather(shrunk, ADAPTERS)
        lora.expand(y, gathered, context.pool, layer, self.batch, GATE_UP)

    def add_down(self, x: torch.Tensor, y: torch.Tensor, layer: int, context: ForwardContext) -> None:
        """Adds this worker's part of the adapters' outputs to its partial sum y, as `RowLinear` does.

        x `[num_pairs, width]`, y `[num_pairs, hidden]`.
        """
        lora, parallel = context.kernels.lora, context.parallel
        if not self.is_cut:
            return lora.add(y, x, context.pool, layer, self.batch, DOWN)
        shrunk = parallel.all_reduce(lora.shrink(x, context.pool, layer, self.batch, DOWN), ADAPTERS)
        width = y.shape[1] // parallel.degree
        own = y[:, parallel.rank * width : (parallel.rank + 1) * width]
        lora.expand(own, shrunk.unsqueeze(0), context.pool, layer, self.batch, DOWN)


def expert_lora(groups: ExpertGroups, first: int, is_cut: bool, context: ForwardContext) -> ExpertLora | None:
    """The adapters of the pairs of this worker's experts, which begin at `first`; None: no pair has an adapter."""
    segments = [segment for segment in context.segments if segment.adapter.experts]
    if not segments or context.expert_geometry is None:
        return None
    rows, found = groups.rows.tolist(), []
    for expert, (start, end) in enumerate(pairwise(groups.offsets.tolist())):
        for segment in segments:  # the pairs of one expert are in the order of their rows, so they can be bisected
            low, high = (bisect_left(rows, row, start, end) for row in (segment.start, segment.end))
            if low < high:
                found.append(LoraSegment(low, high, segment.adapter.experts[first + expert]))
    if not found:
        return None
    return ExpertLora(context.kernels.lora.prepare(found, context.expert_geometry, groups.rows.device), is_cut)
