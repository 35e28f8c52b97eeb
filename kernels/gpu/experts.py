"""Mixture-of-experts products in Triton, the host side. The device side is `experts_device.py`."""

from __future__ import annotations

import torch
import triton

from ..experts import ExpertGroups
from ..plain.experts import PlainExperts
from .experts_device import grouped_linear_kernel


class TritonExperts(PlainExperts):
    """`experts.ExpertKernels`; `linear` is one launch for all experts and never waits for the device."""

    def linear(self, x: torch.Tensor, weight: torch.Tensor, groups: ExpertGroups) -> torch.Tensor:
        num_pairs, (num_experts, num_out, num_in) = len(x), weight.shape
        out = torch.empty((num_pairs, num_out), dtype=x.dtype, device=x.device)
        if num_pairs == 0:
            return out
        assert x.stride(1) == 1 and weight.stride(2) == 1, "rows are contiguous"
        rows = 64 if num_pairs > 16 * num_experts else 16
        # The host does not know the groups' sizes. Each expert's last tile may be short, so this many tiles are enough
        # for any groups; programs of tiles that are not needed end at once.
        num_tiles = triton.cdiv(num_pairs, rows) + min(num_experts, num_pairs)
        columns = 128 if rows == 16 else 64
        grouped_linear_kernel[(triton.cdiv(num_out, columns), num_tiles)](
            x,
            weight,
            groups.offsets,
            out,
            num_experts,
            num_in,
            num_out,
            x.stride(0),
            weight.stride(0),
            weight.stride(1),
            EXPERTS=triton.next_power_of_2(num_experts),
            ROWS=rows,
            COLUMNS=columns,
            DEPTH=64,
            PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
            num_warps=4,
            num_stages=3,
        )
        return out
