"""The contract of mixture-of-experts products, for the kernels of every backend.

A few of a layer's experts compute each row of a batch. The unit is a pair of a row and an expert. Pairs are sorted by
expert, as in MegaBlocks (arXiv 2211.15841), and not padded, so that each expert's weights are read once for all of its
rows. x, the weights of experts and the results have one dtype, float32 or bfloat16; factors of pairs are float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

ExpertWeight = Any  # a layer's weights `[num_experts, out, in]` as `pack_experts` laid them out; opaque to the caller


@dataclass(frozen=True)
class ExpertGroups:
    """A batch's pairs, sorted by expert; the pairs of one expert are in the order of their rows.

    Behind them a backend may have pairs of other workers' experts, so that how many there are depends on shapes alone.
    """

    rows: torch.Tensor  # [num_pairs] int64, the batch's row of each pair
    weights: torch.Tensor  # [num_pairs] float32, the factor of the expert's output in the row's sum
    offsets: torch.Tensor  # [num_experts + 1] int64: pairs of expert e are offsets[e] : offsets[e + 1]


class ExpertKernels(Protocol):
    """Called in this order for each layer: `group`, `linear` once for each weight, `combine`."""

    def group(self, experts: torch.Tensor, weights: torch.Tensor, first: int, num_experts: int) -> ExpertGroups:
        """The pairs of experts `first : first + num_experts`, which are those of this worker.

        `experts` `[num_rows, top_k]` int64 are the experts that the layer's router chose for each row, counted over all
        workers; `weights` `[num_rows, top_k]` are their factors. In the result expert `first` has the index 0.
        """

    def linear(
        self, x: torch.Tensor, weight: ExpertWeight, groups: ExpertGroups, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Each pair's row times its expert's weight, transposed: `[num_pairs, out]` of x `[num_pairs, in]`.

        Outputs for pairs of other workers' experts are undefined, and may be NaN.

        `weight` and `bias` `[num_experts, out]` hold exactly the experts that `groups` was made for.
        """

    def combine(self, x: torch.Tensor, groups: ExpertGroups, num_rows: int) -> torch.Tensor:
        """The weighted sum of each row's pairs of these experts, zeros without any.

        `[num_rows, width]` of x `[num_pairs, width]`.
        """
