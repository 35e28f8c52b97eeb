"""The rule of Mamba-2 (arXiv 2405.21060), a state space whose state has a fixed size.

Columns of x are z | u | B | C | dt. u, B and C are convolved with those of the last few rows, and SiLU follows. Then
each head of a sequence goes on from its state S `[state_size, head_dim]`:

    t = softplus(dt + dt_bias), within `step_limits`;  S = S * exp(decay * t) + t * B uᵀ;  y = Sᵀ C + skip * u

Heads of a group share its B and C. y * silu(z) is normed over the heads of each group, and multiplied by a weight; or y
is normed so, and then multiplied by silu(z); or nothing is normed.

States and what a step of it computes are float32. What the convolution and its SiLU give, y and the result are rounded
to x's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from .recurrence import taps_of


@dataclass(frozen=True, eq=False)
class Mamba:
    """`recurrence.Rule`."""

    conv: torch.Tensor  # [channels, kernel] float32 or x's dtype, the newest row's factor last; channels are u | B | C
    conv_bias: torch.Tensor  # [channels] float32
    decay: torch.Tensor  # [num_heads] float32: -exp(A_log)
    dt_bias: torch.Tensor  # [num_heads] float32
    skip: torch.Tensor  # [num_heads] float32: D
    norm: torch.Tensor | None  # [num_heads * head_dim] float32; None: nothing is normed
    eps: float  # added to the mean square of a group
    num_heads: int
    num_groups: int  # head i is of group i * num_groups // num_heads
    head_dim: int
    state_size: int
    step_limits: tuple[float, float]
    gates_first: bool = True  # before the norm

    @property
    def num_out(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def head_shape(self) -> tuple[int, int]:
        return self.state_size, self.head_dim

    @property
    def num_channels(self) -> int:
        return self.num_out + 2 * self.num_groups * self.state_size

    @property
    def width(self) -> int:
        return self.num_out + self.num_channels + self.num_heads

    @property
    def num_kept(self) -> int:
        return self.conv.shape[1] - 1

    @cached_property
    def taps(self) -> torch.Tensor:
        """The convolution's factors `[kernel, channels]`, float32."""
        return taps_of(self.conv)
