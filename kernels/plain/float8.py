"""Linears with weights of eight bits in plain torch: the twin."""

from __future__ import annotations

import torch

from ..float8 import FLOAT8, LARGEST, SMALLEST_SCALE, Float8Weight


class PlainFloat8:
    """See `Float8Kernels`. Multiplies in float32, on any device."""

    def quantise(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        wide = x.float()
        largest = wide.abs().amax(1, keepdim=True)
        # On a GPU torch divides by a number of the host as it multiplies by its reciprocal, which rounds otherwise.
        scales = (largest / torch.full_like(largest, LARGEST)).clamp_min(SMALLEST_SCALE)
        # A quotient may round up to a little over the largest value, which some torch convert to NaN.
        return (wide / scales).clamp(-LARGEST, LARGEST).to(FLOAT8), scales

    def pack(self, weight: torch.Tensor, columns: tuple[int, int] | None = None) -> Float8Weight:
        values, scales = self.quantise(weight)
        return Float8Weight(values if columns is None else values[:, slice(*columns)].contiguous(), scales)

    def linear(self, x: torch.Tensor, weight: Float8Weight, bias: torch.Tensor | None) -> torch.Tensor:
        values, scales = self.quantise(x)
        y = values.float() @ weight.values.float().t() * scales * weight.scales.t()
        return (y if bias is None else y + bias).to(x.dtype)
