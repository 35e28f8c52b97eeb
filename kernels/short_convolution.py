"""The rule of a gated short convolution (LFM2), whose state is the newest inputs of the convolution alone.

Columns of x are B | C | u, of as many channels each: y = C * conv(B * u). The product, what the convolution gives and y
are rounded to x's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from .recurrence import taps_of


@dataclass(frozen=True, eq=False)
class ShortConvolution:
    """`recurrence.Rule`."""

    conv: torch.Tensor  # [channels, kernel] float32 or x's dtype, the newest row's factor last
    bias: torch.Tensor  # [channels] float32

    @property
    def width(self) -> int:
        return 3 * self.num_channels

    @property
    def num_out(self) -> int:
        return self.num_channels

    @property
    def head_shape(self) -> tuple[int, int]:
        return 0, 0

    @property
    def num_channels(self) -> int:
        return len(self.conv)

    @property
    def num_kept(self) -> int:
        return self.conv.shape[1] - 1

    @cached_property
    def taps(self) -> torch.Tensor:
        """The convolution's factors `[kernel, channels]`, float32."""
        return taps_of(self.conv)
