"""Rows of eight bits and their products against float64, each number looked up among all that there are."""

from __future__ import annotations

import pytest
import torch

from motet.kernels.float8 import FLOAT8, LARGEST, SMALLEST_SCALE
from motet.kernels.plain.float8 import PlainFloat8

CODES = torch.arange(127, dtype=torch.uint8)  # of the numbers from 0 to 448 in their order
NUMBERS = CODES.view(FLOAT8).double()


def rows(dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Of all sizes, with elements far below the largest of their row."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(40, 96, generator=generator) * torch.logspace(-12, 12, 40).unsqueeze(1)
    x[::3] *= torch.logspace(-5, 0, 96)
    return x.to(dtype)


def nearest(quotients: torch.Tensor) -> torch.Tensor:
    """The code of the nearest number, the even one of two, by looking at all of them."""
    distance = (quotients.abs().unsqueeze(-1).double() - NUMBERS).abs()
    least = distance.min(-1, keepdim=True).values
    ties = distance == least
    even = ties & (CODES % 2 == 0)
    found = torch.where(even.any(-1), even.int().argmax(-1), ties.int().argmax(-1))
    return found.to(torch.uint8) | (quotients.signbit().to(torch.uint8) << 7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_element_becomes_the_nearest_number(dtype: torch.dtype) -> None:
    x = rows(dtype)
    values, scales = PlainFloat8().quantise(x)
    assert (values.dtype, scales.dtype, scales.shape) == (FLOAT8, torch.float32, (40, 1))
    assert torch.equal(scales, x.float().abs().amax(1, keepdim=True) / LARGEST)
    assert torch.equal(values.view(torch.uint8), nearest(x.float() / scales))
    # Half a step: a sixteenth of an element, or the scale over 1024; the quotient's own rounding is 2^-24.
    bound = torch.maximum(x.double().abs() / 16, scales.double() / 1024) * (1 + 2**-20)
    assert ((values.double() * scales - x.double()).abs() <= bound).all()


def test_halves_go_to_the_even_neighbour() -> None:
    x = torch.tensor([[448.0, 17.0, 19.0, -17.0, 2**-10, 3 * 2**-10, 2**-6 - 2**-10, 432.0]])
    values, scales = PlainFloat8().quantise(x)
    assert scales.item() == 1.0
    assert values.float().tolist() == [[448.0, 16.0, 20.0, -16.0, 0.0, 2**-8, 2**-6, 448.0]]


def test_rows_without_a_size() -> None:
    x = torch.tensor([[0.0, -0.0], [1e-42, 0.0], [torch.nan, 1.0]])
    values, scales = PlainFloat8().quantise(x)
    assert scales[:2].flatten().tolist() == [SMALLEST_SCALE] * 2
    assert values[0].view(torch.uint8).tolist() == [0, 0x80]
    assert values[2].float().isnan().any(), "what is not a number stays none"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_is_that_of_what_the_rows_stand_for(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    weight, bias = torch.randn(48, 96, generator=generator).to(dtype), torch.randn(48, generator=generator).to(dtype)
    kernels, x = PlainFloat8(), rows(dtype)[10:30]
    packed = kernels.pack(weight)
    values, scales = kernels.quantise(x)
    dequantised = packed.values.double() * packed.scales
    exact = (values.double() * scales) @ dequantised.t() + bias.double()
    got = kernels.linear(x, packed, bias)
    assert got.dtype == dtype
    # 96 products and their sums in float32, then one rounding to the dtype.
    size = (values.double() * scales).abs() @ dequantised.abs().t() + bias.double().abs()
    bound = size * 100 * 2**-24 + exact.abs() * (2**-8 if dtype == torch.bfloat16 else 2**-23)
    assert ((got.double() - exact).abs() <= bound).all()
    # Against x itself: half a step of each of its elements.
    step = torch.maximum(x.double().abs() / 16, scales.double() / 1024)
    from_x = (got.double() - x.double() @ dequantised.t() - bias.double()).abs()
    assert (from_x <= step @ dequantised.abs().t() * (1 + 2**-20) + bound).all()
    assert (from_x > bound).any(), "the bound before is the narrower one"


def test_columns_have_the_scales_of_whole_rows() -> None:
    weight = rows(torch.float32)
    whole, kernels = PlainFloat8().pack(weight), PlainFloat8()
    parts = [kernels.pack(weight, columns) for columns in ((0, 32), (32, 96))]
    assert torch.equal(torch.cat([part.values for part in parts], 1).view(torch.uint8), whole.values.view(torch.uint8))
    assert all(torch.equal(part.scales, whole.scales) and part.values.is_contiguous() for part in parts)
