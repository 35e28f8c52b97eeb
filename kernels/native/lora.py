"""LoRA over pages, vectors of outputs, and tables of ends, in C++ (`cpp/lora.h`): arguments checked and passed."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from ..lora import LoraGeometry, LoraSegment
from ..model_ends import RowTable
from .build import kernel


@dataclass(frozen=True)
class _Parts:
    """Each segment's part of some modules that share an input: rows are `LoraPart` of cpp/pages.h."""

    table: torch.Tensor  # [num_parts, 11] int64
    length: int  # elements of the shrunk vectors


@dataclass
class NativeLoraBatch:
    """The tables of a batch, made once for each group of modules."""

    geometry: LoraGeometry
    segments: tuple[LoraSegment, ...]
    pages: torch.Tensor  # int64, of all segments
    first_pages: tuple[int, ...]  # by segment
    parts: dict[tuple[int, ...], _Parts] = field(default_factory=dict)


class NativeLora:
    """`lora.LoraKernels` of one dtype."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype, num_threads: int) -> None:
        self._dtype, self._num_threads = dtype, num_threads
        pages = "pnnppn"  # what `_pages` gives
        self._shrink = kernel(library, "lora_shrink", pages + "pnpi", dtype)
        self._expand = kernel(library, "lora_expand", pages + "pnpni", dtype)
        self._add = kernel(library, "lora_add", pages + "pnpnni", dtype)

    def prepare(self, segments: Sequence[LoraSegment], geometry: LoraGeometry, device: torch.device) -> NativeLoraBatch:
        pages = [page for segment in segments for page in segment.adapter.pages]
        first_pages = tuple(accumulate((len(segment.adapter.pages) for segment in segments), initial=0))
        return NativeLoraBatch(geometry, tuple(segments), torch.tensor(pages, dtype=torch.int64), first_pages)

    def add(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        pool: torch.Tensor,
        layer: int,
        batch: NativeLoraBatch,
        modules: tuple[int, ...],
    ) -> None:
        parts = parts_of(batch, modules)
        x = x if x.stride(1) == 1 else x.contiguous()
        assert y.stride(1) == 1 and y.dtype == self._dtype, "y's rows are contiguous and of the kernels' dtype"
        self._add(
            *self._pages(pool, layer, batch, parts),
            x.data_ptr(),
            x.stride(0),
            y.data_ptr(),
            y.stride(0),
            parts.length,
            self._num_threads,
        )

    def shrink(
        self, x: torch.Tensor, pool: torch.Tensor, layer: int, batch: NativeLoraBatch, modules: tuple[int, ...]
    ) -> torch.Tensor:
        parts = parts_of(batch, modules)
        x = x if x.stride(1) == 1 else x.contiguous()
        shrunk = x.new_empty(parts.length)
        self._shrink(
            *self._pages(pool, layer, batch, parts), x.data_ptr(), x.stride(0), shrunk.data_ptr(), self._num_threads
        )
        return shrunk

    def expand(
        self,
        y: torch.Tensor,
        shrunk: torch.Tensor,
        pool: torch.Tensor,
        layer: int,
        batch: NativeLoraBatch,
        modules: tuple[int, ...],
    ) -> None:
        parts = parts_of(batch, modules)
        assert y.stride(1) == 1 and y.dtype == self._dtype, "y's rows are contiguous and of the kernels' dtype"
        shrunk = shrunk.contiguous()
        self._expand(
            *self._pages(pool, layer, batch, parts),
            shrunk.data_ptr(),
            shrunk.stride(0),
            y.data_ptr(),
            y.stride(0),
            self._num_threads,
        )

    def _pages(
        self, pool: torch.Tensor, layer: int, batch: NativeLoraBatch, parts: _Parts
    ) -> tuple[int, int, int, int, int, int]:
        assert pool.dtype == self._dtype and pool.stride(2) == 1, "slabs are contiguous and of the kernels' dtype"
        layer_pointer = pool.data_ptr() + layer * pool.stride(1) * pool.element_size()
        pages, table = batch.pages, parts.table
        return layer_pointer, pool.stride(0), batch.geometry.slab, pages.data_ptr(), table.data_ptr(), table.shape[0]


def parts_of(batch: NativeLoraBatch, modules: tuple[int, ...]) -> _Parts:
    """The table of some modules, made when it is first needed."""
    parts = batch.parts.get(modules)
    if parts is None:
        parts = batch.parts[modules] = _make_parts(batch, modules)
    return parts


def _make_parts(batch: NativeLoraBatch, modules: tuple[int, ...]) -> _Parts:
    rows: list[tuple[int, ...]] = []
    length = 0
    for segment, first_page in zip(batch.segments, batch.first_pages, strict=False):
        column = 0
        for module in modules:
            at, (num_in, num_out) = segment.adapter.modules[module], batch.geometry.sides[module]
            if at.rank:
                place = (segment.start, segment.end, first_page, at.rank, at.a_rows, at.a, at.b)
                rows.append((*place, length, column, num_in, num_out))
                length += (segment.end - segment.start) * at.a_rows
            column += num_out
    return _Parts(torch.tensor(rows, dtype=torch.int64).view(-1, 11), length)


@dataclass
class NativeOutputBatch:
    """The tables of a batch's adapters that have vectors of outputs, made once for each group of modules."""

    geometry: LoraGeometry
    segments: tuple[LoraSegment, ...]
    pages: torch.Tensor  # int64, of all segments
    tables: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)

    def table(self, modules: tuple[int, ...]) -> torch.Tensor:
        """`[num_parts, 11]` int64, rows as in `_Parts`: their `b` is where the vectors start."""
        if modules not in self.tables:
            rows, first_page = list[tuple[int, ...]](), 0
            for segment in self.segments:
                column = 0
                for module in modules:
                    at, (num_in, num_out) = segment.adapter.outputs[module], self.geometry.sides[module]
                    if at is not None:
                        rows.append((segment.start, segment.end, first_page, 2, 0, 0, at, 0, column, num_in, num_out))
                    column += num_out
                first_page += len(segment.adapter.pages)
            self.tables[modules] = torch.tensor(rows, dtype=torch.int64).view(-1, 11)
        return self.tables[modules]


