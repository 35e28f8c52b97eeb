"""LoRA over pages in plain torch: the twin that the fast kernels are compared with.

Short segments are stacked: the A rows of several adapters become one matrix, one product serves them all, and of each
row its own adapter's part is kept. Pages are read by tiles, so a stack is one gather.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from ..lora import LoraGeometry, LoraSegment, ModuleSlice, PagedAdapter

_STACKED_ROWS = 8  # rows of a stack, at most, unless one segment alone has more


@dataclass(frozen=True)
class _Stack:
    start: int
    end: int
    segments: tuple[LoraSegment, ...]


@dataclass(frozen=True)
class _Output:
    """One module's share of y in a stack."""

    columns: slice  # of y
    ranks: slice  # of a part's stacked ranks
    b_tiles: torch.Tensor  # of the rows of B, in the order of the gathered parts


@dataclass(frozen=True)
class _Part:
    """A stack's view of some modules that share an input."""

    start: int
    end: int
    a_tiles: torch.Tensor  # [num_ranks * in / tile], tile indices in layer 0
    own: torch.Tensor | None  # positions in [rows, num_ranks] of each row's own adapter; None: all, there is but one
    outputs: tuple[_Output, ...]
    num_ranks: int  # rows of A here, of all modules and adapters
    length: int  # of what is shrunk


@dataclass
class TorchLoraBatch:
    """The tile indices of a batch, worked out once for each group of modules."""

    geometry: LoraGeometry
    device: torch.device
    stacks: tuple[_Stack, ...]
    parts: dict[tuple[int, ...], tuple[_Part, ...]] = field(default_factory=dict)


class TorchLora:
    """`lora.LoraKernels` for any device."""

    def prepare(self, segments: Sequence[LoraSegment], geometry: LoraGeometry, device: torch.device) -> TorchLoraBatch:
        return TorchLoraBatch(geometry, device, tuple(_stacks(segments)))

    def add(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        pool: torch.Tensor,
        layer: int,
        batch: TorchLoraBatch,
        modules: tuple[int, ...],
    ) -> None:
        self.expand(y, self.shrink(x, pool, layer, batch, modules).unsqueeze(0), pool, layer, batch, modules)

    def shrink(
        self, x: torch.Tensor, pool: torch.Tensor, layer: int, batch: TorchLoraBatch, modules: tuple[int, ...]
    ) -> torch.Tensor:
        tiles, shrunk = pool.view(-1, batch.geometry.tile), []
        for part in _parts(batch, modules):
            if part.num_ranks == 0:
                continue
            a = _gather(tiles, part.a_tiles, layer, batch.geometry).view(part.num_ranks, -1)
            product = torch.mm(x[part.start : part.end], a.t()).flatten()
            shrunk.append(product if part.own is None else product[part.own])
        return torch.cat(shrunk) if shrunk else x.new_empty(0)

    def expand(
        self,
        y: torch.Tensor,
        shrunk: torch.Tensor,
        pool: torch.Tensor,
        layer: int,
        batch: TorchLoraBatch,
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
                own = stacked[:, :, output.ranks].transpose(0, 1).flatten(1)  # [rows, parts * ranks]
                y[part.start : part.end, output.columns].addmm_(own, b)


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


def _parts(batch: TorchLoraBatch, modules: tuple[int, ...]) -> tuple[_Part, ...]:
    found = batch.parts.get(modules)
    if found is None:
        maps = {id(s.adapter): _tile_map(s.adapter, batch.geometry) for stack in batch.stacks for s in stack.segments}
        found = tuple(_part(stack, modules, maps, batch) for stack in batch.stacks)
        batch.parts[modules] = found
    return found


def _part(stack: _Stack, modules: tuple[int, ...], maps: dict[int, torch.Tensor], batch: TorchLoraBatch) -> _Part:
    tile = batch.geometry.tile
    a_tiles: list[torch.Tensor] = []
    outputs: list[_Output] = []
    owners: list[tuple[LoraSegment, int]] = []
    column = num_ranks = 0
    for module in modules:
        num_in, num_out = batch.geometry.sides[module]
        first, slices = num_ranks, []
        for segment in stack.segments:
            found, tile_map = segment.adapter.modules[module], maps[id(segment.adapter)]
            a_tiles.append(tile_map[found.a // tile : (found.a + found.a_rows * num_in) // tile])
            owners.append((segment, found.a_rows))
            slices.append((found, tile_map))
            num_ranks += found.a_rows
        if num_ranks > first:
            b_tiles = torch.cat(list(_b_tiles(slices, num_out // tile, tile))).to(batch.device)
            outputs.append(_Output(slice(column, column + num_out), slice(first, num_ranks), b_tiles))
        column += num_out
    own = _own(stack, owners).to(batch.device) if len(stack.segments) > 1 else None
    length = (stack.end - stack.start) * num_ranks if own is None else len(own)
    a_index = torch.cat(a_tiles).to(batch.device)
    return _Part(stack.start, stack.end, a_index, own, tuple(outputs), num_ranks, length)


def _b_tiles(slices: list[tuple[ModuleSlice, torch.Tensor]], tiles_per_row: int, tile: int) -> Iterator[torch.Tensor]:
    """Tiles of B's rows as they meet the gathered vectors: part by part, in each part adapter by adapter."""
    num_parts = max(found.rank // found.a_rows for found, _ in slices if found.rank)
    for part in range(num_parts):
        for found, tile_map in slices:
            first = found.b // tile + part * found.a_rows * tiles_per_row
            yield tile_map[first : first + found.a_rows * tiles_per_row]


def _tile_map(adapter: PagedAdapter, geometry: LoraGeometry) -> torch.Tensor:
    """Tile of the pool (at layer 0) for each tile of the adapter's virtual array."""
    tiles_per_slab = geometry.slab // geometry.tile
    pages = torch.tensor(adapter.pages, dtype=torch.int64) * (tiles_per_slab * geometry.num_layers)
    return (pages.unsqueeze(1) + torch.arange(tiles_per_slab)).flatten()


def _own(stack: _Stack, owners: list[tuple[LoraSegment, int]]) -> torch.Tensor:
    """Positions in `[rows, num_ranks]`, flattened, where a row's own adapter has its ranks."""
    rows = torch.arange(stack.start, stack.end).unsqueeze(1)
    columns = [((rows >= s.start) & (rows < s.end)).expand(-1, rank) for s, rank in owners]
    return torch.cat(columns, dim=1).flatten().nonzero().squeeze(1)


def _stacked(shrunk: torch.Tensor, part: _Part) -> torch.Tensor:
    """The vectors `[num_parts, length]` in their places among zeros, `[num_parts, rows, num_ranks]`."""
    num_parts, rows = len(shrunk), part.end - part.start
    if part.own is None:
        return shrunk.view(num_parts, rows, part.num_ranks)
    placed = shrunk.new_zeros(num_parts, rows * part.num_ranks)
    placed[:, part.own] = shrunk
    return placed.view(num_parts, rows, part.num_ranks)


def _gather(tiles: torch.Tensor, index: torch.Tensor, layer: int, geometry: LoraGeometry) -> torch.Tensor:
    return tiles.index_select(0, index + layer * (geometry.slab // geometry.tile))
