"""Linear layers through oneDNN, for CPUs with matrix instructions, on weights that `pack_linear` laid out for it."""

from __future__ import annotations

import torch
from torch.nn.functional import linear as torch_linear


def can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN takes packed weights here: only bfloat16, and only on CPUs with wide enough vectors."""
    if dtype != torch.bfloat16 or not torch.backends.mkldnn.is_available():
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack_linear(weight: torch.Tensor) -> torch.Tensor:
    """`weight` `[out, in]` in oneDNN's own layout, which only `linear` can read; an empty weight stays as it is."""
    if weight.numel() == 0:
        return weight
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
    return packed


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x weightᵀ + bias, `[rows, out]` of x `[rows, in]`; `weight` is what `pack_linear` returned."""
    if not weight.is_mkldnn:
        return torch_linear(x, weight, bias)
    if len(x) == 0:
        return x.new_empty(0, weight.shape[0])
    y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return y
