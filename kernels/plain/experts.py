"""Mixture-of-experts products in plain torch: the plain twin, which the fast kernels are tested against."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch.nn.functional import linear

from ..experts import ExpertGroups, ExpertWeight


class PlainExperts:
    """`experts.ExpertKernels` for any device: one product for each expert that has a row."""

    def group(self, experts: torch.Tensor, weights: torch.Tensor, first: int, num_experts: int) -> ExpertGroups:
        chosen = experts.flatten() - first
        local = ((chosen >= 0) & (chosen < num_experts)).nonzero().squeeze(1)
        order = local[chosen[local].argsort(stable=True)]
        offsets = chosen.new_zeros(num_experts + 1)
        torch.cumsum(chosen[local].bincount(minlength=num_experts), 0, out=offsets[1:])
        return ExpertGroups(order // experts.shape[1], weights.flatten()[order].float(), offsets)

    def linear(
        self, x: torch.Tensor, weight: ExpertWeight, groups: ExpertGroups, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `experts.ExpertKernels.linear`. `weight` is in torch's own layout, `[num_experts, out, in]`."""
        out = x.new_empty(len(x), weight.shape[1])
        for expert, (start, end) in enumerate(pairwise(groups.offsets.tolist())):
            if end > start:
                out[start:end] = linear(x[start:end], weight[expert], None if bias is None else bias[expert])
        return out

    def combine(self, x: torch.Tensor, groups: ExpertGroups, num_rows: int) -> torch.Tensor:
        total = x.new_zeros(num_rows, x.shape[1], dtype=torch.float32)
        total.index_add_(0, groups.rows, x.float() * groups.weights.unsqueeze(1))
        return total.to(x.dtype)
