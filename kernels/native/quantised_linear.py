"""Linears on weights of four and eight bits in C++ (`cpp/quantised_linear.h`, `cpp/four_bits.h`)."""

from __future__ import annotations

import ctypes
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad

from ..experts import ExpertGroups
from ..huge_pages import zeros_in_huge_pages
from ..quantised import FLOAT4, QuantisedWeight, are_alike
from .build import kernel

_CHUNK_BYTES = 64 << 20  # reserved at a time for weights; parts that stay unused take no memory
_BYTES_AT_ONCE = 4  # inputs of an output that lie side by side
_CODES = 8  # of four bits in a word
_MIDDLE = 8  # of codes of integers: what they are less in the table, so that most zero points are nothing
_MANTISSA_BITS = 23  # of float32
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
    """A weight `[num_out, num_in]` of four bits, or of float8_e4m3fn; outputs are padded to whole panels."""

    panels: torch.Tensor  # [num_panels, words, outputs of a panel] int32, of eight codes each or of four
    # [num_panels, groups, outputs of a panel] float32, or uint8: the exponents of powers of two, more by 127
    scales: torch.Tensor
    zeros: torch.Tensor | None  # likewise, int8
    table: torch.Tensor | None  # [16] float32: what each code of four bits stands for
    group_size: int
    num_out: int
    num_in: int

    @property
    def addresses(self) -> tuple[int, int]:
        """Of the scales and of the exponents; 0: it has the others."""
        address = self.scales.data_ptr()
        return (address, 0) if self.scales.dtype == torch.float32 else (0, address)


@dataclass(frozen=True)
class PackedExpertCodes(PackedCodes):
    """Weights `[num_out, num_in]` of four bits, the panels of one expert after those of another."""

    num_experts: int


