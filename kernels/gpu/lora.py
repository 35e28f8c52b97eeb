"""LoRA over pages in Triton, the host side: a batch's tables. The device side is `lora_device.py`."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain

import torch

from ..lora import LoraGeometry, LoraSegment
from ..plain.lora import PlainLora, PlainLoraBatch
from ..staging import staged
from .lora_device import expand_kernel, shrink_kernel
from .tile_sizes import next_power_of_2

log = logging.getLogger(__name__)

LEAST_TILE = 16  # fewest elements of a row that a matrix instruction takes
_SHORT_TILE, _TALL_TILE = 16, 64  # rows
_MOST_MODULES = 4  # that share an input, as those of Gated DeltaNet do
_ROWS_OF_SHORT_TILES = 256  # most rows of a segment in short tiles; for more, tall tiles read its matrices less often


@dataclass(frozen=True)
class LoraTuning:
    """Sizes that change the speed, and the result only by rounding. `benchmarks/gpu/sweep.py` times other values."""

    programs: int = 1056  # aimed at in a shrink launch: eight for each of an H100's 132 multiprocessors
    most_splits: int = 8  # of a shrink, whose partial sums the expand reads; half as many for long segments
    shrink_width: int = 128  # columns of x at a time
    row_width: int = 256  # likewise, for a tile of a single row
    shrink_stages: int = 4  # tiles that are loaded ahead, by software pipelining
    expand_programs: int = 1056  # of an expand launch, and at least one for each tile and module
    expand_width: int = 128  # columns of y at a time
    expand_stages: int = 4


@dataclass(frozen=True)
class _Launches:
    """What the launches for some modules of a batch have in common in all layers."""

    splits: int
    shrink_grid: tuple[int, int]
    shrink: dict[str, int]  # constants and options
    expand_grid: tuple[int]
    expand: dict[str, int]


@dataclass(frozen=True)
class TritonLoraBatch:
    """A batch's tables on the device, as `lora_device.py` describes them."""

    geometry: LoraGeometry
    num_tiles: torch.Tensor  # [1] int64, how many of `tiles` are in use
    tiles: torch.Tensor  # [room, 3] int64
    parts: torch.Tensor  # [num_segments, num_modules, 4] int64
    first_pages: torch.Tensor  # [num_segments] int64
    pages: torch.Tensor  # int64
    tile_rows: int
    ranks: int  # elements reserved for the rank-sized vector of a row and module, a multiple of 16
    launches: dict[tuple[int, ...], _Launches] = field(default_factory=dict, init=False)  # by modules

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.num_tiles, self.tiles, self.parts, self.first_pages, self.pages


