"""Layers with a recurrent state in C++ (`cpp/states.h` and the rules' own headers): checks and passes the arguments."""

from __future__ import annotations

import ctypes
import struct
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import singledispatch
from typing import Final
from weakref import WeakKeyDictionary

import torch

from ..gated_delta import GatedDelta
from ..mamba import Mamba
from ..recurrence import LayerState, Rule, StateBatch
from ..short_convolution import ShortConvolution
from .build import kernel

# Of the library: what computes a rule.
KERNELS: Final[Mapping[type, str]] = {
    GatedDelta: "gated_delta",
    ShortConvolution: "short_convolution",
    Mamba: "mamba",
}


class NativeRecurrence:
    """`recurrence.RecurrentKernel` of one dtype."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype, num_threads: int) -> None:
        self._dtype, self._num_threads = dtype, num_threads
        self._kernels: Mapping[type, Callable[..., None]] = {
            rule: kernel(library, name, "pppnnpnpi", dtype) for rule, name in KERNELS.items()
        }
        self._tables: WeakKeyDictionary[LayerState, tuple[Rule, LayerTable]] = WeakKeyDictionary()

    def __call__(
        self, x: torch.Tensor, rule: Rule, pool: torch.Tensor, state: LayerState, batch: StateBatch
    ) -> torch.Tensor:
        """See `recurrence.RecurrentKernel`."""
        assert x.shape[1] == rule.width, "x has the columns of the rule"
        assert x.dtype == pool.dtype == self._dtype, "x and the pool have the kernels' dtype"
        entry = self._tables.get(state)
        if entry is None or entry[0] is not rule:
            entry = self._tables[state] = (rule, LayerTable(rule, state))
        x = x if x.stride(1) == 1 else x.contiguous()
        out = x.new_empty(len(x), rule.num_out)
        states = BatchTable(batch, pool, len(x))
        self._kernels[type(rule)](
            entry[1].address,
            states.address,
            x.data_ptr(),
            x.stride(0),
            len(x),
            pool.data_ptr(),
            pool.stride(0),
            out.data_ptr(),
            self._num_threads,
        )
        return out


class LayerTable:
    """A rule's struct in C++, with what it points to."""

    def __init__(self, rule: Rule, state: LayerState) -> None:
        weights, numbers = _parts(rule)
        self._tensors = [each.float().contiguous() for each in weights]
        places = [state.head_pages.int().contiguous(), state.head_offsets.int().contiguous()]
        self._tensors += places
        addresses = [tensor.data_ptr() if len(tensor) else 0 for tensor in self._tensors]
        ends = [state.conv_page, state.conv_offset]
        self._table = array("q", [*addresses[:-2], rule.num_kept + 1, *numbers, *addresses[-2:], *ends])

    @property
    def address(self) -> int:
        return self._table.buffer_info()[0]


@singledispatch
def _parts(rule: Rule) -> tuple[Sequence[torch.Tensor], Sequence[int]]:
    """The weights and the other numbers of a rule, in the order of its struct; places of a state follow them."""
    raise TypeError(f"no such rule: {rule}")


@_parts.register
def _(rule: GatedDelta) -> tuple[Sequence[torch.Tensor], Sequence[int]]:
    weights = (rule.taps, rule.decay, rule.dt_bias, rule.norm)
    sizes = (rule.num_channels, rule.num_value_heads, rule.num_value_heads, rule.value_dim)
    _check(weights, sizes)
    return weights, (rule.num_key_heads, rule.num_value_heads, rule.key_dim, rule.value_dim, float_bits(rule.eps))


@_parts.register
def _(rule: ShortConvolution) -> tuple[Sequence[torch.Tensor], Sequence[int]]:
    _check((rule.taps, rule.bias), (rule.num_channels, rule.num_channels))
    return (rule.taps, rule.bias), (rule.num_channels,)


@_parts.register
def _(rule: Mamba) -> tuple[Sequence[torch.Tensor], Sequence[int]]:
    norm = rule.taps.new_empty(0) if rule.norm is None else rule.norm
    weights = (rule.taps, rule.conv_bias, rule.decay, rule.dt_bias, rule.skip, norm)
    heads, channels = rule.num_heads, rule.num_channels
    _check(weights, (channels, channels, heads, heads, heads, 0 if rule.norm is None else rule.num_out))
    shape = (rule.num_heads, rule.num_groups, rule.head_dim, rule.state_size, rule.gates_first)
    return weights, (*shape, *map(float_bits, (rule.eps, *rule.step_limits)))


def _check(weights: Sequence[torch.Tensor], sizes: Sequence[int]) -> None:
    assert all(tensor.shape[-1] == size for tensor, size in zip(weights, sizes, strict=True)), "weights are of shape"


def float_bits(number: float) -> int:
    """The bits of a double as an int64."""
    bits: int = struct.unpack("q", struct.pack("d", number))[0]
    return bits


class BatchTable:
    """A `StateBatch` of `cpp/states.h`, with what it points to."""

    def __init__(self, batch: StateBatch, pool: torch.Tensor, num_rows: int) -> None:
        assert pool.is_contiguous() and pool[0].nbytes % 4 == 0, "a page is a run of whole float32 elements"
        parts = (batch.segment_rows, batch.sequence_segments, batch.source, batch.target)
        rows, segments, source, target = (part.int().contiguous() for part in parts)
        is_fresh = batch.is_fresh.bool().contiguous()
        assert len(rows) == len(source) + 1 == len(target) + 1 == len(is_fresh) + 1, "each segment has rows and pages"
        assert int(rows[-1]) == num_rows and int(segments[-1]) == len(source), "each row and each segment is computed"
        self._tensors = (rows, segments, source, target, is_fresh)
        addresses = [tensor.data_ptr() for tensor in self._tensors]
        sizes = (len(segments) - 1, source.shape[1])
        self._table = array("q", [addresses[0], sizes[0], *addresses[1:4], sizes[1], addresses[4]])

    @property
    def address(self) -> int:
        return self._table.buffer_info()[0]
