"""Linear layers in C++ (`cpp/linear.h`), on weights that `pack` laid out for them."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from ..huge_pages import zeros_in_huge_pages
from .build import kernel

_CHUNK_BYTES = 64 << 20  # reserved at a time for weights; parts that stay unused take no memory


@dataclass(frozen=True)
class PackedWeight:
    """A weight `[num_out, num_in]` as cpp/linear.h reads it; outputs and inputs are padded with zeros."""

    panels: torch.Tensor  # [num_panels, num_in / depth, outputs of a panel, depth]
    num_out: int
    num_in: int


class NativeLinear:
    """Linears of one dtype."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype, num_threads: int) -> None:
        self.dtype, self._num_threads = dtype, num_threads
        self._linear = kernel(library, "linear", "pnnpppnnni", dtype)
        self._to_floats = kernel(library, "linear_to_floats", "pnnppnni", dtype)
        facts = [kernel(library, f"linear_{fact}", "", dtype) for fact in ("depth", "panel", "is_best")]
        for fact in facts:
            fact.restype = ctypes.c_int64
        self._depth, self.panel, is_best = (int(fact()) for fact in facts)  # `panel`: outputs of a panel
        self.is_best = is_best == 1  # False: oneDNN is faster on this CPU
        self._free = torch.empty(0, dtype=dtype)

    def pack(self, weight: torch.Tensor) -> PackedWeight:
        """A copy of `weight` `[out, in]` for `linear`."""
        assert weight.dtype == self.dtype, "the weight has the kernels' dtype"
        (num_out, num_in), depth, panel = weight.shape, self._depth, self.panel
        missing = (0, -num_in % depth, 0, -num_out % panel)
        padded = pad(weight, missing) if any(missing) else weight.contiguous()
        panels = padded.view(padded.shape[0] // panel, panel, padded.shape[1] // depth, depth).transpose(1, 2)
        return PackedWeight(self._room(padded.numel()).view(panels.shape).copy_(panels), num_out, num_in)

    def linear(self, x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
        """x weightᵀ + bias: `[rows, out]` of `[rows, in]`."""
        assert x.dtype == self.dtype and x.shape[1] == weight.num_in, "x has the kernels' dtype and the weight's inputs"
        x = x if x.stride(1) == 1 else x.contiguous()
        bias = None if bias is None else bias.contiguous()
        assert bias is None or (bias.dtype == self.dtype and len(bias) == weight.num_out), "a bias for each output"
        y = x.new_empty(x.shape[0], weight.num_out)
        self._linear(
            x.data_ptr(),
            x.stride(0),
            x.shape[0],
            weight.panels.data_ptr(),
            None if bias is None else bias.data_ptr(),
            y.data_ptr(),
            y.stride(0),
            weight.num_in,
            weight.num_out,
            self._num_threads,
        )
        return y

    def to_floats(self, x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
        """`linear` without a bias, in float32: what it rounds, converted."""
        assert x.dtype == self.dtype and x.shape[1] == weight.num_in, "x has the kernels' dtype and the weight's inputs"
        x = x if x.stride(1) == 1 else x.contiguous()
        y = torch.empty(x.shape[0], weight.num_out)
        self._to_floats(
            x.data_ptr(),
            x.stride(0),
            x.shape[0],
            weight.panels.data_ptr(),
            y.data_ptr(),
            weight.num_in,
            weight.num_out,
            self._num_threads,
        )
        return y

    def _room(self, num_elements: int) -> torch.Tensor:
        """Zeros in huge pages. Weights share a chunk, because one weight alone would hardly fill a huge page."""
        if num_elements > len(self._free):
            chunk_elements = max(num_elements, _CHUNK_BYTES // self.dtype.itemsize)
            self._free = zeros_in_huge_pages(chunk_elements, self.dtype)
        room, self._free = self._free[:num_elements], self._free[num_elements:]
        return room
