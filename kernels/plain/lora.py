"""LoRA over pages in plain torch: the plain twin, which the fast kernels are tested against.

Short segments are stacked: the rows of A of several adapters become one matrix, which is multiplied once with all rows
of these segments; of each row's products only those with its own adapter are kept. Pages are read in tiles, so that one
gather reads the matrices of a whole stack.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from ..lora import LoraGeometry, LoraSegment, ModuleSlice, PagedAdapter

_STACKED_ROWS = 8  # the most rows of a stack, except that one segment may have more by itself


@dataclass(frozen=True)
class _Stack:
    """Neighbouring segments that are computed together: rows `start : end`."""

    start: int
    end: int
    segments: tuple[LoraSegment, ...]


@dataclass(frozen=True)
class _Output:
    """The output of one module in a stack."""

    columns: slice  # of y
    ranks: slice  # of the part's ranks
    b_tiles: torch.Tensor  # tile indices of the rows of B in layer 0, in the order of the gathered vectors


@dataclass(frozen=True)
class _Part:
    """A stack and some modules that share an input."""

    start: int
    end: int
    a_tiles: torch.Tensor  # [num_ranks * in / tile], tile indices in layer 0
    rank_index: (
        torch.Tensor | None
    )  # which of [rows, num_ranks] belong to a row's own adapter; None: all, of one adapter
    outputs: tuple[_Output, ...]
    num_ranks: int  # rows of A of all modules and adapters of the stack
    length: int  # elements of the shrunk vectors


@dataclass
class PlainLoraBatch:
    """The tile indices of a batch, computed once for each group of modules."""

    geometry: LoraGeometry
    device: torch.device
    stacks: tuple[_Stack, ...]
    parts: dict[tuple[int, ...], tuple[_Part, ...]] = field(default_factory=dict)


class PlainLora:
    """`lora.LoraKernels` for any device."""

    def prepare(self, segments: Sequence[LoraSegment], geometry: LoraGeometry, device: torch.device) -> PlainLoraBatch:
        return PlainLoraBatch(geometry, device, tuple(_stacks(segments)))

    def add(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        pool: torch.Tensor,
        layer: int,
        batch: PlainLoraBatch,
        modules: tuple[int, ...],
    ) -> None:
        self.expand(y, self.shrink(x, pool, layer, batch, modules).unsqueeze(0), pool, layer, batch, modules)

    def shrink(
        self, x: torch.Tensor, pool: torch.Tensor, layer: int, batch: PlainLoraBatch, modules: tuple[int, ...]
    ) -> torch.Tensor:
        tiles, shrunk = pool.view(-1, batch.geometry.tile), []
        for part in _parts(batch, modules):
            if part.num_ranks == 0:
                continue
            a = _gather(tiles, part.a_tiles, layer, batch.geometry).view(part.num_ranks, -1)
            product = torch.mm(x[part.start : part.end], a.t()).flatten()
            shrunk.append(product if part.rank_index is None else product[part.rank_index])
        return torch.cat(shrunk) if shrunk else x.new_empty(0)

    def expand(
        self,
        y: torch.Tensor,
        shrunk: torch.Tensor,
        pool: torch.Tensor,
        layer: int,
        batch: PlainLoraBatch,
        modules: tuple[int, ...],
    ) -> None:
        tiles, start = pool.view(-1, batch.geometry.tile), 0
        for part in _parts(batch, modules):
            stacked = _stacked(shrunk[:, start : start + part.length], part)
            start += part.length
            for output in part.outputs:
                b = _gather(tiles, output.b_tiles, layer, batch.geometry).view(
                    -1, output.columns.stop - output.columns.start
                )
                vectors = stacked[:, :, output.ranks].transpose(0, 1).flatten(1)  # [rows, parts * ranks]
                y[part.start : part.end, output.columns].addmm_(vectors, b)


def _stacks(segments: Sequence[LoraSegment]) -> Iterator[_Stack]:
    pending: list[LoraSegment] = []
    for segment in segments:
        touches = pending and pending[-1].end == segment.start
        if pending and (not touches or segment.end - pending[0].start > _STACKED_ROWS):
            yield _Stack(pending[0].start, pending[-1].end, tuple(pending))
            pending = []
        pending.append(segment)
    if pending:
        yield _Stack(pending[0].start, pending[-1].end, tuple(pending))


def _parts(batch: PlainLoraBatch, modules: tuple[int, ...]) -> tuple[_Part, ...]:
    parts = batch.parts.get(modules)
    if parts is None:
        maps = {id(s.adapter): _tile_map(s.adapter, batch.geometry) for stack in batch.stacks for s in stack.segments}
        parts = tuple(_part(stack, modules, maps, batch) for stack in batch.stacks)
        batch.parts[modules] = parts
    return parts


def _part(stack: _Stack, modules: tuple[int, ...], maps: dict[int, torch.Tensor], batch: PlainLoraBatch) -> _Part:
    tile = batch.geometry.tile
    a_tiles: list[torch.Tensor] = []
    outputs: list[_Output] = []
    owners: list[tuple[LoraSegment, int]] = []
    column = num_ranks = 0
    for module in modules:
        num_in, num_out = batch.geometry.sides[module]
        first, slices = num_ranks, []
        for segment in stack.segments:
            place, tile_map = segment.adapter.modules[module], maps[id(segment.adapter)]
            a_tiles.append(tile_map[place.a // tile : (place.a + place.a_rows * num_in) // tile])
            owners.append((segment, place.a_rows))
            slices.append((place, tile_map))
            num_ranks += place.a_rows
        if num_ranks > first:
            b_tiles = torch.cat(list(_b_tiles(slices, num_out // tile, tile))).to(batch.device)
            outputs.append(_Output(slice(column, column + num_out), slice(first, num_ranks), b_tiles))
        column += num_out
    rank_index = _rank_index(stack, owners).to(batch.device) if len(stack.segments) > 1 else None
    length = (stack.end - stack.start) * num_ranks if rank_index is None else len(rank_index)
    a_index = torch.cat(a_tiles).to(batch.device)
    return _Part(stack.start, stack.end, a_index, rank_index, tuple(outputs), num_ranks, length)


def _b_tiles(slices: list[tuple[ModuleSlice, torch.Tensor]], tiles_per_row: int, tile: int) -> Iterator[torch.Tensor]:
    """Tiles of the rows of B in the order of the gathered vectors: worker by worker, then adapter by adapter."""
    num_parts = max(place.rank // place.a_rows for place, _ in slices if place.rank)
    for part in range(num_parts):
        for place, tile_map in slices:
            first = place.b // tile + part * place.a_rows * tiles_per_row
            yield tile_map[first : first + place.a_rows * tiles_per_row]


def _tile_map(adapter: PagedAdapter, geometry: LoraGeometry) -> torch.Tensor:
    """For each tile of the adapter's virtual array its index in the pool, in layer 0."""
    tiles_per_slab = geometry.slab // geometry.tile
    pages = torch.tensor(adapter.pages, dtype=torch.int64) * (tiles_per_slab * geometry.num_layers)
    return (pages.unsqueeze(1) + torch.arange(tiles_per_slab)).flatten()


def _rank_index(stack: _Stack, owners: list[tuple[LoraSegment, int]]) -> torch.Tensor:
    """Indices into `[rows, num_ranks]`, flattened, of the ranks that belong to each row's own adapter."""
    rows = torch.arange(stack.start, stack.end).unsqueeze(1)
    columns = [((rows >= s.start) & (rows < s.end)).expand(-1, rank) for s, rank in owners]
    return torch.cat(columns, dim=1).flatten().nonzero().squeeze(1)


def _stacked(shrunk: torch.Tensor, part: _Part) -> torch.Tensor:
    """The vectors `[num_parts, length]` as `[num_parts, rows, num_ranks]`, zero at the ranks of other adapters."""
    num_parts, rows = len(shrunk), part.end - part.start
    if part.rank_index is None:
        return shrunk.view(num_parts, rows, part.num_ranks)
    placed = shrunk.new_zeros(num_parts, rows * part.num_ranks)
    placed[:, part.rank_index] = shrunk
    return placed.view(num_parts, rows, part.num_ranks)


def _gather(tiles: torch.Tensor, index: torch.Tensor, layer: int, geometry: LoraGeometry) -> torch.Tensor:
    return tiles.index_select(0, index + layer * (geometry.slab // geometry.tile))
