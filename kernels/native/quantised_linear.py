"""Linears on weights of four and eight bits in C++ (`cpp/quantised_linear.h`, `cpp/four_bits.h`)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad

from ..huge_pages import zeros_in_huge_pages
from ..quantised import FLOAT4, QuantisedWeight
from .build import kernel

_CHUNK_BYTES = 64 << 20  # reserved at a time for weights; parts that stay unused take no memory
_BYTES_AT_ONCE = 4  # inputs of an output that lie side by side
_CODES = 8  # of four bits in a word
_MIDDLE = 8  # of codes of integers: what they are less in the table, so that most zero points are nothing
_MOST_INPUTS = 1 << 17  # of which 32 bits hold the sum of products of eight bits


@dataclass(frozen=True)
class PackedBytes:
    """A weight `[num_out, num_in]` of eight bits; outputs are padded to whole panels, inputs to whole words."""

    panels: torch.Tensor  # [num_panels, words, outputs of a panel, 4] uint8, each number more by 128
    scales: torch.Tensor  # [outputs of all panels] float32
    num_out: int
    num_in: int


@dataclass(frozen=True)
class PackedCodes:
    """A weight `[num_out, num_in]` of four bits; outputs are padded to whole panels."""

    panels: torch.Tensor  # [num_panels, words, outputs of a panel] int32, of eight codes each
    scales: torch.Tensor  # [num_panels, groups, outputs of a panel] float32
    zeros: torch.Tensor | None  # likewise, int8
    table: torch.Tensor  # [16] float32: what each code stands for
    group_size: int
    num_out: int
    num_in: int


class NativeQuantised:
    """`quantised.QuantisedKernels` of one dtype."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype, num_threads: int, rounds: bool) -> None:
        self.dtype, self.rounds, self._num_threads = dtype, rounds, num_threads
        self._of_bytes = kernel(library, "linear_of_bytes", "pnnppppnnni", dtype)
        self._of_codes = kernel(library, "linear_of_codes", "pnnppppppnnnni", dtype)
        panel = library["num_narrow_outputs"]
        panel.restype = ctypes.c_int
        self._panel = int(panel())
        self._free = torch.empty(0, dtype=torch.uint8)

    def pack(self, weight: QuantisedWeight) -> PackedBytes | PackedCodes | None:
        num_in = weight.codes.shape[1]
        if weight.numbers == "int8":
            fits = (
                weight.rounds_inputs and weight.zeros is None and weight.scales.shape[1] == 1 and num_in <= _MOST_INPUTS
            )
            return self._packed_bytes(weight) if fits else None
        if weight.numbers not in ("uint4", "float4") or weight.group_of is not None:
            return None
        if weight.zeros is not None and not torch.equal(weight.zeros.round(), weight.zeros):
            return None
        if num_in % _CODES or (weight.group_size % _CODES and weight.group_size < num_in):
            return None
        return self._packed_codes(weight)

    def takes(self, weight: Any) -> bool:
        return isinstance(weight, PackedBytes | PackedCodes)

    def linear(self, x: torch.Tensor, weight: PackedBytes | PackedCodes, bias: torch.Tensor | None) -> torch.Tensor:
        """See `quantised.QuantisedKernels`."""
        assert x.dtype == self.dtype and x.shape[1] == weight.num_in, "x has the kernels' dtype, the weight's inputs"
        x = x if x.stride(1) == 1 else x.contiguous()
        bias = None if bias is None else bias.contiguous()
        assert bias is None or (bias.dtype == self.dtype and len(bias) == weight.num_out), "a bias for each output"
        y = x.new_empty(x.shape[0], weight.num_out)
        rows = (x.data_ptr(), x.stride(0), x.shape[0], weight.panels.data_ptr(), weight.scales.data_ptr())
        own_bias = None if bias is None else bias.data_ptr()
        sizes = (y.data_ptr(), y.stride(0), weight.num_in, weight.num_out)
        if isinstance(weight, PackedBytes):
            self._of_bytes(*rows, own_bias, *sizes, self._num_threads)
        else:
            zeros = None if weight.zeros is None else weight.zeros.data_ptr()
            self._of_codes(
                *rows, zeros, weight.table.data_ptr(), own_bias, *sizes, weight.group_size, self._num_threads
            )
        return y

    def _packed_bytes(self, weight: QuantisedWeight) -> PackedBytes:
        num_out, num_in = weight.codes.shape
        more, panel = weight.codes.view(torch.uint8) ^ 0x80, self._panel
        padded = pad(more, (0, -num_in % _BYTES_AT_ONCE, 0, -num_out % panel))
        panels = padded.view(padded.shape[0] // panel, panel, -1, _BYTES_AT_ONCE).transpose(1, 2)
        scales = pad(weight.scales[:, 0], (0, -num_out % panel)).contiguous()
        return PackedBytes(self._room(panels), scales, num_out, num_in)

    def _packed_codes(self, weight: QuantisedWeight) -> PackedCodes:
        num_out, num_in = weight.codes.shape
        codes = pad(weight.codes, (0, 0, 0, -num_out % self._panel)).int().view(-1, num_in // _CODES, _CODES // 2, 2)
        shifts = torch.arange(0, 16, 4, dtype=torch.int32)
        words = (codes[..., 0] << shifts).sum(2, dtype=torch.int32) + ((codes[..., 1] << shifts) << 16).sum(
            2, dtype=torch.int32
        )
        zeros, table = None, torch.tensor(FLOAT4)
        if weight.numbers == "uint4":
            table = torch.arange(16, dtype=torch.float32) - _MIDDLE
            less = torch.zeros_like(weight.scales) if weight.zeros is None else weight.zeros
            zeros = self._in_panels((less - _MIDDLE).to(torch.int8)) if (less != _MIDDLE).any() else None
        panels = words.view(words.shape[0] // self._panel, self._panel, -1).transpose(1, 2)
        group_size = min(weight.group_size, num_in)
        return PackedCodes(
            self._room(panels), self._in_panels(weight.scales), zeros, table, group_size, num_out, num_in
        )

    def _in_panels(self, numbers: torch.Tensor) -> torch.Tensor:
        """`[out, groups]` as `[panels, groups, outputs of a panel]`."""
        padded = pad(numbers, (0, 0, 0, -len(numbers) % self._panel))
        return padded.view(len(padded) // self._panel, self._panel, -1).transpose(1, 2).contiguous()

    def _room(self, panels: torch.Tensor) -> torch.Tensor:
        """A copy in huge pages. Weights share a chunk, because one weight alone would hardly fill a huge page."""
        if panels.nbytes > len(self._free):
            self._free = zeros_in_huge_pages(max(panels.nbytes, _CHUNK_BYTES), torch.uint8)
        room, self._free = self._free[: panels.nbytes], self._free[-(-panels.nbytes // 64) * 64 :]
        return room.view(panels.dtype).view(panels.shape).copy_(panels)
