"""Gated DeltaNet in C++ (`cpp/gated_delta.h`): checks and passes the arguments."""

from __future__ import annotations

import ctypes
import struct
from array import array
from weakref import WeakKeyDictionary

import torch

from ..gated_delta import GatedDelta, LayerState, StateBatch
from .build import kernel


class NativeGatedDelta:
    """`gated_delta.GatedDeltaKernel` of one dtype."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype, num_threads: int) -> None:
        self._dtype, self._num_threads = dtype, num_threads
        self._kernel = kernel(library, "gated_delta", "pppnnpnpi", dtype)
        self._tables: WeakKeyDictionary[LayerState, tuple[GatedDelta, LayerTable]] = WeakKeyDictionary()

    def __call__(
        self, x: torch.Tensor, layer: GatedDelta, pool: torch.Tensor, state: LayerState, batch: StateBatch
    ) -> torch.Tensor:
        """See `gated_delta.GatedDeltaKernel`."""
        assert x.shape[1] == layer.width, "x is q | k | v | z | b | a"
        assert x.dtype == pool.dtype == self._dtype, "x and the pool have the kernels' dtype"
        entry = self._tables.get(state)
        if entry is None or entry[0] is not layer:
            entry = self._tables[state] = (layer, LayerTable(layer, state))
        x = x if x.stride(1) == 1 else x.contiguous()
        out = x.new_empty(len(x), layer.num_value_heads * layer.value_dim)
        states = BatchTable(batch, pool, len(x))
        self._kernel(
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
    """A `DeltaLayer` of `cpp/gated_delta.h`, with what it points to."""

    def __init__(self, layer: GatedDelta, state: LayerState) -> None:
        shape = (layer.num_key_heads, layer.num_value_heads, layer.key_dim, layer.value_dim)
        weights = [layer.taps, *(each.float().contiguous() for each in (layer.decay, layer.dt_bias, layer.norm))]
        sizes = (layer.num_channels, layer.num_value_heads, layer.num_value_heads, layer.value_dim)
        assert all(tensor.shape[-1] == size for tensor, size in zip(weights, sizes, strict=True)), (
            "weights are of shape"
        )
        places = [state.head_pages.int().contiguous(), state.head_offsets.int().contiguous()]
        assert all(len(tensor) == layer.num_value_heads for tensor in places), "each head has a place"
        self._tensors = weights + places
        eps: int = struct.unpack("q", struct.pack("d", layer.eps))[0]
        addresses = [tensor.data_ptr() for tensor in self._tensors]
        numbers = [*addresses[:4], eps, layer.num_kept + 1, *shape, *addresses[4:], state.conv_page, state.conv_offset]
        self._table = array("q", numbers)

    @property
    def address(self) -> int:
        return self._table.buffer_info()[0]


class BatchTable:
    """A `DeltaBatch` of `cpp/gated_delta.h`, with what it points to."""

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
