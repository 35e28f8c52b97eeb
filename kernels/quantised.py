"""A weight of few bits, as files of quantised bases hold it.

A weight `[out, in]` is codes of four or eight bits, each of which stands for a number, with scales that groups of
inputs share: `(number - zero) * scale`, computed in float32. That is what the files' own libraries compute.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch

from .experts import ExpertGroups

# What a code stands for: itself; one of the 16 floats of four bits (OCP MX 1.0: two bits of exponent, one of mantissa);
# a float8_e4m3fn, which the tensor of codes then has.
Numbers = Literal["uint4", "int8", "uint8", "float4", "float8"]
LARGEST_INT8 = 127.0
SMALLEST_SCALE = 2.0**-126  # float32's smallest normal number, so that a row of zeros is divided by something
FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(frozen=True)
class QuantisedWeight:
    """A weight, or some rows and columns of one."""

    codes: torch.Tensor  # [out, in]: int8, float8_e4m3fn, or uint8 with a code of four or eight bits each
    numbers: Numbers
    scales: torch.Tensor  # [out, groups] float32
    zeros: torch.Tensor | None  # [out, groups] float32: what each number is less; None: 0
    group_size: int  # inputs of a group, of which the last may have fewer
    rounds_inputs: bool = False  # rows of x are to be rounded to eight bits too, as in the original
    group_of: torch.Tensor | None = None  # [in] int64: the group of each input; None: in order, from the first

    def dequantised(self) -> torch.Tensor:
        """`[out, in]` in float32."""
        values = self.values()
        groups = self._groups()
        if self.zeros is not None:
            values = values - self.zeros[:, groups]
        return values * self.scales[:, groups]

    def values(self) -> torch.Tensor:
        """The numbers that the codes stand for, `[out, in]` in float32."""
        if self.numbers == "float4":
            return torch.tensor(FLOAT4, device=self.codes.device)[self.codes.long()]
        return self.codes.float()

    def _groups(self) -> torch.Tensor:
        if self.group_of is not None:
            return self.group_of
        return torch.arange(self.codes.shape[1], device=self.codes.device) // self.group_size

    def rows(self, chosen: Any) -> QuantisedWeight:
        """These outputs: a slice, or their indices."""
        zeros = None if self.zeros is None else self.zeros[chosen]
        return replace(self, codes=self.codes[chosen], scales=self.scales[chosen], zeros=zeros)

    def columns(self, start: int, stop: int) -> QuantisedWeight:
        """Inputs from `start` to `stop`, in smaller groups where the first is not the first of a group."""
        codes = self.codes[:, start:stop]
        if self.scales.shape[1] == 1:
            return replace(self, codes=codes, group_size=stop - start, group_of=None)
        if self.group_of is not None:
            return replace(self, codes=codes, group_of=self.group_of[start:stop])
        group_size = math.gcd(start, self.group_size)

        def part(of_groups: torch.Tensor) -> torch.Tensor:
            smaller = of_groups.repeat_interleave(self.group_size // group_size, 1)
            return smaller[:, start // group_size : -(-stop // group_size)]

        zeros = None if self.zeros is None else part(self.zeros)
        return replace(self, codes=codes, scales=part(self.scales), zeros=zeros, group_size=group_size)

    @staticmethod
    def of_eight_bits(weight: torch.Tensor) -> QuantisedWeight:
        """`weight` `[out, in]` rounded to eight bits, with a scale for each output: its largest magnitude over 127."""
        wide = weight.float()
        scales = (wide.abs().amax(1, keepdim=True) / LARGEST_INT8).clamp_min(SMALLEST_SCALE)
        return QuantisedWeight((wide / scales).round().to(torch.int8), "int8", scales, None, weight.shape[1], True)


def are_alike(weights: Sequence[QuantisedWeight]) -> bool:
    """Whether their outputs could be those of one weight."""
    kinds = {(each.numbers, each.group_size, each.rounds_inputs, each.zeros is None) for each in weights}
    return len(weights) == 1 or (len(kinds) == 1 and all(weight.group_of is None for weight in weights))


def joined(weights: Sequence[QuantisedWeight]) -> QuantisedWeight | None:
    """The outputs of all, side by side; None: they are not stored alike."""
    first = weights[0]
    if len(weights) == 1 or not are_alike(weights):
        return first if len(weights) == 1 else None
    zeros = [weight.zeros for weight in weights if weight.zeros is not None]
    return replace(
        first,
        codes=torch.cat([weight.codes for weight in weights]),
        scales=torch.cat([weight.scales for weight in weights]),
        zeros=torch.cat(zeros) if zeros else None,
    )


class QuantisedKernels(Protocol):
    """Linears of weights that stay in four or eight bits."""

    dtype: torch.dtype  # of x, and of weights that become none of few bits
    rounds: bool  # layers' linears of 16 or 32 bits are to be rounded to eight as they are loaded

    def pack(self, weight: QuantisedWeight) -> Any | None:
        """The weight as `linear` reads it; None: it cannot multiply such weights, which are to be dequantised."""

    def pack_experts(self, weights: Sequence[QuantisedWeight]) -> Any | None:
        """Weights `[out, in]` of a layer's experts as `expert_linear` reads them; None: it cannot multiply such."""

    def linear(self, x: torch.Tensor, weight: Any, bias: torch.Tensor | None) -> torch.Tensor:
        """x weightᵀ + bias, `[rows, out]` of x `[rows, in]`, in x's dtype; `weight` is what `pack` returned.

        Of a weight of eight bits that `rounds_inputs`, with one scale for each output, a row of x is rounded likewise:
        its scale is its largest magnitude over 127, and its numbers `round(x * (127 / largest))`, ties to even, all in
        float32. Products are summed as integers; `sum * x's scale * the output's` in float32 is exact but for these
        roundings. A row with NaN or infinity gives NaN. Of a weight of four bits x keeps its dtype, and sums are
        float32.
        """

    def expert_linear(
        self, x: torch.Tensor, weight: Any, groups: ExpertGroups, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `experts.ExpertKernels.linear`; `weight` is what `pack_experts` returned."""

    def takes(self, weight: Any) -> bool:
        """Whether `pack` or `pack_experts` returned it; else it is a weight of the kernels' other linears."""
