"""Mixture-of-experts products in C++, on weights that were laid out for them once."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from ..experts import ExpertGroups
from ..plain.experts import TorchExperts
from .linear import NativeLinear


@dataclass(frozen=True)
class PackedExperts:
    """Weights `[num_experts, num_out, num_in]`, each expert's as `PackedWeight` has it, one after the other."""

    panels: torch.Tensor  # [num_experts * panels of each, ...]
    num_experts: int
    num_out: int
    num_in: int


class NativeExperts(TorchExperts):
    """`experts.ExpertKernels` of one dtype: one call for all experts, which reads each of those chosen once."""

    def __init__(self, library: ctypes.CDLL, linear: NativeLinear, num_threads: int) -> None:
        self._native, self._num_threads = linear, num_threads
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self._linear = library[f"linear_groups_{str(linear.dtype).removeprefix('torch.')}"]
        self._linear.argtypes = [
            *(pointer, number, pointer, number),
            *(pointer, number, pointer, number),
            *(number, number, ctypes.c_int),
        ]
        self._linear.restype = None

    def pack(self, weight: torch.Tensor) -> PackedExperts:
        """A copy of `weight` `[num_experts, out, in]` for `linear`."""
        num_experts, num_out, num_in = weight.shape
        if missing := -num_out % self._native.panel:  # no panel has outputs of two experts
            weight = pad(weight, (0, 0, 0, missing))
        return PackedExperts(self._native.pack(weight.flatten(0, 1)).panels, num_experts, num_out, num_in)

    def linear(self, x: torch.Tensor, weight: PackedExperts, groups: ExpertGroups) -> torch.Tensor:
        """See `experts.ExpertKernels.linear`."""
        assert x.dtype == self._native.dtype, "of the kernels' dtype"
        assert x.shape[1] == weight.num_in, "of the weight's width"
        x, offsets = x if x.stride(1) == 1 else x.contiguous(), groups.offsets.contiguous()
        assert offsets.dtype == torch.int64 and len(offsets) == weight.num_experts + 1, "groups of these experts"
        assert x.shape[0] == offsets[-1], "as many pairs as the groups have"
        y = x.new_empty(x.shape[0], weight.num_out)
        self._linear(
            x.data_ptr(),
            x.stride(0),
            offsets.data_ptr(),
            weight.num_experts,
            weight.panels.data_ptr(),
            weight.panels.numel() // weight.num_experts,
            y.data_ptr(),
            y.stride(0),
            weight.num_in,
            weight.num_out,
            self._num_threads,
        )
        return y
