"""Adapters of experts, brought together on the host: for CPUs, and the twin of those that are not."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from ..experts import ExpertGroups
from ..lora import LoraBatch, LoraGeometry, LoraKernels, LoraSegment


@dataclass(frozen=True)
class HostExpertLoraBatch:
    segments: tuple[LoraSegment, ...]  # whose adapters have parts for experts
    geometry: LoraGeometry


class HostExpertLora:
    """`expert_lora.ExpertLoraKernels` for any device; on a GPU each layer waits for the numbers of its pairs."""

    def __init__(self, lora: LoraKernels) -> None:
        """`lora` prepares the batches and computes them."""
        self._lora = lora

    def prepare(
        self, segments: Sequence[LoraSegment], geometry: LoraGeometry, device: torch.device
    ) -> HostExpertLoraBatch | None:
        expert_segments = tuple(segment for segment in segments if segment.adapter.experts)
        return HostExpertLoraBatch(expert_segments, geometry) if expert_segments else None

    def of_pairs(self, batch: HostExpertLoraBatch, groups: ExpertGroups, first: int) -> LoraBatch | None:
        """Neighbours that share an expert and an adapter are one segment."""
        rows, segments = groups.rows.tolist(), []
        for expert, (start, end) in enumerate(pairwise(groups.offsets.tolist())):
            for (
                segment
            ) in batch.segments:  # the pairs of one expert are in the order of their rows: they can be bisected
                low, high = (bisect_left(rows, row, start, end) for row in (segment.start, segment.end))
                if low < high:
                    segments.append(LoraSegment(low, high, segment.adapter.experts[first + expert]))
        return self._lora.prepare(segments, batch.geometry, groups.rows.device) if segments else None
