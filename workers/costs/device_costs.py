"""What plans take on a device of the catalogue: the limits of its data sheet, and one efficiency."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from ...adapters.adapter import lora_ranks
from ..models.config import ModelConfig
from ..plan import StepPlan
from .devices import Device
from .operations import Chunk, StepBatch, step_operations


@dataclass(frozen=True)
class DeviceCosts:
    """Costs of a gang of `degree` devices. Adapters and KV are copied at `host_bytes_per_s`, from any tier."""

    model: ModelConfig
    device: Device
    degree: int
    efficiency: float
    host_bytes_per_s: float
    page_bytes: int  # of a worker

    def step_s(self, plan: StepPlan) -> float:
        decodes, chunks = list[int](), list[Chunk]()
        for part in plan.sequences:
            if len(part.token_ids) == 1:
                decodes.append(part.start + 1)
            else:
                chunks.append(Chunk(part.start, len(part.token_ids)))
        ranks = [fmean(lora_ranks(residence.module_ranks) or [1]) for residence in plan.adapters]
        batch = StepBatch(tuple(decodes), tuple(chunks), len(ranks), fmean(ranks) if ranks else 1)
        operations = step_operations(self.model, batch, self.degree)
        return sum([operation.seconds(self.device, self.degree) for operation in operations]) / self.efficiency

    def load_s(self, num_pages: int, *, from_store: bool) -> float:
        return self.move_s(num_pages)

    def move_s(self, num_pages: int) -> float:
        return num_pages * self.page_bytes / self.host_bytes_per_s
