"""Mixture-of-experts products in Triton, the host side. The device side is `experts_device.py`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..experts import ExpertGroups
from .experts_device import combine_pairs_kernel, group_kernel, grouped_linear_kernel
from .tile_sizes import next_power_of_2

_TILES_TOGETHER = 32  # whose rows of x a cache holds while a weight's columns go by: 17 MB of 4,096 numbers each


@dataclass(frozen=True)
class TritonGroups(ExpertGroups):
    """All pairs of the batch, those of other workers' experts included: only the device knows how many these are."""

    experts: torch.Tensor  # [num_pairs] int64, from this worker's first; its number of experts: another worker's
    places: torch.Tensor  # [num_rows, top_k] int64, where each row's pairs stand


class TritonExperts:
    """`experts.ExpertKernels`: one launch for each operation, over all experts. Never waits for the device."""

    def group(self, experts: torch.Tensor, weights: torch.Tensor, first: int, num_experts: int) -> TritonGroups:
        num_rows, top_k = experts.shape
        num_pairs, device = num_rows * top_k, experts.device
        rows, local_experts, places = (torch.empty(num_pairs, dtype=torch.int64, device=device) for _ in range(3))
        factors = torch.empty(num_pairs, dtype=torch.float32, device=device)
        offsets = torch.empty(num_experts + 1, dtype=torch.int64, device=device)
        block = 32
        group_kernel[(-(-(num_pairs + num_experts + 1) // block),)](
            experts.contiguous(),
            weights.contiguous(),
            rows,
            factors,
            local_experts,
            places,
            offsets,
            num_pairs,
            first,
            num_experts,
            top_k,
            BLOCK=block,
            WIDTH=64,
            num_warps=4,
        )
        return TritonGroups(rows, factors, offsets, local_experts, places.view(num_rows, top_k))

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, groups: ExpertGroups, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `experts.ExpertKernels.linear`. Outputs for pairs of other workers' experts are undefined."""
        num_pairs, (num_experts, num_out, num_in) = len(x), weight.shape
        out = torch.empty((num_pairs, num_out), dtype=x.dtype, device=x.device)
        if num_pairs == 0:
            return out
        assert x.stride(1) == 1 and weight.stride(2) == 1, "rows are contiguous"
        assert bias is None or (bias.shape == (num_experts, num_out) and bias.is_contiguous()), "a bias of each output"
        rows, columns, depth, warps, stages = _tile_of(num_pairs / num_experts)
        # The host does not know the groups' sizes. Each expert's last tile may be short, so this many tiles are enough
        # for any groups; programs of tiles that are not needed end at once.
        num_tiles = -(-num_pairs // rows) + min(num_experts, num_pairs)
        grouped_linear_kernel[(-(-num_out // columns) * num_tiles,)](
            x,
            weight,
            bias,
            groups.offsets,
            out,
            num_tiles,
            num_experts,
            num_in,
            num_out,
            x.stride(0),
            weight.stride(0),
            weight.stride(1),
            EXPERTS=next_power_of_2(num_experts),
            ROWS=rows,
            COLUMNS=columns,
            DEPTH=depth,
            TOGETHER=_TILES_TOGETHER,
            PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
            num_warps=warps,
            num_stages=stages,
        )
        return out

    def combine(self, x: torch.Tensor, groups: ExpertGroups, num_rows: int) -> torch.Tensor:
        """See `experts.ExpertKernels.combine`. Each row's pairs are added in the order in which it chose them."""
        assert isinstance(groups, TritonGroups), "groups are those of `group`"
        width = x.shape[1]
        out = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
        if num_rows == 0:
            return out
        assert x.stride(1) == 1, "rows are contiguous"
        columns = min(next_power_of_2(width), 1024)
        combine_pairs_kernel[(num_rows, -(-width // columns))](
            x,
            groups.weights,
            groups.places,
            groups.offsets,
            out,
            width,
            x.stride(0),
            len(groups.offsets) - 1,
            TOP_K=groups.places.shape[1],
            COLUMNS=columns,
            num_warps=4,
        )
        return out


def _tile_of(pairs: float) -> tuple[int, int, int, int, int]:
    """Rows, columns and depth of a product's tile, warps and stages, by the pairs of an expert.

    The fastest of some on an H100, with Mixtral's gate and up.
    """
    if pairs <= 16:
        return 16, 64, 128, 4, 4
    return (64, 128, 64, 4, 4) if pairs <= 128 else (128, 256, 64, 8, 3)
