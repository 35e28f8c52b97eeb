"""Norms and activations against their formulas in float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from motet.kernels.norms import ACTIVATIONS, ClampedSwiglu, add_layer_norm, add_rms_norm, gated, rms_norm

FORMULAS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": lambda x: x * x.sigmoid(),
    "gelu_pytorch_tanh": lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
}
# bfloat16 keeps 8 bits of the result.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 8e-3}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(5, 16, generator=generator) * 3).to(dtype)
    weight = torch.randn(16, generator=generator).to(dtype)
    wide = x.double()
    expected = weight.double() * wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    got = rms_norm(x, weight, 1e-5)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), expected, atol=2 * TOLERANCE[dtype], rtol=2 * TOLERANCE[dtype])
    normed, total = add_rms_norm(x, x, weight, 1e-5)
    torch.testing.assert_close(total, x + x)
    torch.testing.assert_close(normed, rms_norm(x + x, weight, 1e-5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_norm(dtype: torch.dtype) -> None:
    """Of rows far from zero, too."""
    generator = torch.Generator().manual_seed(0)
    x, residual = ((torch.randn(5, 16, generator=generator) * 3 + 2).to(dtype) for _ in range(2))
    weight = torch.randn(16, generator=generator)
    for given in (residual, None):
        normed, total = add_layer_norm(x, given, weight, 1e-5)
        assert (normed.dtype, total.dtype) == (dtype, dtype)
        torch.testing.assert_close(total, x if given is None else x + given)
        centred = total.double() - total.double().mean(-1, keepdim=True)
        expected = weight.double() * centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        torch.testing.assert_close(normed.double(), expected, atol=2 * TOLERANCE[dtype], rtol=2 * TOLERANCE[dtype])


def test_a_weight_in_float32_is_multiplied_before_rounding() -> None:
    x = torch.tensor([[1.0, 1.0]], dtype=torch.bfloat16)
    weight = torch.tensor([1.0 + 2**-10, 3.0 + 2**-7])  # neither is a number of bfloat16
    got = rms_norm(x, weight, 0.0)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got, weight.to(torch.bfloat16).unsqueeze(0), atol=0, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation: str, dtype: torch.dtype) -> None:
    x = torch.linspace(-6, 6, 40).view(2, 20).to(dtype)
    gate, up = x.double().chunk(2, -1)
    got, expected = gated(x, activation), FORMULAS[activation](gate) * up
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), expected, atol=4 * TOLERANCE[dtype], rtol=2 * TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_clamped_swiglu(dtype: torch.dtype) -> None:
    gate, up = torch.meshgrid(torch.linspace(-9, 9, 19), torch.linspace(-9, 9, 19), indexing="ij")
    got = gated(torch.stack((gate.flatten(), up.flatten()), 1).to(dtype), ClampedSwiglu(1.5, 6.0)).squeeze(1)
    bounded = gate.double().clamp(max=6)
    expected = (bounded / (1 + torch.exp(-1.5 * bounded)) * (1 + up.double().clamp(-6, 6))).flatten()
    torch.testing.assert_close(got.double(), expected, atol=4 * TOLERANCE[dtype], rtol=2 * TOLERANCE[dtype])
