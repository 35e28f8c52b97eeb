"""A weight of few bits, as files of quantised bases hold it.

A weight `[out, in]` is codes of four or eight bits, each of which stands for a number, with scales that groups of
inputs share: `(number - zero) * scale`, computed in float32. That is what the files' own libraries compute.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

# What a code stands for: itself; one of the 16 floats of four bits (OCP MX 1.0: two bits of exponent, one of mantissa);
# a float8_e4m3fn, which the tensor of codes then has.
Numbers = Literal["uint4", "int8", "uint8", "float4", "float8"]
FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(frozen=True)
class QuantisedWeight:
    """A weight, or some rows and columns of one."""

    codes: torch.Tensor  # [out, in]: int8, float8_e4m3fn, or uint8 with a code of four or eight bits each
    numbers: Numbers
    scales: torch.Tensor  # [out, groups] float32
    zeros: torch.Tensor | None  # [out, groups] float32: what each number is less; None: 0
    group_size: int  # inputs of a group, of which the last may have fewer
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
        """Inputs from `start` to `stop`, with the scales of all groups where the first is not the first of a group."""
        codes = self.codes[:, start:stop]
        if self.scales.shape[1] == 1:
            return replace(self, codes=codes, group_size=stop - start, group_of=None)
        if self.group_of is not None or start % self.group_size:
            return replace(self, codes=codes, group_of=self._groups()[start:stop])
        part = slice(start // self.group_size, -(-stop // self.group_size))
        zeros = None if self.zeros is None else self.zeros[:, part]
        return replace(self, codes=codes, scales=self.scales[:, part], zeros=zeros)
