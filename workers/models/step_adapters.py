"""A step's adapters as the kernels need them: for the modules that all rows go through, and for experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...adapters.adapter import ABSORBED, EXPERT_MODULES, HEAD, NARROW_MODULES
from ...adapters.packing.layout import AdapterLayout
from ...kernels.backend import Kernels
from ...kernels.expert_lora import ExpertLoraBatch
from ...kernels.latent_lora import LatentLoraBatch
from ...kernels.lora import LoraBatch, LoraGeometry, LoraSegment
from ...kernels.model_ends import EndGeometry, ModelEnds, StepEnds
from ...kernels.output_vectors import OutputBatch

RECORDED_RANK = 256  # the highest for which graphs reserve room: steps with higher ones are not recorded


@dataclass(frozen=True)
class StepAdapters:
    """At least one row has an adapter."""

    lora: LoraBatch
    experts: ExpertLoraBatch | None  # None: no adapter has parts for experts
    has_narrow: bool = False  # an adapter has LoRA of NARROW_MODULES
    latent: LatentLoraBatch | None = None  # None: no adapter has LoRA of what latent attention absorbs
    outputs: OutputBatch | None = None  # None: no adapter scales or shifts outputs
    ends: StepEnds | None = None  # None: no adapter changes the embedding or the head


class AdapterTables:
    """Makes the adapter tables of steps on one worker's device, and reserves those that graphs read."""

    def __init__(self, kernels: Kernels, layout: AdapterLayout, num_pages: int, device: torch.device) -> None:
        """`num_pages`: of adapters in a recorded step, at most."""
        self._kernels, self._device, self._num_pages = kernels, device, num_pages
        widths = {module: layout.part(module).widths for module in layout.shape.modules}

        def of(modules: Sequence[str]) -> LoraGeometry:
            sides = tuple(widths.get(module, (0, 0)) for module in modules)
            return LoraGeometry(layout.shape.num_layers, layout.slab, layout.tile, sides)

        self._narrow = [place for place, entry in enumerate(layout.shape.dense_modules) if entry in NARROW_MODULES]
        self._absorbed = None
        if ABSORBED in layout.shape.modules:
            self._absorbed = layout.shape.dense_modules.index(ABSORBED)
        self._geometry, self._experts = of(layout.shape.dense_modules), layout.shape.experts
        self._expert_geometry = of(EXPERT_MODULES) if self._experts is not None else None
        self.ends: ModelEnds | None = None  # None: adapters of this base cannot change them
        if (ends := layout.shape.ends) is not None:
            padded = ends.vocab_size + layout.shape.padding(HEAD)
            geometry = EndGeometry(ends.vocab_size, padded, ends.hidden_size, layout.page_elements)
            self.ends = ModelEnds(kernels.ends, kernels.lora, geometry)

    @property
    def can_be_recorded(self) -> bool:
        """Whether graphs can record steps with adapters of this base."""
        kernels = self._kernels
        has_experts = self._expert_geometry is not None
        return kernels.capturable_lora is not None and not (has_experts and kernels.capturable_expert_lora is None)

    def prepare(self, segments: Sequence[LoraSegment]) -> StepAdapters | None:
        """None: no row has an adapter."""
        if not segments:
            return None
        experts = None
        if self._expert_geometry is not None:
            experts = self._kernels.expert_lora.prepare(segments, self._expert_geometry, self._device)
        has_narrow = any(segment.adapter.modules[place].rank for segment in segments for place in self._narrow)
        lora = self._kernels.lora.prepare(segments, self._geometry, self._device)
        latent = None
        if self._absorbed is not None:
            latent = LatentLoraBatch.make(segments, self._geometry, self._absorbed, self._device)
        outputs = self._kernels.outputs.prepare(segments, self._geometry, self._device)
        ends = None if self.ends is None else self.ends.prepare(segments)
        return StepAdapters(lora, experts, has_narrow, latent, outputs, ends)

    def reserve(self, num_rows: int, num_segments: int) -> StepAdapters | None:
        """Tables for the adapters of `num_rows` and `num_segments`; None: graphs cannot have adapters of this base."""
        lora, expert_lora = self._kernels.capturable_lora, self._kernels.capturable_expert_lora
        assert lora is not None, "only what can be recorded"
        dense = lora.reserve(num_rows, num_segments, self._num_pages, RECORDED_RANK, self._geometry, self._device)
        experts = None
        if self._expert_geometry is not None and self._experts is not None and expert_lora is not None:
            experts = expert_lora.reserve(
                num_rows,
                num_segments,
                self._num_pages,
                RECORDED_RANK,
                self._experts.num_experts,
                self._expert_geometry,
                self._device,
            )
            if experts is None:
                return None
        return None if dense is None else StepAdapters(dense, experts)

    def part(self, reserved: StepAdapters, num_rows: int, num_segments: int) -> StepAdapters:
        """`reserved`, in the same memory, as if it had been reserved for these fewer rows and segments."""
        lora, expert_lora = self._kernels.capturable_lora, self._kernels.capturable_expert_lora
        assert lora is not None, "only what can be recorded"
        dense, experts = lora.part(reserved.lora, num_rows, num_segments), reserved.experts
        if expert_lora is not None and experts is not None:
            experts = expert_lora.part(experts, num_rows, num_segments)
        return StepAdapters(dense, experts)

    def refill(self, reserved: StepAdapters, step: StepAdapters) -> bool:
        """Copies a step's adapters into `reserved`. False: they do not fit, and `reserved` is undefined.

        LoRA of routers and gates is not recorded, since steps without it would launch its kernels, too; nor is what
        scales and shifts outputs, or changes the embedding or the head.
        """
        if step.has_narrow or step.outputs is not None or step.ends is not None:
            return False
        lora, expert_lora = self._kernels.capturable_lora, self._kernels.capturable_expert_lora
        assert lora is not None, "only what can be recorded"
        if expert_lora is None or reserved.experts is None:
            return lora.refill(reserved.lora, step.lora)
        return expert_lora.refill(reserved.experts, step.experts) and lora.refill(reserved.lora, step.lora)
