"""Adapters of experts in Triton, the device side: which tiles of a layer's pairs share an expert and an adapter."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _later(a, b):
    return tl.maximum(a, b)


@triton.jit
def _part_of(at, inside, rows, experts, row_segments, num_rows, num_own, first, num_experts):
    """The index of a pair's expert and adapter in the table of parts; -1: it has none, or is another worker's."""
    row = tl.load(rows + at, mask=inside, other=num_rows)
    segment = tl.load(row_segments + row, mask=row < num_rows, other=-1)
    expert = tl.load(experts + at, mask=inside, other=num_own)
    return tl.where((segment >= 0) & (expert < num_own), segment * num_experts + first + expert, -1)


@triton.jit(do_not_specialize=["num_pairs", "num_rows"])
def pair_tiles_kernel(
    rows,  # [num_pairs] int64, the batch's row of each pair
    experts,  # [num_pairs] int64, each pair's expert, counted from this worker's first
    row_segments,  # [num_rows] int64, each row's segment; -1: none
    num_tiles,  # [1] int64, zero before the launch
    tiles,  # [most tiles, 3] int64, zeros before the launch
    num_pairs,
    num_rows,
    num_own,  # experts of this worker
    first,  # index of the first of them
    num_experts,  # of all workers
    ROWS: tl.constexpr,
):
    """One program finds the tiles that lie in ROWS pairs: neighbours of one expert and adapter.

    Pairs are sorted by expert and then by row, so neighbours that share both lie together. The atomic counter says only
    where in the list a tile stands; what a tile's rows get does not depend on that.
    """
    member = tl.arange(0, ROWS)
    at = tl.program_id(0) * ROWS + member
    inside = at < num_pairs
    part = _part_of(at, inside, rows, experts, row_segments, num_rows, num_own, first, num_experts)
    before = _part_of(at - 1, inside & (member > 0), rows, experts, row_segments, num_rows, num_own, first, num_experts)
    has_after = (member + 1 < ROWS) & (at + 1 < num_pairs)
    after = _part_of(at + 1, has_after, rows, experts, row_segments, num_rows, num_own, first, num_experts)
    # A part's pairs are neighbours, so a tile reaches from where one begins to where it ends. Its last pair writes it.
    begin = tl.associative_scan(tl.where(part != before, member, 0), 0, _later)
    ends = (part >= 0) & (part != after)
    counts = ends.to(tl.int32)
    base = tl.atomic_add(num_tiles, tl.sum(counts, 0).to(tl.int64), sem="relaxed")
    place = tiles + (base + tl.cumsum(counts, 0) - 1) * 3
    tl.store(place, (at - member + begin).to(tl.int64), mask=ends)
    tl.store(place + 1, (member - begin + 1).to(tl.int64), mask=ends)
    tl.store(place + 2, part, mask=ends)
