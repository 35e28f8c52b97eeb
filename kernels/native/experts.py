"""Mixture-of-experts products in C++ (`cpp/linear.h`), on weights that `pack` laid out for them."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from ..experts import ExpertGroups
from ..plain.experts import PlainExperts
from .build import kernel
from .linear import NativeLinear


@dataclass(frozen=True)
class PackedExperts:
    """Weights `[num_experts, num_out, num_in]`, expert after expert, each in the layout of `linear.PackedWeight`."""

    panels: torch.Tensor  # [num_experts * panels of an expert, ...]
    num_experts: int
    num_out: int
    num_in: int


class NativeExperts(PlainExperts):
    """`experts.ExpertKernels` of one dtype; `linear` is one call that reads each chosen expert's weights once."""

    def __init__(self, library: ctypes.CDLL, linear: NativeLinear, num_threads: int) -> None:
        self._native, self._num_threads = linear, num_threads
        self._linear = kernel(library, "linear_groups", "pnpnpnppnnni", linear.dtype)

    def pack(self, weight: torch.Tensor) -> PackedExperts:
        """A copy of `weight` `[num_experts, out, in]` for `linear`."""
        num_experts, num_out, num_in = weight.shape
        if missing := -num_out % self._native.panel:  # padded, so that no panel has outputs of two experts
            weight = pad(weight, (0, 0, 0, missing))
        return PackedExperts(self._native.pack(weight.flatten(0, 1)).panels, num_experts, num_out, num_in)

    def linear(
        self, x: torch.Tensor, weight: PackedExperts, groups: ExpertGroups, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `experts.ExpertKernels.linear`."""
        assert x.dtype == self._native.dtype, "x has the kernels' dtype"
        assert x.shape[1] == weight.num_in, "x has the weight's inputs"
        x, offsets = x if x.stride(1) == 1 else x.contiguous(), groups.offsets.contiguous()
        assert offsets.dtype == torch.int64 and len(offsets) == weight.num_experts + 1, "groups are of these experts"
        assert x.shape[0] == offsets[-1], "x has as many rows as the groups have pairs"
        if bias is not None:
            assert bias.dtype == x.dtype and bias.shape == (weight.num_experts, weight.num_out) and bias.is_contiguous()
        y = x.new_empty(x.shape[0], weight.num_out)
        self._linear(
            x.data_ptr(),
            x.stride(0),
            offsets.data_ptr(),
            weight.num_experts,
            weight.panels.data_ptr(),
            weight.panels.numel() // weight.num_experts,
            None if bias is None else bias.data_ptr(),
            y.data_ptr(),
            y.stride(0),
            weight.num_in,
            weight.num_out,
            self._num_threads,
        )
        return y
