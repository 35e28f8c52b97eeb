"""The contract of norms and gated activations, and their plain twin.

Tensors are float32 or bfloat16, on any device. What is computed in float32 is said below; every other product and sum
is rounded to the tensors' dtype. Sources: RMSNorm (arXiv 1910.07467), gated activations (arXiv 2002.05202).

Importing this needs no torch: routers and launchers read which activations there are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x over its root mean square along the last dimension, times weight: of x's shape and dtype.

    x `[..., width]`, weight `[width]`. The quotient is computed in float32 and rounded to the weight's dtype before it
    is multiplied, so that a weight in float32 (Gemma's) loses nothing. `eps` is added to the mean square.
    """
    return scale_to_unit(x, x.float().square().mean(-1, keepdim=True), weight, eps)


def scale_to_unit(x: torch.Tensor, mean_square: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`rms_norm` of x, which may be some columns of what is normed: `mean_square` `[..., 1]` float32 is of all."""
    normed = x.float() * (mean_square + eps).rsqrt()
    return (weight * normed.to(weight.dtype)).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rms_norm` of x + residual, and x + residual itself, each `[num_rows, hidden]`. No residual counts as zero."""
    total = x if residual is None else x + residual
    return rms_norm(total, weight, eps), total


def add_layer_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same with a layer norm (arXiv 1607.06450) without bias: the row's mean is subtracted before it is scaled."""
    total = x if residual is None else x + residual
    wide = total.float()
    centred = wide - wide.mean(-1, keepdim=True)
    normed = centred * (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (weight * normed.to(weight.dtype)).to(x.dtype), total


def affine(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    """x * weight + bias in float32, of x's shape and dtype. Both are `[width]` float32; None: 1, or 0."""
    wide = x.float() if weight is None else x.float() * weight
    return (wide if bias is None else wide + bias).to(x.dtype)


def _silu(x: torch.Tensor) -> torch.Tensor:
    from torch.nn.functional import silu

    return silu(x)


def _gelu_pytorch_tanh(x: torch.Tensor) -> torch.Tensor:
    from torch.nn.functional import gelu

    return gelu(x, approximate="tanh")


# All activations that motet computes, by their names in config.json. `cpp/rows.h` and `activated` in
# `gpu/rows_device.py` compute each by the same name.
ACTIVATIONS: Final[Mapping[str, Callable[[torch.Tensor], torch.Tensor]]] = MappingProxyType(
    {"silu": _silu, "gelu_pytorch_tanh": _gelu_pytorch_tanh}
)


@dataclass(frozen=True)
class ClampedSwiglu:
    """gate * sigmoid(alpha * gate) * (up + 1), of gate up to `limit` and up from -limit to `limit` (gpt-oss)."""

    alpha: float
    limit: float


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    """relu(x)² (Primer, arXiv 2109.08668)."""
    return x.relu().square_()


def xielu(x: torch.Tensor, positive: float, negative: float, slope: float, limit: float) -> torch.Tensor:
    """xIELU (arXiv 2411.13010), in float32: a parabola above 0, and below it an exponential of x up to `limit`."""
    import torch

    wide = x.float()
    above, below = positive * wide * wide, (wide.clamp(max=limit).expm1() - wide) * negative
    return (torch.where(wide > 0, above, below) + slope * wide).to(x.dtype)


XIELU: Final = "xielu"  # layers have parameters of their own for it
# Those of MLPs without a gate, by their names in config.json. `activate` of `cpp/rows.h` has them in this order.
UNGATED: Final[Mapping[str, Callable[..., torch.Tensor]]] = MappingProxyType(
    {"relu2": squared_relu, **ACTIVATIONS, XIELU: xielu}
)


@dataclass(frozen=True)
class Ungated:
    """activation(up): an entry of `UNGATED`, of MLPs without a gate. `parameters`: its arguments behind x."""

    name: str
    parameters: tuple[float, ...] = ()


Activation = str | ClampedSwiglu | Ungated  # a name in `ACTIVATIONS`, one that changes `up` too, or one without a gate


def activate(x: torch.Tensor, activation: Ungated) -> torch.Tensor:
    """activation(x), of x's shape and dtype."""
    return UNGATED[activation.name](x, *activation.parameters)


def gated(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """activation(gate) * up of `[num_rows, 2 * width]`, gate first: `[num_rows, width]`."""
    assert not isinstance(activation, Ungated), "an activation of gates"
    gate, up = gate_up.chunk(2, dim=-1)
    if isinstance(activation, ClampedSwiglu):
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
        return gate * (activation.alpha * gate).sigmoid() * (up + 1)
    return ACTIVATIONS[activation](gate) * up


def multiply_gate(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(gate), of one shape: a gate on the output of attention, as in Qwen3-Next."""
    return x * gate.sigmoid()
