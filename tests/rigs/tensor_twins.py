"""Tensors of adapters, which are numpy's, beside torch's."""

from __future__ import annotations

import torch

from motet.adapters.format.tensor_file import BFLOAT16, Tensor, tensor_bytes


def as_numpy(tensor: torch.Tensor) -> Tensor:
    """The same numbers, also of bfloat16, which torch does not hand to numpy."""
    if tensor.dtype is not torch.bfloat16:
        return tensor.contiguous().numpy()
    return tensor.contiguous().view(torch.uint16).numpy().view(BFLOAT16)


def identical(one: Tensor, other: Tensor) -> bool:
    """Whether they are equal bit by bit."""
    return (one.dtype, one.shape, tensor_bytes(one)) == (other.dtype, other.shape, tensor_bytes(other))
