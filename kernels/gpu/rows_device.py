"""Norms and gated activations in Triton, the device side. The host side is `rows.py`."""

from __future__ import annotations

import triton
import triton.language as tl

_SQRT_2_OVER_PI = tl.constexpr(0.7978845608028654)


@triton.jit
def norm_kernel(
    x,  # [num_rows, num_heads, WIDTH]; num_heads is 1 where whole rows are normed
    residual,  # [num_rows, WIDTH] or None
    weight,  # [WIDTH]
    normed,  # [num_rows, num_heads, WIDTH], contiguous
    total,  # [num_rows, WIDTH], contiguous, or None
    x_row,
    x_head,
    residual_row,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program computes a head of a row: x + residual, rounded, and the norm of that times weight.

    The norm is rounded to the weight's dtype before the product.
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    live = column < WIDTH
    wide = tl.load(x + row * x_row + head * x_head + column, mask=live, other=0.0).to(tl.float32)
    if residual is not None:
        wide += tl.load(residual + row * residual_row + column, mask=live, other=0.0).to(tl.float32)
        rounded = wide.to(total.dtype.element_ty)
        tl.store(total + row * WIDTH + column, rounded, mask=live)
        wide = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    factor = tl.load(weight + column, mask=live, other=0.0)
    product = (wide * scale).to(factor.dtype).to(tl.float32) * factor.to(tl.float32)
    place = normed + (row * tl.num_programs(1) + head) * WIDTH + column
    tl.store(place, product.to(factor.dtype).to(normed.dtype.element_ty), mask=live)


@triton.jit
def gated_kernel(gate_up, out, gate_up_row, WIDTH: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr):
    """One program computes activation(gate) * up of a piece of a row; the activation is rounded before the product."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = column < WIDTH
    place = gate_up + row * gate_up_row + column
    gate = tl.load(place, mask=live, other=0.0).to(tl.float32)
    up = tl.load(place + WIDTH, mask=live, other=0.0)
    if GELU:
        inner = _SQRT_2_OVER_PI * (gate + 0.044715 * gate * gate * gate)
        active = gate / (1.0 + tl.exp(-2.0 * inner))  # gate * (1 + tanh(inner)) / 2
    else:
        active = gate / (1.0 + tl.exp(-gate))
    product = active.to(up.dtype).to(tl.float32) * up.to(tl.float32)
    tl.store(out + row * WIDTH + column, product.to(out.dtype.element_ty), mask=live)
