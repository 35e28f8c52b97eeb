"""Adapters of experts in Triton, the host side. The device side is `experts_device.py`."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ..experts import ExpertGroups
from ..lora import LoraBatch, LoraGeometry, LoraSegment, PagedAdapter
from ..plain.expert_lora import HostExpertLora, HostExpertLoraBatch
from ..staging import staged
from .experts import TritonGroups
from .experts_device import pair_tiles_kernel
from .lora import LEAST_TILE, TritonLora, TritonLoraBatch, copy_to_front, ranks_of, tile_rows_of, tile_width


@dataclass(frozen=True)
class TritonExpertLoraBatch:
    """A step's tables on the device. A part is what an adapter has for one expert: segment * num_experts + expert."""

    geometry: LoraGeometry
    row_segments: torch.Tensor  # [rows up to the last that has a segment] int64; -1: none
    parts: torch.Tensor  # [num_parts, num_modules, 4] int64, as `lora_device.py` describes them
    first_pages: torch.Tensor  # [num_parts] int64
    pages: torch.Tensor  # int64
    num_experts: int
    tile_rows: int
    ranks: int

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.row_segments, self.parts, self.first_pages, self.pages


class TritonExpertLora:
    """`expert_lora.CapturableExpertLora`, for batches of `TritonLora`. Never waits for the device.

    Where `TritonLora` falls back to its twin, the host groups the pairs of each layer.
    """

    def __init__(self, lora: TritonLora) -> None:
        self._twin = HostExpertLora(lora)
        self._part_tables: dict[int, tuple[PagedAdapter, torch.Tensor]] = {}  # by id of the last step's adapters

    def prepare(
        self, segments: Sequence[LoraSegment], geometry: LoraGeometry, device: torch.device
    ) -> TritonExpertLoraBatch | HostExpertLoraBatch | None:
        if tile_width(geometry) < LEAST_TILE:
            return self._twin.prepare(segments, geometry, device)
        segments = [segment for segment in segments if segment.adapter.experts]
        if not segments:
            return None
        self._part_tables = {
            id(s.adapter): self._part_tables.get(id(s.adapter)) or (s.adapter, _parts(s.adapter)) for s in segments
        }
        rows, first_pages, pages = array("q"), array("q"), array("q")
        num_experts = len(segments[0].adapter.experts)
        for index, segment in enumerate(segments):
            rows.extend([-1] * (segment.start - len(rows)) + [index] * (segment.end - segment.start))
            first_pages.extend([len(pages)] * num_experts)
            pages.extend(segment.adapter.pages)
        parts = torch.cat([self._part_tables[id(segment.adapter)][1] for segment in segments])
        tables = staged(
            device, *(torch.frombuffer(table, dtype=torch.int64) for table in (rows, first_pages, pages)), parts
        )
        on_rows, on_first_pages, on_pages, on_parts = tables
        longest = max(segment.end - segment.start for segment in segments)  # a row has each expert at most once
        return TritonExpertLoraBatch(
            geometry,
            on_rows,
            on_parts,
            on_first_pages,
            on_pages,
            num_experts,
            tile_rows_of(longest),
            ranks_of(int(parts[:, :, 1].max())),
        )

    def of_pairs(
        self, batch: TritonExpertLoraBatch | HostExpertLoraBatch, groups: ExpertGroups, first: int
    ) -> LoraBatch | None:
        """See `expert_lora.ExpertLoraKernels`. One launch."""
        if isinstance(batch, HostExpertLoraBatch):
            return self._twin.of_pairs(batch, groups, first)
        assert isinstance(groups, TritonGroups), "groups are those of `TritonExperts`"
        num_pairs, num_own = len(groups.rows), len(groups.offsets) - 1
        num_programs = -(-num_pairs // batch.tile_rows)
        # Each part may begin a tile, and each program may begin another one within a part.
        most_tiles = min(num_pairs, num_programs + len(batch.parts) // batch.num_experts * num_own)
        # The counter, and a number that keeps the tiles on a multiple of 16 bytes.
        numbers = torch.zeros(2 + 3 * most_tiles, dtype=torch.int64, device=groups.rows.device)
        tiles = numbers[2:].view(-1, 3)
        if num_pairs:
            pair_tiles_kernel[(num_programs,)](
                groups.rows,
                groups.experts,
                batch.row_segments,
                numbers,
                tiles,
                num_pairs,
                len(batch.row_segments),
                num_own,
                first,
                batch.num_experts,
                ROWS=batch.tile_rows,
                num_warps=4,
            )
        return TritonLoraBatch(
            batch.geometry,
            numbers[:1],
            tiles,
            batch.parts,
            batch.first_pages,
            batch.pages,
            tile_rows=batch.tile_rows,
            ranks=batch.ranks,
        )

    def reserve(
        self,
        num_rows: int,
        num_segments: int,
        num_pages: int,
        ranks: int,
        num_experts: int,
        geometry: LoraGeometry,
        device: torch.device,
    ) -> TritonExpertLoraBatch | None:
        if tile_width(geometry) < LEAST_TILE:
            return None

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        num_parts = num_segments * num_experts
        tables = zeros(num_rows) - 1, zeros(num_parts, len(geometry.sides), 4), zeros(num_parts), zeros(num_pages)
        return TritonExpertLoraBatch(geometry, *tables, num_experts, tile_rows_of(num_rows), ranks_of(ranks))

    def part(self, reserved: TritonExpertLoraBatch, num_rows: int, num_segments: int) -> TritonExpertLoraBatch:
        num_parts = num_segments * reserved.num_experts
        return replace(
            reserved,
            row_segments=reserved.row_segments[:num_rows],
            parts=reserved.parts[:num_parts],
            first_pages=reserved.first_pages[:num_parts],
            tile_rows=tile_rows_of(num_rows),
        )

    def refill(
        self, reserved: TritonExpertLoraBatch, batch: TritonExpertLoraBatch | HostExpertLoraBatch | None
    ) -> bool:
        if batch is None:
            reserved.row_segments.fill_(-1)
            return True
        if (
            isinstance(batch, HostExpertLoraBatch)
            or batch.ranks > reserved.ranks
            or batch.tile_rows > reserved.tile_rows
        ):
            return False
        if not copy_to_front(batch.tensors, reserved.tensors):
            return False
        reserved.row_segments[len(batch.row_segments) :].fill_(-1)
        return True


def _parts(adapter: PagedAdapter) -> torch.Tensor:
    """`[num_experts, num_modules, 4]` int64: where each module of each expert lies."""
    numbers = array("q")
    for expert in adapter.experts:
        for at in expert.modules:
            numbers.extend((at.rank, at.a_rows, at.a, at.b))
    return torch.frombuffer(numbers, dtype=torch.int64).view(len(adapter.experts), -1, 4)
