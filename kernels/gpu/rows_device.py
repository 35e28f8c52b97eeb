"""Norms, gated activations and rows of eight bits in Triton, the device side. The host side is `rows.py`."""

from __future__ import annotations

import triton
import triton.language as tl

_SQRT_2_OVER_PI = tl.constexpr(0.7978845608028654)
_SMALLEST_SCALE = tl.constexpr(2.0**-126)


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
    CENTRED: tl.constexpr,
):
    """One program computes a head of a row: x + residual, rounded, and the norm of that times weight.

    The norm is rounded to the weight's dtype before the product. A centred one is of the row less its mean.
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
    if CENTRED:
        wide = tl.where(live, wide - tl.sum(wide, 0) / WIDTH, 0.0)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    factor = tl.load(weight + column, mask=live, other=0.0)
    product = (wide * scale).to(factor.dtype).to(tl.float32) * factor.to(tl.float32)
    place = normed + (row * tl.num_programs(1) + head) * WIDTH + column
    tl.store(place, product.to(factor.dtype).to(normed.dtype.element_ty), mask=live)


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """The activation of x, which is float32, by its name in `norms.ACTIVATIONS`."""
    if ACTIVATION == "silu":
        y = x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "gelu_pytorch_tanh":
        inner = _SQRT_2_OVER_PI * (x + 0.044715 * x * x * x)
        y = x / (1.0 + tl.exp(-2.0 * inner))  # x * (1 + tanh(inner)) / 2
    else:
        tl.static_assert(False, "no such activation")
    return y


@triton.jit
def gated_kernel(
    gate_up,
    out,
    gate_up_row,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,  # of `clamped_swiglu`
    LIMIT: tl.constexpr,
):
    """One program computes activation(gate) * up of a piece of a row; the activation is rounded before the product."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = column < WIDTH
    place = gate_up + row * gate_up_row + column
    gate = tl.load(place, mask=live, other=0.0).to(tl.float32)
    up = tl.load(place + WIDTH, mask=live, other=0.0)
    if ACTIVATION == "clamped_swiglu":
        gate = tl.where(gate > LIMIT, LIMIT, gate)  # unlike a minimum it keeps NaN
        swish = gate / (1.0 + tl.exp(-ALPHA * gate))
        wide = up.to(tl.float32)
        plus_one = tl.where(wide > LIMIT, LIMIT, tl.where(wide < -LIMIT, -LIMIT, wide)) + 1.0
        product = swish.to(up.dtype).to(tl.float32) * plus_one.to(up.dtype).to(tl.float32)
    else:
        product = activated(gate, ACTIVATION).to(up.dtype).to(tl.float32) * up.to(tl.float32)
    tl.store(out + row * WIDTH + column, product.to(out.dtype.element_ty), mask=live)


@triton.jit
def quantise_kernel(x, values, scales, x_row, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """One program quantises a row of x: its scale, and each element over it as the bits of a float8_e4m3fn."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    live = column < WIDTH
    wide = tl.load(x + row * x_row + column, mask=live, other=0.0).to(tl.float32)
    scale = float8_scale(tl.max(tl.abs(wide), 0))
    tl.store(values + row * WIDTH + column, float8_bits(tl.div_rn(wide, scale)), mask=live)
    tl.store(scales + row, scale)


@triton.jit
def float8_scale(largest):
    """The scale of rows whose largest magnitudes are these."""
    return tl.maximum(tl.div_rn(largest, 448.0), _SMALLEST_SCALE)


@triton.jit
def float8_bits(quotient):
    """Numbers in float32 rounded to float8_e4m3fn, as bytes.

    Their bits are put together here: neither all chips nor the interpreter round to this type.
    """
    size = tl.minimum(tl.abs(quotient), 448.0)
    bits = size.to(tl.int32, bitcast=True)
    # Of float32's 23 bits of mantissa 3 stay, rounded to even; its exponent is 120 more than that of float8.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Under 2^-6 the steps are 2^-9, as float32's are from 2^14 on: the sum is rounded as it should be.
    small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0.015625, small, normal)
    code = tl.where(quotient != quotient, 0x7F, code)  # NaN stays NaN
    sign = (quotient.to(tl.int32, bitcast=True) >> 24) & 0x80
    return (code | sign).to(tl.uint8)
