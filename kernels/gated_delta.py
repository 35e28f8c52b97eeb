"""The contract of Gated DeltaNet, linear attention whose state has a fixed size, for the kernels of every backend.

Of each row q, k and v are convolved with those of the last few rows, SiLU follows, q and k get the length 1 and q is
multiplied by key_dim^-0.5. Then each value head of a sequence goes on from its state S `[key_dim, value_dim]`:

    S = S * exp(g);  d = (v - Sᵀ k) * beta;  S = S + k dᵀ;  o = Sᵀ q

with g = decay * softplus(a + dt_bias) and beta = sigmoid(b). Heads of o are normed and gated:
norm(o) * weight * silu(z).

States, g, and what a step of it computes are float32. What the convolution and its SiLU give, beta, o, and the normed o
before and after its weight are rounded to x's dtype. So a row's result is the same whether its sequence is computed row
by row or in segments of any length. Source: Gated DeltaNet (arXiv 2412.06464).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch


@dataclass(frozen=True, eq=False)
class GatedDelta:
    """One layer's own weights and shape, of this worker's heads."""

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
        """Columns of x: q | k | v | z | b | a."""
        return self.num_channels + self.num_value_heads * self.value_dim + 2 * self.num_value_heads

    @property
    def num_kept(self) -> int:
        """Earlier rows that the convolution of a row needs."""
        return self.conv.shape[1] - 1

    @cached_property
    def taps(self) -> torch.Tensor:
        """The convolution's factors `[kernel, channels]`, float32."""
        return self.conv.float().T.contiguous()


@dataclass(frozen=True, eq=False)
class LayerState:
    """Where a layer's state lies in the pages of a sequence's state. A page is one contiguous run of the pool."""

    head_pages: torch.Tensor  # [num_value_heads] int32: which of the state's pages has the head's S, in float32
    head_offsets: torch.Tensor  # [num_value_heads] int32: where S begins, in float32 elements from the page's start
    conv_page: int  # which has the newest inputs of the convolution, [num_kept, channels] of x's dtype, oldest first
    conv_offset: int  # in elements of the pool's dtype

    @cached_property
    def heads(self) -> tuple[tuple[int, int], ...]:
        """Page and offset of each value head, on the host."""
        return tuple(zip(self.head_pages.tolist(), self.head_offsets.tolist(), strict=True))


@dataclass(frozen=True, eq=False)
class StateBatch:
    """A step's rows as segments, which go on from one state and give another.

    A segment's rows are of one sequence and follow each other. A sequence's segments are computed in order: one may
    read what the one before wrote. No sequence reads or writes what another one writes.
    """

    segment_rows: torch.Tensor  # [num_segments + 1] int32: segment i has rows [i] to [i + 1]; none is empty
    sequence_segments: torch.Tensor  # [num_sequences + 1] int32: sequence i has segments [i] to [i + 1]
    source: torch.Tensor  # [num_segments, num_state_pages] int32: pages of the pool with the state before the segment
    target: torch.Tensor  # [num_segments, num_state_pages] int32: pages that get the state after it; may be the source
    is_fresh: torch.Tensor  # [num_segments] bool: the state before it is zero; `source` is not read


class GatedDeltaKernel(Protocol):
    """Computes a layer for all rows of a step; states after it are in the pages of `target` then.

    x `[num_rows, layer.width]` is q | k | v | z | b | a, float32 or bfloat16. The result is `[num_rows,
    num_value_heads * value_dim]` of its dtype. `pool` `[num_pages, num_layers, slab]`, contiguous, of x's dtype, has
    states as float32 whatever its dtype.
    """

    def __call__(
        self, x: torch.Tensor, layer: GatedDelta, pool: torch.Tensor, state: LayerState, batch: StateBatch
    ) -> torch.Tensor: ...