class NativeQuantised:
    """`quantised.QuantisedKernels` of one dtype."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype, num_threads: int, rounds: bool) -> None:
        self.dtype, self.rounds, self._num_threads = dtype, rounds, num_threads
        self._of_bytes = kernel(library, "linear_of_bytes", "pnnppppnnni", dtype)
        takes_float8 = library[f"linear_takes_float8_{str(dtype).removeprefix('torch.')}"]
        self._takes_float8 = bool(takes_float8())
        self._of_codes = kernel(library, "linear_of_codes", "pnpnpppppppnnnni", dtype)
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
        return PackedCodes(*self._packed_codes([weight])) if self._are_codes(weight) else None

    def pack_experts(self, weights: Sequence[QuantisedWeight]) -> PackedExpertCodes | None:
        if not (are_alike(weights) and all(map(self._are_codes, weights))):
            return None
        return PackedExpertCodes(*self._packed_codes(weights), len(weights))

    def takes(self, weight: Any) -> bool:
        return isinstance(weight, PackedBytes | PackedCodes)

    def linear(self, x: torch.Tensor, weight: PackedBytes | PackedCodes, bias: torch.Tensor | None) -> torch.Tensor:
        """See `quantised.QuantisedKernels`."""
        assert bias is None or bias.shape == (weight.num_out,), "a bias for each output"
        if isinstance(weight, PackedCodes):
            rows = array("q", (0, len(x)))
            return self._multiply_codes(x, weight, rows.buffer_info()[0], 1, bias)
        x, y, own_bias = self._checked(x, weight, bias)
        self._of_bytes(
            *(x.data_ptr(), x.stride(0), x.shape[0], weight.panels.data_ptr(), weight.scales.data_ptr(), own_bias),
            *(y.data_ptr(), y.stride(0), weight.num_in, weight.num_out, self._num_threads),
        )
        return y

    def expert_linear(
        self, x: torch.Tensor, weight: PackedExpertCodes, groups: ExpertGroups, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `experts.ExpertKernels.linear`."""
        offsets = groups.offsets.contiguous()
        assert offsets.dtype == torch.int64 and len(offsets) == weight.num_experts + 1, "groups are of these experts"
        assert x.shape[0] == offsets[-1], "x has as many rows as the groups have pairs"
        assert bias is None or bias.shape == (weight.num_experts, weight.num_out), "a bias for each output"
        return self._multiply_codes(x, weight, offsets.data_ptr(), weight.num_experts, bias)

    def _multiply_codes(
        self, x: torch.Tensor, weight: PackedCodes, offsets: int, num_groups: int, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """`offsets`: the address of the groups' `[num_groups + 1]` offsets among the rows of x."""
        x, y, own_bias = self._checked(x, weight, bias)
        zeros = None if weight.zeros is None else weight.zeros.data_ptr()
        self._of_codes(
            *(x.data_ptr(), x.stride(0), offsets, num_groups, weight.panels.data_ptr(), *weight.addresses, zeros),
            *(
                None if weight.table is None else weight.table.data_ptr(),
                own_bias,
                y.data_ptr(),
                y.stride(0),
                weight.num_in,
                weight.num_out,
            ),
            *(weight.group_size, self._num_threads),
        )
        return y

    def _checked(
        self, x: torch.Tensor, weight: PackedBytes | PackedCodes, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, int | None]:
        """Rows whose elements lie side by side, room for the result, and the address of the bias."""
        assert x.dtype == self.dtype and x.shape[1] == weight.num_in, "x has the kernels' dtype, the weight's inputs"
        assert bias is None or (bias.dtype == self.dtype and bias.is_contiguous()), "a bias of the kernels' dtype"
        x = x if x.stride(1) == 1 else x.contiguous()
        return x, x.new_empty(x.shape[0], weight.num_out), None if bias is None else bias.data_ptr()

    def _packed_bytes(self, weight: QuantisedWeight) -> PackedBytes:
        num_out, num_in = weight.codes.shape
        more, panel = weight.codes.view(torch.uint8) ^ 0x80, self._panel
        padded = pad(more, (0, -num_in % _BYTES_AT_ONCE, 0, -num_out % panel))
        panels = padded.view(padded.shape[0] // panel, panel, -1, _BYTES_AT_ONCE).transpose(1, 2)
        scales = pad(weight.scales[:, 0], (0, -num_out % panel)).contiguous()
        room = self._room(panels.shape, torch.uint8).copy_(panels)
        return PackedBytes(room, scales, num_out, num_in)

    def _packed_codes(
        self, weights: Sequence[QuantisedWeight]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None, int, int, int]:
        """The fields of `PackedCodes`, of weights that are alike; each begins with a panel of its own."""
        first, panel = weights[0], self._panel
        num_out, num_in = first.codes.shape
        num_panels = -(-num_out // panel)
        is_float8 = first.numbers == "float8"
        num_words = num_in // (_BYTES_AT_ONCE if is_float8 else _CODES)
        panels = self._room((len(weights) * num_panels, num_words, panel), torch.int32)
        for place, weight in zip(panels.split(num_panels), weights, strict=True):
            codes = pad(weight.codes.view(torch.uint8), (0, 0, 0, -num_out % panel))
            words = _words_of_bytes(codes) if is_float8 else _words(codes)
            place.copy_(words.view(num_panels, panel, -1).mT)
        scales, zeros = torch.cat([self._in_panels(weight.scales) for weight in weights]), None
        table = None if is_float8 else torch.tensor(FLOAT4)
        if first.numbers == "uint4":
            table = torch.arange(16, dtype=torch.float32) - _MIDDLE
            points = [torch.zeros_like(each.scales) if each.zeros is None else each.zeros for each in weights]
            if any((each != _MIDDLE).any() for each in points):
                zeros = torch.cat([self._in_panels((each - _MIDDLE).to(torch.int8)) for each in points])
        group_size = min(first.group_size, num_in)
        return panels, _narrowed(scales), zeros, table, group_size, num_out, num_in

    def _in_panels(self, numbers: torch.Tensor) -> torch.Tensor:
        """`[out, groups]` as `[panels, groups, outputs of a panel]`."""
        padded = pad(numbers, (0, 0, 0, -len(numbers) % self._panel))
        return padded.view(len(padded) // self._panel, self._panel, -1).transpose(1, 2).contiguous()

    def _are_codes(self, weight: QuantisedWeight) -> bool:
        """Whether it can be packed so."""
        if weight.numbers == "float8":
            is_taken = self._takes_float8 and not self.rounds  # else it is rounded to whole numbers
            if not is_taken or weight.zeros is not None or weight.codes.float().isnan().any():
                return False
        elif weight.numbers not in ("uint4", "float4"):
            return False
        if weight.zeros is not None and not torch.equal(weight.zeros.round(), weight.zeros):
            return False
        num_in, is_in_order = weight.codes.shape[1], weight.group_of is None
        return is_in_order and num_in % _CODES == 0 and (weight.group_size % _CODES == 0 or weight.group_size >= num_in)

    def _room(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """In huge pages. Weights share a chunk, because one weight alone would hardly fill a huge page."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes > len(self._free):
            self._free = zeros_in_huge_pages(max(num_bytes, _CHUNK_BYTES), torch.uint8)
        room, self._free = self._free[:num_bytes], self._free[-(-num_bytes // 64) * 64 :]
        return room.view(dtype).view(*shape)


def _words(codes: torch.Tensor) -> torch.Tensor:
    """Codes `[out, in]` as int32 `[out, in / 8]`: those of even inputs in the low half, the first ones lowest."""
    eight = codes.unflatten(1, (-1, 2, 2, 2))  # input 4 a + 2 b + c, in the nibble b of the byte 2 c + a
    parts: torch.Tensor = eight[:, :, :, 0] | eight[:, :, :, 1] << 4
    return parts.mT.contiguous().flatten(2).view(torch.int32).squeeze(2)


def _words_of_bytes(codes: torch.Tensor) -> torch.Tensor:
    """Bytes `[out, in]` as int32 `[out, in / 4]`, likewise."""
    four: torch.Tensor = codes.unflatten(1, (-1, 2, 2))  # input 2 a + b, in the byte 2 b + a
    return four.mT.contiguous().flatten(2).view(torch.int32).squeeze(2)


def _narrowed(scales: torch.Tensor) -> torch.Tensor:
    """Their exponents in eight bits if all are powers of two, which MXFP4 has."""
    bits = scales.view(torch.int32)
    exponents = bits >> _MANTISSA_BITS & 0xFF
    return exponents.to(torch.uint8) if torch.equal(exponents << _MANTISSA_BITS, bits) else scales
