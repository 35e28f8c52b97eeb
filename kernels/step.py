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
from .expert_lora import ExpertLoraBatch
from .experts import Routing
from .lora import LoraBatch
from .norms import Activation, Ungated
from .output_vectors import OutputBatch
from .recurrence import LayerState, Rule, StateBatch

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
    is_centred: bool = False  # as in `norms.add_layer_norm`


@dataclass(frozen=True)
class Add:
    """to = (to + x) * scale."""

    x: Register
    to: Register
    scale: float = 1.0


@dataclass(frozen=True)
class Norm:
    """x = rms_norm of x, in place, for `count` neighbours of as many columns as the weight has, from `column` on."""

    x: Register
    column: int
    count: int
    weight: torch.Tensor
    eps: float
    is_centred: bool = False  # as in `norms.add_layer_norm`


@dataclass(frozen=True)
class Linear:
    """to = x weightᵀ + bias."""

    x: Register
    to: Register
    weight: Any  # as the kernels' `pack_linear` laid it out, or their `quantised.pack`
    bias: torch.Tensor | None


@dataclass(frozen=True)
class AddLora:
    """to += the rows' adapters of x. See `LoraKernels.add`."""

    x: Register
    to: Register
    layer: int
    modules: tuple[int, ...]


@dataclass(frozen=True)
class AddNarrowLora:
    """to += the first columns of the rows' adapters of x, which fill `padded`; nothing without such adapters."""

    x: Register
    to: Register
    padded: Register
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
    """to = the rotated q; k and v go into the pages of their rows. x has q, k and v side by side, its last columns."""

    x: Register
    to: Register
    heads: Heads
    rotary: torch.Tensor
    kv: LayerKV
    column: int = 0  # where q begins in a row of x


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
    sinks: torch.Tensor | None = None


@dataclass(frozen=True)
class Gated:
    """to = activation(gate) * up of x, gate first."""

    x: Register
    to: Register
    activation: Activation
    per_row: int = 1  # rows of x, side by side, in a row of the registers


@dataclass(frozen=True)
class ChooseExperts:
    """Pairs of each row and its experts, by their scores x; see `experts.choose_experts`.

    They are there until the next choice. Where a register has pairs, a row of it has as many as a row of the step.
    """

    x: Register
    routing: Routing
    bias: torch.Tensor | None = None  # [num_experts] float32
    factors: torch.Tensor | None = None  # likewise, of the experts' weights


@dataclass(frozen=True)
class TakePairs:
    """to = the row of x of each pair. With `is_scaled` it is times the pair's weight, which is 1 then."""

    x: Register
    to: Register
    is_scaled: bool = False


@dataclass(frozen=True)
class ExpertLinear:
    """to = each pair's x times its expert's weight, transposed, and its bias."""

    x: Register
    to: Register
    weight: Any  # as the kernels' `pack_experts` laid it out, or their `quantised.pack_experts`
    bias: torch.Tensor | None = None  # [num_experts, width of `to`]


@dataclass(frozen=True)
class AddExpertLora:
    """to += the pairs' adapters of x, of the modules of their experts."""

    x: Register
    to: Register
    layer: int
    modules: tuple[int, ...]  # neighbours among those of an expert
    num_modules: int  # of an expert in all
    num_in: int  # elements of a row of A
    num_out: int  # elements of a row of B of each of these modules


@dataclass(frozen=True)
class CombinePairs:
    """to = the weighted sum of each row's pairs of x."""

    x: Register
    to: Register


@dataclass(frozen=True)
class AddGated:
    """to += sigmoid(gate) * x."""

    x: Register
    gate: Register  # of one column
    to: Register


@dataclass(frozen=True)
class JoinEmbedding:
    """to = x and, side by side with it, beside + table[tokens] * scale."""

    x: Register
    beside: Register
    to: Register
    table: torch.Tensor  # [vocab, width of `beside`]
    scale: float


@dataclass(frozen=True)
class MultiplyGate:
    """to = x * sigmoid(gate). See `norms.multiply_gate`."""

    x: Register
    gate: Register
    to: Register  # may be x
    column: int = 0  # where gates begin in a row of their register


@dataclass(frozen=True)
class Affine:
    """x = x * weight + bias, in place, of as many columns as these have, from `column` on. See `norms.affine`."""

    x: Register
    column: int
    weight: torch.Tensor | None
    bias: torch.Tensor | None = None


@dataclass(frozen=True)
class Activate:
    """to = activation(x). See `norms.activate`."""

    x: Register
    to: Register  # may be x
    activation: Ungated


@dataclass(frozen=True)
class Recur:
    """to = what a rule makes of x; states go on in their pages. See `recurrence.RecurrentKernel`."""

    x: Register
    to: Register
    rule: Rule
    state: LayerState


Operation = (
    Embed
    | AddNorm
    | Add
    | Norm
    | Linear
    | AddLora
    | AddNarrowLora
    | WriteKV
    | Attend
    | Gated
    | ChooseExperts
    | TakePairs
    | ExpertLinear
    | AddExpertLora
    | CombinePairs
    | AddGated
    | JoinEmbedding
    | MultiplyGate
    | Affine
    | Activate
    | Recur
)


@dataclass(frozen=True)
class Program:
    widths: tuple[int, ...]  # by register
    operations: tuple[Operation, ...]
    output: Register


class Step(Protocol):
    """A program that is ready to run."""

    def run(
        self,
        token_ids: torch.Tensor,
        attention: AttentionBatch,
        lora: LoraBatch | None,
        expert_lora: ExpertLoraBatch | None = None,
        states: StateBatch | None = None,
        outputs: OutputBatch | None = None,
        embedded: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The output of all rows, `[num_rows, width]`, which the next run overwrites.

        `states`: of layers that have states; None: no layer has. `outputs`: None: no adapter scales or shifts outputs.
        `embedded`: the tokens' rows `[num_rows, width]` in place of those of each `Embed`'s table; None: those.
        """


class StepKernels(Protocol):
    def why_not(self, heads: Sequence[Heads]) -> str | None:
        """Why no program can have layers with such heads; None: it can."""

    def prepare(self, program: Program, pool: torch.Tensor) -> Step:
        """`pool`: what adapters, KV and states are in; tensors of the program must stay where they are."""
