"""LoRA over pages in plain torch: the twin that the fast kernels are compared with.

Short segments are stacked: the A rows of several adapters become one matrix, one product serves them all, and a mask
keeps of each row its own adapter's part. Pages are read by tiles, so a stack is one gather.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from .lora import LoraGeometry, LoraSegment, PagedAdapter

_STACKED_ROWS = 8  # rows of a stack, at most, unless one segment alone has more


@dataclass(frozen=True)
class _Stack:
    start: int
    end: int
    segments: tuple[LoraSegment, ...]


@dataclass(frozen=True)
class _Part:
    """A stack's view of some modules that share an input."""

    start: int
    end: int
    a_tiles: torch.Tensor  # [num_ranks * in / tile], tile indices in layer 0
    mask: torch.Tensor | None  # [rows, num_ranks], true where a rank is another adapter's; None: one segment alone
    outputs: tuple[tuple[slice, slice, torch.Tensor], ...]  # columns of y, columns of shrunk, tiles of B
    num_ranks: int


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

    def shrink(
        self, x: torch.Tensor, pool: torch.Tensor, layer: int, batch: TorchLoraBatch, modules: tuple[int, ...]
    ) -> torch.Tensor:
        parts = _parts(batch, modules)
        shrunk = x.new_empty(sum((part.end - part.start) * part.num_ranks for part in parts))
        tiles = pool.view(-1, batch.geometry.tile)
        for part, piece in zip(parts, _pieces(shrunk, parts), strict=True):
            if part.num_ranks == 0:
                continue
            a = _gather(tiles, part.a_tiles, layer, batch.geometry).view(part.num_ranks, -1)
            torch.mm(x[part.start : part.end], a.t(), out=piece)
            if part.mask is not None:
                piece.masked_fill_(part.mask, 0)
        return shrunk

    def expand(
        self,
        y: torch.Tensor,
        shrunk: torch.Tensor,
        pool: torch.Tensor,
        layer: int,
        batch: TorchLoraBatch,
        modules: tuple[int, ...],
    ) -> None:
        parts = _parts(batch, modules)
        tiles = pool.view(-1, batch.geometry.tile)
        for part, piece in zip(parts, _pieces(shrunk, parts), strict=True):
            for columns, ranks, b_tiles in part.outputs:
                b = _gather(tiles, b_tiles, layer, batch.geometry).view(ranks.stop - ranks.start, -1)
                y[part.start : part.end, columns].addmm_(piece[:, ranks], b)


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
    tile, sides = batch.geometry.tile, batch.geometry.sides
    a_tiles: list[torch.Tensor] = []
    outputs: list[tuple[slice, slice, torch.Tensor]] = []
    ranks: list[tuple[LoraSegment, int]] = []
    column = num_ranks = 0
    for module in modules:
        num_in, num_out = sides[module]
        first, b_tiles = num_ranks, []
        for segment in stack.segments:
            found, tile_map = segment.adapter.modules[module], maps[id(segment.adapter)]
            a_tiles.append(tile_map[found.a // tile : (found.a + found.rank * num_in) // tile])
            b_tiles.append(tile_map[found.b // tile : (found.b + found.rank * num_out) // tile])
            ranks.append((segment, found.rank))
            num_ranks += found.rank
        if num_ranks > first:
            b_index = torch.cat(b_tiles).to(batch.device)
            outputs.append((slice(column, column + num_out), slice(first, num_ranks), b_index))
        column += num_out
    return _Part(
        stack.start,
        stack.end,
        torch.cat(a_tiles).to(batch.device),
        _mask(stack, ranks).to(batch.device) if len(stack.segments) > 1 else None,
        tuple(outputs),
        num_ranks,
    )


def _tile_map(adapter: PagedAdapter, geometry: LoraGeometry) -> torch.Tensor:
    """Tile of the pool (at layer 0) for each tile of the adapter's virtual array."""
    tiles_per_slab = geometry.slab // geometry.tile
    pages = torch.tensor(adapter.pages, dtype=torch.int64) * (tiles_per_slab * geometry.num_layers)
    return (pages.unsqueeze(1) + torch.arange(tiles_per_slab)).flatten()


def _mask(stack: _Stack, ranks: list[tuple[LoraSegment, int]]) -> torch.Tensor:
    """True where a rank is not of the row's own adapter, `[rows, num_ranks]`."""
    rows = torch.arange(stack.start, stack.end).unsqueeze(1)
    columns = [((rows < s.start) | (rows >= s.end)).expand(-1, rank) for s, rank in ranks]
    return torch.cat(columns, dim=1)


def _gather(tiles: torch.Tensor, index: torch.Tensor, layer: int, geometry: LoraGeometry) -> torch.Tensor:
    return tiles.index_select(0, index + layer * (geometry.slab // geometry.tile))


def _pieces(shrunk: torch.Tensor, parts: tuple[_Part, ...]) -> Iterator[torch.Tensor]:
    start = 0
    for part in parts:
        rows, end = part.end - part.start, start + (part.end - part.start) * part.num_ranks
        yield shrunk[start:end].view(rows, part.num_ranks)
        start = end
