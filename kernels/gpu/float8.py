"""Linears with weights of eight bits on a GPU: rows quantised by Triton, products by cuBLAS."""

from __future__ import annotations

import torch

from ..float8 import Float8Weight
from .rows import quantise_rows

_MULTIPLE = 16  # of inputs and outputs, which cuBLAS needs for float8


class ScaledFloat8:
    """See `Float8Kernels`. For GPUs of compute capability 9.0 or more."""

    def quantise(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return quantise_rows(x)

    def pack(self, weight: torch.Tensor, columns: tuple[int, int] | None = None) -> Float8Weight:
        values, scales = self.quantise(weight)
        if columns is not None:
            values = values[:, slice(*columns)].contiguous()
        if any(side % _MULTIPLE for side in values.shape):
            raise ValueError(
                f"weights_dtype = 'float8': a worker has a linear with {values.shape[1]} inputs and {values.shape[0]} "
                f"outputs, and a GPU multiplies multiples of {_MULTIPLE} of either; with fewer workers it may, and "
                "with weights_dtype = 'dtype' it does"
            )
        return Float8Weight(values, scales)

    def linear(self, x: torch.Tensor, weight: Float8Weight, bias: torch.Tensor | None) -> torch.Tensor:
        values, scales = self.quantise(x)
        # Hopper's tensor cores keep some fourteen bits of a sum of such products, which costs some percent over
        # thousands of inputs (DeepSeek-V3, arXiv 2412.19437 §3.3.2). Without `use_fast_accum` sums move to float32 as
        # they grow; a decode waits for its weights all the same.
        return torch._scaled_mm(
            values,
            weight.values.t(),
            scale_a=scales,
            scale_b=weight.scales.t(),
            bias=bias,
            out_dtype=x.dtype,
            use_fast_accum=False,
        )
