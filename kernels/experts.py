"""Mixture-of-experts products: what every backend's kernels take and give.

Each row of a batch is computed by a few of a layer's experts. A (row, expert) pair is the unit here; pairs lie sorted
by expert, without padding, so that each expert's weights are read once for all of its rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

ExpertWeight = Any  # a layer's weights `[num_experts, out, in]` as `pack_experts` laid them out; opaque to the caller


@dataclass(frozen=True)
class ExpertGroups:
    """A batch's pairs, sorted by expert; the pairs of one expert in the order of their rows."""

    rows: torch.Tensor  # [num_pairs] int64, the batch's row of each pair
    weights: torch.Tensor  # [num_pairs] float32, how much of the expert's answer the row takes
    offsets: torch.Tensor  # [num_experts + 1] int64: pairs of expert e are offsets[e] : offsets[e + 1]


class ExpertKernels(Protocol):
    """One expert after the other would do; how they are brought together is the backend's affair."""

    def group(self, experts: torch.Tensor, weights: torch.Tensor, first: int, num_experts: int) -> ExpertGroups:
        """The pairs of the experts `first : first + num_experts`, counted from `first` on; others are left out.

        `experts` `[num_rows, top_k]` int64 and their `weights` `[num_rows, top_k]` are what a router chose.
        """

    def linear(self, x: torch.Tensor, weight: ExpertWeight, groups: ExpertGroups) -> torch.Tensor:
        """Each pair through its own expert: `[num_pairs, out]`.

        x `[num_pairs, in]`; `weight` of the experts that the pairs were grouped for.
        """

    def combine(self, x: torch.Tensor, groups: ExpertGroups, num_rows: int) -> torch.Tensor:
        """The weighted sum of each row's pairs, `[num_rows, width]`; zero for a row that has none.

        x `[num_pairs, width]`.
        """
