"""Linears with weights of four and eight bits in plain torch: the twin."""

from __future__ import annotations

from typing import Any

import torch

from ..quantised import LARGEST_INT8, QuantisedWeight


class PlainQuantised:
    """See `QuantisedKernels`. Multiplies in float32 and, of integers, in float64, on any device."""

    def __init__(self, dtype: torch.dtype, rounds: bool) -> None:
        self.dtype, self.rounds = dtype, rounds

    def pack(self, weight: QuantisedWeight) -> QuantisedWeight | None:
        is_bytes = (
            weight.rounds_inputs and weight.numbers == "int8" and weight.zeros is None and weight.scales.shape[1] == 1
        )
        is_codes = weight.numbers in ("uint4", "float4") and weight.group_of is None
        return weight if is_bytes or is_codes else None

    def takes(self, weight: Any) -> bool:
        return isinstance(weight, QuantisedWeight)

    def linear(self, x: torch.Tensor, weight: QuantisedWeight, bias: torch.Tensor | None) -> torch.Tensor:
        if weight.numbers == "int8":
            numbers, scales = quantise_rows(x)
            y = (numbers.double() @ weight.codes.double().t()).float() * scales * weight.scales.t()
        else:
            y = x.float() @ weight.dequantised().t()
        return (y if bias is None else y + bias).to(x.dtype)


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of x as whole numbers from -127 to 127, in float32, and scales `[rows, 1]`; NaN where x is not finite."""
    wide = x.float()
    largest = wide.abs().amax(1, keepdim=True) if x.shape[1] else wide.new_zeros(len(x), 1)
    scales = torch.where(largest.isfinite(), largest / LARGEST_INT8, torch.nan)
    # `number / tensor` is the number times the reciprocal, which rounds twice.
    inverse = torch.where(largest > 0, torch.full_like(largest, LARGEST_INT8) / largest, 0.0)
    return (wide * inverse).round(), scales
