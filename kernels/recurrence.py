"""The contract of layers whose state has a fixed size, for the kernels of every backend.

A layer goes on by its rule: `gated_delta.GatedDelta`, `short_convolution.ShortConvolution` or `mamba.Mamba`. Its state
is a matrix of each head, in float32, and the newest inputs of the layer's convolution. A row's result is the same
whether its sequence is computed row by row or in segments of any length.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch


class Rule(Protocol):
    """One layer's own weights and shape, of this worker's heads."""

    @property
    def width(self) -> int:
        """Columns of x."""

    @property
    def num_out(self) -> int:
        """Columns of the result."""

    @property
    def head_shape(self) -> tuple[int, int]:
        """Of a head's matrix."""

    @property
    def num_channels(self) -> int:
        """Of the convolution."""

    @property
    def num_kept(self) -> int:
        """Earlier inputs that the convolution of a row needs."""


@dataclass(frozen=True, eq=False)
class LayerState:
    """Where a layer's state lies in the pages of a sequence's state. A page is one contiguous run of the pool."""

    head_pages: torch.Tensor  # [num_heads] int32: which of the state's pages has the head's matrix, in float32
    head_offsets: torch.Tensor  # [num_heads] int32: where it begins, in float32 elements from the page's start
    conv_page: int  # which has the newest inputs of the convolution, [num_kept, channels] of x's dtype, oldest first
    conv_offset: int  # in elements of the pool's dtype

    @cached_property
    def heads(self) -> tuple[tuple[int, int], ...]:
        """Page and offset of each head, on the host."""
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
    # [num_segments, num_state_pages] int32: pages that get the state after it; may be the source. In recorded steps all
    # may be -1: the segment is padding, and its state is not written.
    target: torch.Tensor
    is_fresh: torch.Tensor  # [num_segments] bool: the state before it is zero; `source` is not read


class RecurrentKernel(Protocol):
    """Computes a layer for all rows of a step; states after it are in the pages of `target` then.

    x `[num_rows, rule.width]` is float32 or bfloat16. The result is `[num_rows, rule.num_out]` of its dtype. `pool`
    `[num_pages, num_layers, slab]`, contiguous, of x's dtype, has matrices of states as float32 whatever its dtype.
    """

    def __call__(
        self, x: torch.Tensor, rule: Rule, pool: torch.Tensor, state: LayerState, batch: StateBatch
    ) -> torch.Tensor: ...


def taps_of(conv: torch.Tensor) -> torch.Tensor:
    """The factors of a convolution `[channels, kernel]` as kernels read them: `[kernel, channels]`, float32."""
    return conv.float().T.contiguous()
