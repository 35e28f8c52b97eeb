"""The rule of Gated DeltaNet, linear attention whose state has a fixed size.

Of each row q, k and v are convolved with those of the last few rows, SiLU follows, q and k get the length 1 and q is
multiplied by key_dim^-0.5. Then each value head of a sequence goes on from its state S `[key_dim, value_dim]`:

    S = S * exp(g);  d = (v - Sᵀ k) * beta;  S = S + k dᵀ;  o = Sᵀ q

with g = decay * softplus(a + dt_bias) and beta = sigmoid(b). Heads of o are normed and gated:
norm(o) * weight * silu(z).

States, g, and what a step of it computes are float32. What the convolution and its SiLU give, beta, o, and the normed o
before and after its weight are rounded to x's dtype. Source: Gated DeltaNet (arXiv 2412.06464).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from .recurrence import taps_of


@dataclass(frozen=True, eq=False)
class GatedDelta:
    """`recurrence.Rule`. Columns of x are q | k | v | z | b | a."""

    conv: torch.Tensor  # [channels, kernel] float32 or x's dtype, the newest row's factor last; channels are q | k | v
    decay: torch.Tensor  # [num_value_heads] float32: -exp(A_log)
    dt_bias: torch.Tensor  # [num_value_heads] float32
    norm: torch.Tensor  # [value_dim] float32: the weight of each head's norm
    eps: float  # added to the mean square of a head
    num_key_heads: int
    num_value_heads: int  # a multiple of num_key_heads: value head i uses key head i * num_key_heads // num_value_heads
    key_dim: int  # of a head
    value_dim: int  # of a head

    @property
    def num_channels(self) -> int:
        """Columns of q, k and v."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    @property
    def width(self) -> int:
        return self.num_channels + self.num_value_heads * self.value_dim + 2 * self.num_value_heads

    @property
    def num_out(self) -> int:
        return self.num_value_heads * self.value_dim

    @property
    def head_shape(self) -> tuple[int, int]:
        return self.key_dim, self.value_dim

    @property
    def num_kept(self) -> int:
        return self.conv.shape[1] - 1

    @cached_property
    def taps(self) -> torch.Tensor:
        """The convolution's factors `[kernel, channels]`, float32."""
        return taps_of(self.conv)
