"""Triton's norms, activations and rows of eight bits, interpreted on the CPU, against their twins."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.kernels import norms
from motet.kernels.backend import triton_kernels
from motet.kernels.gpu.float8 import ScaledFloat8
from motet.kernels.plain.float8 import PlainFloat8

CPU = torch.device("cpu")
KERNELS = triton_kernels(CPU, torch.float32)
TOLERANCE = 2e-4  # sums run in another order
GROUPS = ((0, 1, 2), (3,), (4, 5), (6,))  # of modules that share an input


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=TOLERANCE, equal_nan=True)


@settings(deadline=None, max_examples=20)
@given(rows=st.integers(0, 5), width=st.integers(1, 1500), has_residual=st.booleans(), seed=st.integers(0, 2**20))
def test_rows(rows: int, width: int, has_residual: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, residual = (torch.randn(rows, width, generator=generator) for _ in range(2))
    weight = torch.randn(width, generator=generator)
    given_residual = residual if has_residual else None
    for kernel, twin in (
        (KERNELS.add_rms_norm, norms.add_rms_norm),
        (KERNELS.add_layer_norm, norms.add_layer_norm),
    ):
        for actual, expected in zip(
            kernel(x, given_residual, weight, 1e-5), twin(x, given_residual, weight, 1e-5), strict=True
        ):
            close(actual, expected)
    close(KERNELS.rms_norm(x, weight, 1e-5), norms.rms_norm(x, weight, 1e-5))
    gate_up = torch.randn(rows, 2 * width, generator=generator) * 4
    activations: tuple[norms.Activation, ...] = (*norms.ACTIVATIONS, norms.ClampedSwiglu(1.7, 3.0))
    for activation in activations:
        close(KERNELS.gated(gate_up, activation), norms.gated(gate_up, activation))


def test_norm_of_heads_side_by_side() -> None:
    heads = torch.randn(5, 6, 80, generator=torch.Generator().manual_seed(4))
    weight = torch.linspace(0.5, 1.5, 80)
    q, k = heads.split([4, 2], dim=1)
    for x in (q, k):
        close(KERNELS.rms_norm(x, weight, 1e-6), norms.rms_norm(x, weight, 1e-6))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [16, 96, 1000])
def test_rows_of_eight_bits_have_the_twins_bits(dtype: torch.dtype, width: int) -> None:
    """Of all sizes, halves between two numbers, elements far below the largest, zeros, and what is no number."""
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(24, width, generator=generator) * torch.logspace(-30, 30, 24).unsqueeze(1)
    x[::3] *= torch.logspace(-6, 0, width)
    x[4] = 0.0
    x[5] = torch.linspace(-448.0, 448.0, width).round()
    x[6], x[6, 0] = torch.arange(width) * 2.0**-10, 448.0
    x[7] = 1e-41
    x = x.to(dtype)
    x[8, width // 2] = torch.nan
    strided = torch.cat([x, x], 1)[:, :width]
    values, scales = ScaledFloat8().quantise(strided)
    expected, expected_scales = PlainFloat8().quantise(x)
    is_number = torch.arange(24) != 8
    assert torch.equal(scales[is_number], expected_scales[is_number])
    assert torch.equal(values.view(torch.uint8)[is_number], expected.view(torch.uint8)[is_number])
    assert values[8, width // 2].float().isnan()


def test_linears_of_eight_bits_are_the_twins() -> None:
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(48, 96, generator=generator)
    kernels, twin = ScaledFloat8(), PlainFloat8()
    for num_rows in (0, 1, 7):
        x = torch.randn(num_rows, 96, generator=generator)
        close(kernels.linear(x, kernels.pack(weight), None), twin.linear(x, twin.pack(weight), None))
        low, bias = x.bfloat16(), weight[:, 0].bfloat16()
        got = kernels.linear(low, kernels.pack(weight.bfloat16()), bias)
        expected = twin.linear(low, twin.pack(weight.bfloat16()), bias)
        torch.testing.assert_close(got, expected, atol=2**-7, rtol=2**-7)  # the bias may be added before or after
    part, expected_part = kernels.pack(weight, (32, 64)), twin.pack(weight, (32, 64))
    assert torch.equal(part.values.view(torch.uint8), expected_part.values.view(torch.uint8))
    assert torch.equal(part.scales, expected_part.scales)


@pytest.mark.parametrize(("shape", "columns"), [((40, 96), None), ((48, 72), None), ((48, 96), (0, 24))])
def test_a_shape_that_cublas_does_not_multiply_is_refused(
    shape: tuple[int, int], columns: tuple[int, int] | None
) -> None:
    with pytest.raises(ValueError, match=r"weights_dtype = 'float8': a worker has a linear with .* multiples of 16"):
        ScaledFloat8().pack(torch.randn(shape), columns)
