"""Linear layers through oneDNN on weights that were laid out for it once, for CPUs with matrix instructions."""

from __future__ import annotations

import torch
from torch.nn.functional import linear as torch_linear


def can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN takes packed weights here: bfloat16, on a CPU whose vectors are wide enough for it."""
    if dtype != torch.bfloat16 or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack_linear(weight: torch.Tensor) -> torch.Tensor:
    """`weight` `[out, in]` in oneDNN's own layout; nothing but `linear` can read it."""
    if weight.numel() == 0:
        return weight
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
    return packed


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x weightᵀ + bias; an empty weight is as it was."""
    if not weight.is_mkldnn:
        return torch_linear(x, weight, bias)
    if len(x) == 0:
        return x.new_empty(0, weight.shape[0])
    y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return y