class TritonLora:
    """`lora.CapturableLora`. The plain twin serves, with one warning, where rows have no runs of 16 elements."""

    def __init__(self, tuning: LoraTuning | None = None) -> None:
        self._tuning, self._twin = tuning or LoraTuning(), PlainLora()
        self._has_warned = False

    def prepare(
        self, segments: Sequence[LoraSegment], geometry: LoraGeometry, device: torch.device
    ) -> TritonLoraBatch | PlainLoraBatch:
        if tile_width(geometry) < LEAST_TILE:
            if not self._has_warned:
                log.warning("plain torch LoRA serves, several times slower: no runs of 16 elements in pages and rows")
            self._has_warned = True
            return self._twin.prepare(segments, geometry, device)
        longest = max((segment.end - segment.start for segment in segments), default=0)
        tile_rows = tile_rows_of(longest)
        tiles = [
            (row, min(tile_rows, segment.end - row), index)
            for index, segment in enumerate(segments)
            for row in range(segment.start, segment.end, tile_rows)
        ]
        slices = [at for segment in segments for at in segment.adapter.modules]
        first_pages = accumulate((len(segment.adapter.pages) for segment in segments[:-1]), initial=0)
        tables = (
            [len(tiles)],
            [number for tile in tiles for number in tile],
            [number for at in slices for number in (at.rank, at.a_rows, at.a, at.b)],
            list(first_pages)[: len(segments)],
            [page for segment in segments for page in segment.adapter.pages],
        )
        (flat,) = staged(device, torch.frombuffer(array("q", chain(*tables)), dtype=torch.int64))
        num_tiles, on_tiles, on_parts, on_first_pages, on_pages = torch.split(flat, [len(table) for table in tables])
        ranks = ranks_of(max((at.a_rows for at in slices), default=0))
        return TritonLoraBatch(
            geometry,
            num_tiles,
            on_tiles.view(-1, 3),
            on_parts.view(-1, len(geometry.sides), 4),
            on_first_pages,
            on_pages,
            tile_rows=tile_rows,
            ranks=ranks,
        )

    def reserve(
        self,
        num_rows: int,
        num_segments: int,
        num_pages: int,
        ranks: int,
        geometry: LoraGeometry,
        device: torch.device,
    ) -> TritonLoraBatch | None:
        """See `lora.CapturableLora`. None: rows of this base cannot be cut into runs of 16 elements."""
        if tile_width(geometry) < LEAST_TILE:
            return None

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        modules, num_tiles = len(geometry.sides), _most_tiles(num_rows, num_segments)
        tables = zeros(1), zeros(num_tiles, 3), zeros(num_segments, modules, 4), zeros(num_segments), zeros(num_pages)
        return TritonLoraBatch(geometry, *tables, tile_rows_of(num_rows), ranks_of(ranks))

    def part(self, reserved: TritonLoraBatch, num_rows: int, num_segments: int) -> TritonLoraBatch:
        """See `lora.CapturableLora`."""
        return replace(
            reserved,
            tiles=reserved.tiles[: _most_tiles(num_rows, num_segments)],
            parts=reserved.parts[:num_segments],
            first_pages=reserved.first_pages[:num_segments],
            tile_rows=tile_rows_of(num_rows),
        )

    def refill(self, reserved: TritonLoraBatch, batch: TritonLoraBatch | PlainLoraBatch | None) -> bool:
        """See `lora.CapturableLora`."""
        if batch is None:
            reserved.num_tiles.zero_()
            reserved.tiles.zero_()
            return True
        if isinstance(batch, PlainLoraBatch) or batch.ranks > reserved.ranks or batch.tile_rows > reserved.tile_rows:
            return False
        if not copy_to_front(batch.tensors, reserved.tensors):
            return False
        reserved.tiles[len(batch.tiles) :].zero_()
        return True

    def add(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        pool: torch.Tensor,
        layer: int,
        batch: TritonLoraBatch | PlainLoraBatch,
        modules: tuple[int, ...],
    ) -> None:
        self.expand(y, self.shrink(x, pool, layer, batch, modules).unsqueeze(0), pool, layer, batch, modules)

    def shrink(
        self,
        x: torch.Tensor,
        pool: torch.Tensor,
        layer: int,
        batch: TritonLoraBatch | PlainLoraBatch,
        modules: tuple[int, ...],
    ) -> torch.Tensor:
        if isinstance(batch, PlainLoraBatch):
            return self._twin.shrink(x, pool, layer, batch, modules)
        x = x if x.stride(1) == 1 else x.contiguous()
        launches, num_rows = self._launches_of(batch, modules), x.shape[0]
        length = len(modules) * launches.splits * num_rows * batch.ranks
        shrunk = torch.empty(length, dtype=torch.float32, device=x.device)
        if launches.shrink_grid[0]:
            shrink_kernel[launches.shrink_grid](
                x,
                pool.select(1, layer),
                *batch.tensors[1:],
                shrunk,
                x.stride(0),
                pool.stride(0),
                num_rows,
                batch.ranks,
                **launches.shrink,
                PRECISION=_precision(x),
            )
        return shrunk

    def expand(
        self,
        y: torch.Tensor,
        shrunk: torch.Tensor,
        pool: torch.Tensor,
        layer: int,
        batch: TritonLoraBatch | PlainLoraBatch,
        modules: tuple[int, ...],
    ) -> None:
        if isinstance(batch, PlainLoraBatch):
            self._twin.expand(y, shrunk, pool, layer, batch, modules)
            return
        assert y.stride(1) == 1 and shrunk.stride(1) == 1, "rows are contiguous"
        launches = self._launches_of(batch, modules)
        if launches.expand_grid[0]:
            expand_kernel[launches.expand_grid](
                y,
                shrunk,
                pool.select(1, layer),
                *batch.tensors,
                y.stride(0),
                pool.stride(0),
                y.shape[0],
                batch.ranks,
                shrunk.shape[0],
                shrunk.stride(0),
                **launches.expand,
                PRECISION=_precision(y),
            )

    def _launches_of(self, batch: TritonLoraBatch, modules: tuple[int, ...]) -> _Launches:
        """Made once for all layers of a batch, which this object has made."""
        launches = batch.launches.get(modules)
        if launches is None:
            launches = batch.launches[modules] = self._make_launches(batch, modules)
        return launches

    def _make_launches(self, batch: TritonLoraBatch, modules: tuple[int, ...]) -> _Launches:
        assert len(modules) <= _MOST_MODULES, "at most four modules share an input"
        tuning, widest, num_modules = self._tuning, tile_width(batch.geometry), len(modules)
        num_in = batch.geometry.sides[modules[0]][0]
        outputs = [batch.geometry.sides[module][1] for module in modules]
        run, width = min(widest, tuning.row_width), min(widest, tuning.expand_width)
        pairs = len(batch.tiles) * num_modules
        splits = self._num_splits(pairs, batch.tile_rows, num_in // run)
        shared = {
            **{f"MODULE_{slot}": modules[min(slot, num_modules - 1)] for slot in range(_MOST_MODULES)},
            "SLOTS": num_modules,
            "NUM_MODULES": len(batch.geometry.sides),
            "SLAB": batch.geometry.slab,
            "ROWS": batch.tile_rows,
            "SPLITS": splits,
        }
        shrink = {"NUM_IN": num_in, "WIDTH": min(widest, tuning.shrink_width), "RUN": run, "num_warps": 4}
        expand = {
            **{f"OUT_{slot}": outputs[slot] if slot < num_modules else 0 for slot in range(_MOST_MODULES)},
            "WIDTH": width,
            "num_warps": 8 if batch.tile_rows == 64 else 4,
        }
        blocks = len(batch.tiles) * sum(num_out // width for num_out in outputs)
        return _Launches(
            splits,
            # Tiles lie on the grid's first axis, which is nearly unlimited. Modules vary fastest: they share a tile's
            # rows of x, and the next tile mostly reads A of the same adapter. Splits share nothing.
            (pairs, splits),
            {**shared, **shrink, "num_stages": tuning.shrink_stages},
            (min(max(tuning.expand_programs, pairs), blocks),),
            {**shared, **expand, "num_stages": tuning.expand_stages},
        )

    def _num_splits(self, pairs: int, tile_rows: int, num_runs: int) -> int:
        """Splits of a shrink, a power of two: enough programs to fill the GPU, at least a run of columns for each.

        `pairs`: of tiles and modules; `num_runs`: of columns.
        """
        fill_splits = next_power_of_2(-(-self._tuning.programs // max(pairs, 1)))
        splits = min(fill_splits, self._tuning.most_splits if tile_rows == 16 else self._tuning.most_splits // 2)
        while splits > num_runs:
            splits //= 2
        return splits


def copy_to_front(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> bool:
    """Copies each source to the front of its target. False: one does not fit, and nothing is copied."""
    if any(len(source) > len(target) for source, target in zip(sources, targets, strict=True)):
        return False
    for source, target in zip(sources, targets, strict=True):
        target[: len(source)].copy_(source)
    return True


def tile_rows_of(longest: int) -> int:
    """Rows of a tile, where `longest` is the number of rows of the longest segment."""
    return _TALL_TILE if longest > _ROWS_OF_SHORT_TILES else _SHORT_TILE


def _most_tiles(num_rows: int, num_segments: int) -> int:
    """Of any batch with so many. Short tiles are the most; each segment's last one may be partly filled."""
    return min(num_rows, num_rows // _SHORT_TILE + num_segments)


def tile_width(geometry: LoraGeometry) -> int:
    """The largest power of two that divides every run of a row."""
    return geometry.tile & -geometry.tile


def _precision(x: torch.Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"


def ranks_of(ranks: int) -> int:
    """Elements reserved for the vector of a row and module, where adapters have up to `ranks` rows of A."""
    return max(-(-ranks // 16) * 16, 16)
