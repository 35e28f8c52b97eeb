"""The contract of a step as one program, for the kernels of backends that carry out all of it in one call.

A program is a list of operations over registers. A register is a tensor `[rows of the step, its width]` of the kernels'
dtype that stays where it is from step to step and grows with the largest one. What an operation computes is what the
kernel of the same name computes alone; those are the oracle that programs are tested against.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from .attention import AttentionBatch, LayerKV
from .lora import LoraBatch

Register = int  # index in `Program.widths`


@dataclass(frozen=True)
class Embed:
    """to = table[tokens] * scale."""

    to: Register
    table: torch.Tensor  # [vocab, width]
    scale: float


@dataclass(frozen=True)
class AddNorm:
    """residual += x, if there is one; to = rms_norm of that, or of x. See `norms.add_rms_norm`."""

    x: Register
    residual: Register | None
    to: Register
    weight: torch.Tensor
    eps: float


@dataclass(frozen=True)
class Norm:
    """x = rms_norm of x, in place, for `count` neighbours of as many columns as the weight has, from `column` on."""

    x: Register
    column: int
    count: int
    weight: torch.Tensor
    eps: float


@dataclass(frozen=True)
class Linear:
    """to = x weightᵀ + bias."""

    x: Register
    to: Register
    weight: Any  # as the kernels' `pack_linear` laid it out
    bias: torch.Tensor | None


@dataclass(frozen=True)
class AddLora:
    """to += the rows' adapters of x. See `LoraKernels.add`."""

    x: Register
    to: Register
    layer: int
    modules: tuple[int, ...]


@dataclass(frozen=True)
class Heads:
    """How many heads of which size a layer has."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class WriteKV:
    """to = the rotated q; k and v go into the pages of their rows. x has q, k and v side by side."""

    x: Register
    to: Register
    heads: Heads
    rotary: torch.Tensor
    kv: LayerKV


@dataclass(frozen=True)
class Attend:
    """to = attention of x, which is the rotated q. See `attention.PagedAttention`."""

    x: Register
    to: Register
    heads: Heads
    kv: LayerKV
    scale: float
    window: int | None
    softcap: float | None


@dataclass(frozen=True)
class Gated:
    """to = activation(gate) * up of x, gate first."""

    x: Register
    to: Register
    activation: str  # "silu" or "gelu_pytorch_tanh"


Operation = Embed | AddNorm | Norm | Linear | AddLora | WriteKV | Attend | Gated


@dataclass(frozen=True)
class Program:
    widths: tuple[int, ...]  # by register
    operations: tuple[Operation, ...]
    output: Register


class Step(Protocol):
    """A program that is ready to run."""

    def run(self, token_ids: torch.Tensor, attention: AttentionBatch, lora: LoraBatch | None) -> torch.Tensor:
        """The output of all rows, `[num_rows, width]`, which the next run overwrites."""


class StepKernels(Protocol):
    def why_not(self, heads: Sequence[Heads]) -> str | None:
        """Why no program can have layers with such heads; None: it can."""

    def prepare(self, program: Program, pool: torch.Tensor) -> Step:
        """`pool`: what adapters and KV are in; tensors of the program must stay where they are."""
