"""Linears with weights of four and eight bits in plain torch: the twin."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from ..experts import ExpertGroups
from ..quantised import LARGEST_INT8, QuantisedWeight, joined


class PlainQuantised:
    """See `QuantisedKernels`. Multiplies in float32 and, of integers, in float64, on any device."""

    def __init__(self, dtype: torch.dtype, rounds: bool) -> None:
        self.dtype, self.rounds = dtype, rounds

    def pack(self, weight: QuantisedWeight) -> QuantisedWeight | None:
        is_bytes = (
            weight.rounds_inputs and weight.numbers == "int8" and weight.zeros is None and weight.scales.shape[1] == 1
        )
        is_codes = weight.numbers in ("uint4", "float4") or (weight.numbers == "float8" and not self.rounds)
        return weight if is_bytes or (is_codes and weight.group_of is None) else None

    def pack_experts(self, weights: Sequence[QuantisedWeight]) -> QuantisedWeight | None:
        """All outputs of the first expert, then those of the next."""
        together = joined(weights)
        is_packed = together is not None and together.numbers != "int8"
        return self.pack(together) if together is not None and is_packed else None

    def takes(self, weight: Any) -> bool:
        return isinstance(weight, QuantisedWeight)

    def linear(self, x: torch.Tensor, weight: QuantisedWeight, bias: torch.Tensor | None) -> torch.Tensor:
        if weight.numbers == "int8":
            numbers, scales = quantise_rows(x)
            y = (numbers.double() @ weight.codes.double().t()).float() * scales * weight.scales.t()
        else:
            y = x.float() @ weight.dequantised().t()
        return (y if bias is None else y + bias).to(x.dtype)

    def expert_linear(
        self, x: torch.Tensor, weight: QuantisedWeight, groups: ExpertGroups, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        num_out = len(weight.codes) // (len(groups.offsets) - 1)
        y = x.new_empty(len(x), num_out)
        for expert, (start, end) in enumerate(pairwise(groups.offsets.tolist())):
            if end > start:
                outputs = weight.rows(slice(expert * num_out, (expert + 1) * num_out))
                y[start:end] = self.linear(x[start:end], outputs, None if bias is None else bias[expert])
        return y


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of x as whole numbers from -127 to 127, in float32, and scales `[rows, 1]`; NaN where x is not finite."""
    wide = x.float()
    largest = wide.abs().amax(1, keepdim=True) if x.shape[1] else wide.new_zeros(len(x), 1)
    scales = torch.where(largest.isfinite(), largest / LARGEST_INT8, torch.nan)
    # `number / tensor` is the number times the reciprocal, which rounds twice.
    inverse = torch.where(largest > 0, torch.full_like(largest, LARGEST_INT8) / largest, 0.0)
    return (wide * inverse).round(), scales
