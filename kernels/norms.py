"""Norms and activations in plain torch: the twins that the fast kernels are compared with."""

from __future__ import annotations

import torch
from torch.nn.functional import gelu, silu


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x over its root mean square along the last dimension, times weight; computed in float32, in x's dtype.

    The normed x is rounded to the weight's dtype before the product: a weight in float32 (Gemma's) is multiplied
    exactly.
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (weight * normed.to(weight.dtype)).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of x + residual, and x + residual itself, each `[num_rows, hidden]`. No residual: of x."""
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
