"""The contract of linears whose weights have eight bits, for the kernels of every backend.

Weights and inputs are float8_e4m3fn: four bits of exponent, three of mantissa, 448 at most (arXiv 2209.05433). A row of
either has a scale in float32, its largest magnitude over 448. An output of a weight `[out, in]` is a row of it, so each
output channel has its own scale, and each token its own. What a row stands for is `values * scale`: exact up to half a
step of float8, a sixteenth of an element's magnitude, or the scale over 1024 for elements under a 28,672nd of the
largest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

FLOAT8 = torch.float8_e4m3fn
LARGEST = 448.0  # of float8_e4m3fn
SMALLEST_SCALE = 2.0**-126  # float32's smallest normal number, so that a row of zeros is divided by something


@dataclass(frozen=True)
class Float8Weight:
    """`values * scales` is `[out, in]`."""

    values: torch.Tensor  # [out, in] float8_e4m3fn, contiguous
    scales: torch.Tensor  # [out, 1] float32


class Float8Kernels(Protocol):
    """Quantises rows, and multiplies what it has quantised."""

    def quantise(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x `[rows, in]` as values, float8_e4m3fn of its shape, and scales `[rows, 1]` in float32.

        scale = max(largest |x| of the row / 448, 2^-126); value = x / scale, rounded to the nearest, ties to even. All
        is computed in float32, each operation correctly rounded: every backend gives the same bits for finite x.
        """

    def pack(self, weight: torch.Tensor, columns: tuple[int, int] | None = None) -> Float8Weight:
        """`weight` `[out, in]`, quantised; or these columns of it, with the scales of whole rows.

        Raises ValueError for a shape that `linear` cannot multiply.
        """

    def linear(self, x: torch.Tensor, weight: Float8Weight, bias: torch.Tensor | None) -> torch.Tensor:
        """x weightᵀ + bias with x quantised, `[rows, out]` of x `[rows, in]`, in x's dtype.

        Products are summed in float32 before they are scaled; the result is rounded once.
        """
