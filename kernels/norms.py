"""The contract of norms and gated activations, and their plain twin.

Tensors are float32 or bfloat16, on any device. What is computed in float32 is said below; every other product and sum
is rounded to the tensors' dtype. Sources: RMSNorm (arXiv 1910.07467), gated activations (arXiv 2002.05202).
"""

from __future__ import annotations

import torch
from torch.nn.functional import gelu, silu


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x over its root mean square along the last dimension, times weight: of x's shape and dtype.

    x `[..., width]`, weight `[width]`. The quotient is computed in float32 and rounded to the weight's dtype before it
    is multiplied, so that a weight in float32 (Gemma's) loses nothing. `eps` is added to the mean square.
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (weight * normed.to(weight.dtype)).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rms_norm` of x + residual, and x + residual itself, each `[num_rows, hidden]`. No residual counts as zero."""
    total = x if residual is None else x + residual
    return rms_norm(total, weight, eps), total


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of `[num_rows, 2 * width]`, gate first: `[num_rows, width]`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate) * up


def gelu_tanh_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gelu(gate) * up of `[num_rows, 2 * width]`, gate first, gelu by its tanh approximation: `[num_rows, width]`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gelu(gate, approximate="tanh") * up
