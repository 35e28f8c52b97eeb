"""Which resource limits a gang that always has work: compute, memory or network (NanoFlow, arXiv 2408.12757 §3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from motet.workers.costs.devices import Device
from motet.workers.costs.operations import (
    Chunk,
    Formats,
    StepBatch,
    gang_weights_bytes,
    kv_bytes_of_a_token,
    step_operations,
)
from motet.workers.models.config import ModelConfig

Resource = Literal["compute", "memory", "network"]


@dataclass(frozen=True)
class Lengths:
    """Mean tokens of a load's prompts and answers."""

    prompt: int
    answer: int

    def __post_init__(self) -> None:
        if self.prompt < 1 or self.answer < 1:
            raise ValueError(f"{self}: prompts and answers have one token at least")


@dataclass(frozen=True)
class Balance:
    """A step's time by each resource, as if it alone limited the gang, and its rows."""

    compute_s: float
    memory_s: float
    network_s: float
    num_rows: int

    @property
    def limit(self) -> Resource:
        times: dict[Resource, float] = {
            "compute": self.compute_s,
            "memory": self.memory_s,
            "network": self.network_s,
        }
        return max(times, key=lambda resource: times[resource])


def step_balance(
    model: ModelConfig, batch: StepBatch, device: Device, degree: int = 1, formats: Formats | None = None
) -> Balance:
    """Sums over the operations of a step."""
    times = [operation.times_s(device, degree) for operation in step_operations(model, batch, degree, formats)]
    compute_s, memory_s, network_s = (sum(each) for each in zip(*times, strict=True)) if times else (0.0, 0.0, 0.0)
    return Balance(compute_s, memory_s, network_s, batch.num_rows)


def full_batch(
    model: ModelConfig, device: Device, lengths: Lengths, degree: int = 1, formats: Formats | None = None
) -> StepBatch:
    """A step of as many sequences as the gang's memory holds beside the weights, halfway through their answers.

    For each token that they decode it computes as many prompt tokens as the load has. Raises ValueError where no
    sequence fits.
    """
    formats = formats or Formats()
    context = lengths.prompt + -(-lengths.answer // 2)
    free = device.memory_bytes * degree - gang_weights_bytes(model, degree, formats.element_bytes)
    num_sequences = int(free / (context * kv_bytes_of_a_token(model, formats, degree)))
    if num_sequences < 1:
        raise ValueError(f"{degree} of {device.name} cannot hold the weights and a sequence of {context} tokens")
    num_prompts, rest = divmod(num_sequences * lengths.prompt // lengths.answer, lengths.prompt)
    chunks = (Chunk(0, lengths.prompt),) * num_prompts + ((Chunk(0, rest),) if rest else ())
    return StepBatch((context,) * num_sequences, chunks)


def memory_over_compute(device: Device, num_parameters: float, num_rows: int) -> float:
    """NanoFlow's T_R of a gang whose memory is full: reading all of it over the products of so many rows.

    `device`: with the memory, bandwidth and compute of the whole gang. Below 1 compute limits.
    """
    return (device.memory_bytes / device.bytes_per_s) / (2 * num_rows * num_parameters / device.flops_per_s)


def most_tokens_per_s(flops_per_s: float, num_parameters: float) -> float:
    """The optimum where compute limits, Compute / 2P: each token is two operations for each parameter."""
    return flops_per_s / (2 * num_parameters)