class NativeOutputs:
    """`output_vectors.OutputKernels` of one dtype."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype, num_threads: int) -> None:
        self._dtype, self._num_threads = dtype, num_threads
        self._scale = kernel(library, "scale_outputs", "pnnppnpni", dtype)

    def prepare(
        self, segments: Sequence[LoraSegment], geometry: LoraGeometry, device: torch.device
    ) -> NativeOutputBatch | None:
        having = tuple(segment for segment in segments if segment.adapter.outputs)
        pages = [page for segment in having for page in segment.adapter.pages]
        return NativeOutputBatch(geometry, having, torch.tensor(pages, dtype=torch.int64)) if having else None

    def apply(
        self, y: torch.Tensor, pool: torch.Tensor, layer: int, batch: NativeOutputBatch, modules: tuple[int, ...]
    ) -> None:
        table = batch.table(modules)
        if not len(table):
            return
        assert pool.dtype == self._dtype and pool.stride(2) == 1, "slabs are contiguous and of the kernels' dtype"
        assert y.stride(1) == 1 and y.dtype == self._dtype, "y's rows are contiguous and of the kernels' dtype"
        self._scale(
            pool.data_ptr() + layer * pool.stride(1) * pool.element_size(),
            pool.stride(0),
            batch.geometry.slab,
            batch.pages.data_ptr(),
            table.data_ptr(),
            len(table),
            y.data_ptr(),
            y.stride(0),
            self._num_threads,
        )


class NativeEnds:
    """`model_ends.EndKernels` of one dtype."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype, num_threads: int) -> None:
        self._dtype, self._num_threads = dtype, num_threads
        self._set_columns = kernel(library, "set_columns", "pnnpppnppni", dtype)
        self._expand = kernel(library, "lora_expand", "pnnppnpnpni", dtype)

    def set_columns(self, y: torch.Tensor, x: torch.Tensor, table: RowTable, columns: torch.Tensor) -> None:
        x, columns = x if x.stride(1) == 1 else x.contiguous(), columns.contiguous()
        assert y.dtype == torch.float32 and y.stride(1) == 1 and x.dtype == self._dtype
        assert len(columns) == table.num_rows and columns.dtype == torch.int64
        part = _part(len(x), rank=table.num_rows, a=table.start, num_in=table.width)
        self._set_columns(
            *self._pages(table),
            part.data_ptr(),
            x.data_ptr(),
            x.stride(0),
            columns.data_ptr(),
            y.data_ptr(),
            y.stride(0),
            self._num_threads,
        )

    def add(self, y: torch.Tensor, vectors: torch.Tensor, table: RowTable) -> None:
        vectors = vectors.contiguous()
        assert y.stride(1) == 1 and y.dtype == vectors.dtype == self._dtype
        part = _part(len(y), rank=table.num_rows, b=table.start, num_out=table.width)
        self._expand(
            *self._pages(table),
            part.data_ptr(),
            1,
            vectors.data_ptr(),
            vectors.numel(),
            y.data_ptr(),
            y.stride(0),
            self._num_threads,
        )

    def _pages(self, table: RowTable) -> tuple[int, int, int, int]:
        assert table.pool.dtype == self._dtype and table.pool.stride(1) == 1, "pages are contiguous"
        return table.pool.data_ptr(), table.pool.stride(0), table.pool.shape[1], table.pages.data_ptr()


def _part(num_rows: int, rank: int, a: int = 0, b: int = 0, num_in: int = 0, num_out: int = 0) -> torch.Tensor:
    """A `LoraPart` of cpp/pages.h."""
    return torch.tensor((0, num_rows, 0, rank, rank, a, b, 0, 0, num_in, num_out), dtype=torch.int64)
