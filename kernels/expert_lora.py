"""The contract of adapters in a mixture of experts, for the kernels of every backend.

A pair of a row and an expert uses this expert's part of the row's adapter (`PagedAdapter.experts`). Only a layer's
router says which pairs there are, so each layer has a LoRA batch of its own, made of what `prepare` knows of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from .experts import ExpertGroups
from .lora import LoraBatch, LoraGeometry, LoraSegment

ExpertLoraBatch = Any  # what `prepare` computes once for all layers of a step; opaque to the caller


class ExpertLoraKernels(Protocol):
    def prepare(
        self, segments: Sequence[LoraSegment], geometry: LoraGeometry, device: torch.device
    ) -> ExpertLoraBatch | None:
        """What all layers of a step share; None: no adapter has parts for experts.

        `segments` are the step's, as for `LoraKernels.prepare`; `geometry` is that of the experts' modules.
        """

    def of_pairs(self, batch: ExpertLoraBatch, groups: ExpertGroups, first: int) -> LoraBatch | None:
        """The LoRA batch of a layer, whose rows are the pairs in the order of `groups`; None: no pair has an adapter.

        `first`: see `ExpertKernels.group`.
        """


class CapturableExpertLora(ExpertLoraKernels, Protocol):
    """Adapters of experts that a CUDA graph can record: `of_pairs` does not ask the host which pairs there are."""

    def reserve(
        self,
        num_rows: int,
        num_segments: int,
        num_pages: int,
        ranks: int,
        num_experts: int,
        geometry: LoraGeometry,
        device: torch.device,
    ) -> ExpertLoraBatch | None:
        """A batch without adapters, with room for these numbers; None: the geometry does not allow it."""

    def part(self, reserved: ExpertLoraBatch, num_rows: int, num_segments: int) -> ExpertLoraBatch:
        """See `lora.CapturableLora.part`."""

    def refill(self, reserved: ExpertLoraBatch, batch: ExpertLoraBatch | None) -> bool:
        """Copies `batch` (None: no adapters) into `reserved`. False: it does not fit, and `reserved` is unchanged."""
