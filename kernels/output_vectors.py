"""Scales and shifts of linears' outputs by each row's own adapter: the contract, and its plain twin for any device.

y becomes y * (1 + gain) + shift, computed in float32. An adapter's gain and shift `[2, out]` of a module lie in its
pages, as `adapters/packing/layout.py` describes: zeros leave the outputs as they are. DoRA (arXiv 2402.09353), IA3
(arXiv 2205.05638) and trained biases are such vectors. A row's result depends on nothing but the row and its adapter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from .lora import LoraGeometry, LoraSegment
from .staging import staged

OutputBatch = Any  # what `prepare` computes once for all layers of a batch; opaque to the caller


class OutputKernels(Protocol):
    def prepare(
        self, segments: Sequence[LoraSegment], geometry: LoraGeometry, device: torch.device
    ) -> OutputBatch | None:
        """The batch for `apply`; None: no row's adapter has such vectors. `segments`: as for `LoraKernels.prepare`."""

    def apply(
        self, y: torch.Tensor, pool: torch.Tensor, layer: int, batch: OutputBatch, modules: tuple[int, ...]
    ) -> None:
        """Scales and shifts y `[num_rows, sum of out]` in place. `modules` lie side by side in it."""


@dataclass(frozen=True)
class _ModuleVectors:
    """The adapters of a batch that have vectors of one module."""

    ranges: tuple[tuple[int, int, int], ...]  # start and stop of rows, and their adapter, where a segment has several
    runs: torch.Tensor  # [num_adapters * runs], where runs of `tile` elements of their vectors begin in layer 0
    rows: torch.Tensor  # of segments of one row, int64
    adapters: torch.Tensor  # of these rows, int64


@dataclass(frozen=True)
class _Vectors:
    """The vectors of a batch's adapters, by module index."""

    geometry: LoraGeometry
    modules: Mapping[int, _ModuleVectors]


class PlainOutputs:
    """`OutputKernels` in plain torch, for any device."""

    def prepare(self, segments: Sequence[LoraSegment], geometry: LoraGeometry, device: torch.device) -> _Vectors | None:
        scaled = [segment for segment in segments if segment.adapter.outputs]
        if not scaled:
            return None
        tables = {module: _tables(scaled, module, geometry) for module in range(len(geometry.sides))}
        numbers = [torch.tensor(part, dtype=torch.int64) for table in tables.values() for part in table[1:]]
        moved = iter(staged(device, *numbers))
        vectors = {
            module: _ModuleVectors(ranges, next(moved), next(moved), next(moved))
            for module, (ranges, *_) in tables.items()
        }
        return _Vectors(geometry, {module: each for module, each in vectors.items() if len(each.runs)})

    def apply(self, y: torch.Tensor, pool: torch.Tensor, layer: int, batch: _Vectors, modules: tuple[int, ...]) -> None:
        column, geometry = 0, batch.geometry
        for module in modules:
            width = geometry.sides[module][1]
            vectors, columns = batch.modules.get(module), slice(column, column + width)
            column += width
            if vectors is None:
                continue
            runs = vectors.runs + layer * (geometry.slab // geometry.tile)
            table = pool.view(-1, geometry.tile).index_select(0, runs).view(-1, 2, width).float()
            for start, stop, adapter in vectors.ranges:
                rows = y[start:stop, columns]
                gain, shift = table[adapter]
                rows.copy_(_scaled(rows, gain, shift))
            if len(vectors.rows):
                gain, shift = table.index_select(0, vectors.adapters).unbind(1)
                y[vectors.rows, columns] = _scaled(y[vectors.rows, columns], gain, shift).to(y.dtype)


def _scaled(y: torch.Tensor, gain: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    wide = y.float()
    return torch.addcmul(wide, wide, gain).add_(shift)


def _tables(
    segments: Sequence[LoraSegment], module: int, geometry: LoraGeometry
) -> tuple[tuple[tuple[int, int, int], ...], list[int], list[int], list[int]]:
    """The fields of `_ModuleVectors`."""
    runs, ranges, rows, adapters = list[int](), list[tuple[int, int, int]](), list[int](), list[int]()
    scaled = [segment for segment in segments if segment.adapter.outputs[module] is not None]
    for index, segment in enumerate(scaled):
        runs += _runs(segment, module, geometry)
        if segment.end - segment.start > 1:
            ranges.append((segment.start, segment.end, index))
        else:
            rows.append(segment.start)
            adapters.append(index)
    return tuple(ranges), runs, rows, adapters


def _runs(segment: LoraSegment, module: int, geometry: LoraGeometry) -> Iterator[int]:
    """Where each run of `tile` elements of a segment's vectors lies in the pool, in tiles, in layer 0."""
    start = segment.adapter.outputs[module]
    assert start is not None, "only segments that have such vectors"
    tiles = geometry.slab // geometry.tile  # of a slab
    for at in range(start, start + 2 * geometry.sides[module][1], geometry.tile):
        page, within = divmod(at, geometry.slab)
        yield segment.adapter.pages[page] * geometry.num_layers * tiles + within // geometry.tile
