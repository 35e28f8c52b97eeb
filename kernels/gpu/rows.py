"""Norms, gated activations and rows of eight bits in Triton, the host side. The device side is `rows_device.py`."""

from __future__ import annotations

import torch

from ..float8 import FLOAT8
from ..norms import Activation, ClampedSwiglu
from .rows_device import gated_kernel, norm_kernel, quantise_kernel
from .tile_sizes import next_power_of_2

_PIECE = 1024  # the most columns that one program of a gated activation computes


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `norms.rms_norm`. x is `[num_rows, width]` or `[num_rows, num_heads, width]`."""
    return _norm(x, None, weight, eps)[0]


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `norms.add_rms_norm`."""
    normed, total = _norm(x, residual, weight, eps)
    return normed, x if total is None else total


def add_layer_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `norms.add_layer_norm`."""
    normed, total = _norm(x, residual, weight, eps, is_centred=True)
    return normed, x if total is None else total


def gated(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """See `norms.gated`."""
    gate_up = gate_up if gate_up.stride(1) == 1 else gate_up.contiguous()
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if num_rows:
        block = min(_PIECE, next_power_of_2(width))
        clamped = activation if isinstance(activation, ClampedSwiglu) else None
        gated_kernel[(num_rows, -(-width // block))](
            gate_up,
            out,
            gate_up.stride(0),
            WIDTH=width,
            BLOCK=block,
            ACTIVATION=activation if clamped is None else "clamped_swiglu",
            ALPHA=1.0 if clamped is None else clamped.alpha,
            LIMIT=1.0 if clamped is None else clamped.limit,
            num_warps=4,
        )
    return out


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `Float8Kernels.quantise`."""
    x = x if x.stride(1) == 1 else x.contiguous()
    num_rows, width = x.shape
    values = torch.empty((num_rows, width), dtype=FLOAT8, device=x.device)
    scales = torch.empty((num_rows, 1), dtype=torch.float32, device=x.device)
    if num_rows:
        block = next_power_of_2(width)
        quantise_kernel[(num_rows,)](
            x,
            values.view(torch.uint8),
            scales,
            x.stride(0),
            WIDTH=width,
            BLOCK=block,
            num_warps=min(max(block // 512, 1), 16),
        )
    return values, scales


def _norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, *, is_centred: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """x `[num_rows, width]` or `[num_rows, num_heads, width]`; a residual is added to whole rows."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    num_rows, width = x.shape[0], x.shape[-1]
    num_heads, head_stride = (x.shape[1], x.stride(1)) if x.dim() == 3 else (1, width)
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = None
    if residual is not None:
        assert num_heads == 1 and residual.stride(1) == 1, "a residual is added to whole rows"
        total = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
    if num_rows:
        block = next_power_of_2(width)
        norm_kernel[(num_rows, num_heads)](
            x,
            residual,
            weight,
            normed,
            total,
            x.stride(0),
            head_stride,
            0 if residual is None else residual.stride(0),
            eps,
            WIDTH=width,
            BLOCK=block,
            CENTRED=is_centred,
            num_warps=min(max(block // 512, 1), 16),
        )
    return normed, total
