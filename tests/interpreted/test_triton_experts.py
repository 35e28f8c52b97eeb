"""Experts and their adapters in Triton, interpreted, against their plain twins."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.kernels.backend import triton_kernels
from motet.kernels.experts import Routing, choose_experts
from motet.kernels.gpu.expert_lora import TritonExpertLora, TritonExpertLoraBatch
from motet.kernels.gpu.experts import TritonGroups
from motet.kernels.gpu.lora import TritonLora, TritonLoraBatch
from motet.kernels.lora import ABSENT, LoraGeometry, LoraSegment, ModuleSlice, PagedAdapter
from motet.kernels.plain.expert_lora import HostExpertLora
from motet.kernels.plain.experts import PlainExperts
from motet.kernels.plain.lora import PlainLora

CPU = torch.device("cpu")
KERNELS = triton_kernels(CPU, torch.float32)
TOLERANCE = 2e-4  # sums run in another order
SLAB, HIDDEN, WIDTH = 96, 48, 32
GEOMETRY = LoraGeometry(1, SLAB, 16, ((HIDDEN, WIDTH), (HIDDEN, WIDTH), (WIDTH, HIDDEN)))


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=TOLERANCE)


def chosen_by(
    num_rows: int, num_experts: int, top_k: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """By a steep router, so that some experts get most rows and others none."""
    return choose_experts(torch.randn(num_rows, num_experts, generator=generator) * 4, Routing(min(top_k, num_experts)))


@settings(deadline=None, max_examples=10)
@given(
    num_rows=st.sampled_from([0, 1, 5, 40, 90]),
    num_experts=st.integers(1, 6),
    top_k=st.integers(1, 3),
    seed=st.integers(0, 2**20),
)
def test_experts(num_rows: int, num_experts: int, top_k: int, seed: int) -> None:
    """Some experts belong to another worker: what stands for their pairs may be anything."""
    generator = torch.Generator().manual_seed(seed)
    chosen, weights = chosen_by(num_rows, num_experts, top_k, generator)
    first = num_experts // 3
    x = torch.randn(num_rows, 72, generator=generator)
    weight = torch.randn(num_experts - first, 150, 72, generator=generator) * 0.1
    twin, experts = PlainExperts(), KERNELS.experts
    expected_groups = twin.group(chosen, weights, first, num_experts - first)
    groups = experts.group(chosen, weights, first, num_experts - first)
    num_own = len(expected_groups.rows)
    assert len(groups.rows) == chosen.numel() >= num_own
    assert torch.equal(groups.offsets, expected_groups.offsets)
    assert torch.equal(groups.rows[:num_own], expected_groups.rows)
    assert torch.equal(groups.weights[:num_own], expected_groups.weights)
    bias = torch.randn(len(weight), 150, generator=generator) if seed % 2 else None
    expected = twin.linear(x[expected_groups.rows], weight, expected_groups, bias)
    found = experts.linear(x[groups.rows], weight, groups, bias)
    close(found[:num_own], expected)
    found[num_own:] = torch.nan
    close(experts.combine(found, groups, num_rows), twin.combine(expected, expected_groups, num_rows))


def test_products_of_more_tiles_than_are_taken_together() -> None:
    """45 tiles at most, of which 42 are needed: 32 go through three blocks of columns before the others do."""
    generator = torch.Generator().manual_seed(2)
    num_pairs, num_experts = 80, 40
    x, weight = torch.randn(num_pairs, 40, generator=generator), torch.randn(num_experts, 260, 40, generator=generator)
    chosen = torch.arange(num_pairs).clamp(max=num_experts - 1).unsqueeze(1)  # 41 pairs are of the last expert
    groups = KERNELS.experts.group(chosen, torch.ones(num_pairs, 1), 0, num_experts)
    expected = torch.stack([row @ weight[expert].T for row, expert in zip(x, chosen[:, 0].tolist(), strict=True)])
    close(KERNELS.experts.linear(x, weight, groups), expected)


def adapters(ranks: list[int], num_experts: int, generator: torch.Generator) -> tuple[torch.Tensor, list[PagedAdapter]]:
    """A pool that is NaN wherever no adapter is; an adapter of rank 0 has no parts for experts."""
    sizes = [sum(sum(sides) * rank for sides in GEOMETRY.sides) for rank in ranks]
    num_pages = [-(-size * num_experts // SLAB) for size in sizes]
    free = torch.randperm(sum(num_pages) + 2, generator=generator).tolist()
    pool, made = torch.full((len(free), 1, SLAB), torch.nan), []
    for rank, size, count in zip(ranks, sizes, num_pages, strict=True):
        pages = tuple(free.pop() for _ in range(count))
        pool[list(pages), 0] = torch.randn(count, SLAB, generator=generator) * 0.1
        experts = []
        for expert in range(num_experts if rank else 0):
            slices, start = [], expert * size
            for wide, narrow in GEOMETRY.sides:
                slices.append(ModuleSlice(rank, rank, start, start + rank * wide))
                start += rank * (wide + narrow)
            experts.append(PagedAdapter(pages, tuple(slices)))
        made.append(PagedAdapter(pages, (ABSENT,), tuple(experts)))
    return pool, made


@pytest.mark.parametrize("reserved", [False, True])
@settings(deadline=None, max_examples=8)
@given(
    batch=st.lists(st.tuples(st.sampled_from([None, 0, 1, 3, 17]), st.sampled_from([1, 1, 2, 20])), max_size=5),
    num_experts=st.integers(1, 4),
    seed=st.integers(0, 2**20),
)
def test_pairs_use_their_experts_part_of_their_rows_adapter(
    reserved: bool, batch: list[tuple[int | None, int]], num_experts: int, seed: int
) -> None:
    """Rows without adapters, adapters without parts for experts, experts of another worker; also in a graph's room."""
    generator = torch.Generator().manual_seed(seed)
    pool, made = adapters([rank for rank, _ in batch if rank is not None], num_experts, generator)
    segments, start, left = [], 0, iter(made)
    for rank, num_rows in batch:
        if rank is not None:
            segments.append(LoraSegment(start, start + num_rows, next(left)))
        start += num_rows
    chosen, weights = chosen_by(start, num_experts, 2, generator)
    first = num_experts // 2
    groups = KERNELS.experts.group(chosen, weights, first, num_experts - first)
    assert isinstance(groups, TritonGroups)
    twin, lora = PlainLora(), KERNELS.lora
    expert_lora = TritonExpertLora(TritonLora())
    prepared = expert_lora.prepare(segments, GEOMETRY, CPU)
    if reserved:
        whole = expert_lora.reserve(start + 40, len(batch) + 2, len(pool), 32, num_experts, GEOMETRY, CPU)
        assert whole is not None
        room = expert_lora.part(whole, start + 3, len(batch))
        assert expert_lora.refill(room, prepared)
        prepared = room
    host = HostExpertLora(twin)
    reported = host.prepare(segments, GEOMETRY, CPU)
    assert (prepared is None) == (reported is None) or reserved
    of_twin = None if reported is None else host.of_pairs(reported, groups, first)
    ours = None if prepared is None else expert_lora.of_pairs(prepared, groups, first)
    for modules in ((0, 1), (2,)):
        x = torch.randn(len(groups.rows), GEOMETRY.sides[modules[0]][0], generator=generator)
        y = torch.randn(len(groups.rows), sum(GEOMETRY.sides[m][1] for m in modules), generator=generator)
        expected = y.clone()
        if of_twin is not None:
            twin.add(expected, x, pool, 0, of_twin, modules)
        if ours is not None:
            lora.add(y, x, pool, 0, ours, modules)
        close(y, expected)


def test_a_tile_is_one_part_and_no_longer_than_tiles_may_be() -> None:
    """300 rows of one adapter, each with both experts: tall tiles, of which only the last ones are short."""
    _, (adapter,) = adapters([3], 2, torch.Generator().manual_seed(0))
    chosen = torch.tensor([[0, 1]] * 300)
    groups = KERNELS.experts.group(chosen, torch.ones(300, 2), 0, 2)
    assert isinstance(groups, TritonGroups)
    expert_lora = TritonExpertLora(TritonLora())
    prepared = expert_lora.prepare([LoraSegment(0, 300, adapter)], GEOMETRY, CPU)
    assert isinstance(prepared, TritonExpertLoraBatch)
    batch = expert_lora.of_pairs(prepared, groups, 0)
    assert isinstance(batch, TritonLoraBatch)
    tiles = sorted(tile for tile in batch.tiles.tolist() if tile[1])
    assert [(first, count) for first, count, _ in tiles[:2]] == [(0, 64), (64, 64)]
    covered = [pair for first, count, _ in tiles for pair in range(first, first + count)]
    assert covered == list(range(600))
    assert all(part == groups.experts[first] == groups.experts[first + count - 1] for first, count, part in tiles)


def test_a_reserved_batch_refuses_what_has_no_room() -> None:
    _, made = adapters([17, 3], 2, torch.Generator().manual_seed(0))
    expert_lora, (wide, narrow) = TritonExpertLora(TritonLora()), made
    for num_rows, num_pages, ranks, segments in (
        (1, 900, 32, [LoraSegment(0, 1, wide), LoraSegment(1, 2, narrow)]),  # rows
        (4, 3, 32, [LoraSegment(0, 1, wide)]),  # pages
        (4, 900, 16, [LoraSegment(0, 1, wide)]),  # ranks
        (256, 900, 32, [LoraSegment(0, 300, wide)]),  # so many rows of one adapter that it wants taller tiles
    ):
        room = expert_lora.reserve(num_rows, num_rows, num_pages, ranks, 2, GEOMETRY, CPU)
        assert room is not None
        assert not expert_lora.refill(room, expert_lora.prepare(segments, GEOMETRY, CPU))
        assert (room.row_segments == -1).all()
    assert expert_lora.reserve(1, 1, 1, 16, 2, LoraGeometry(1, 100, 4, GEOMETRY.sides), CPU) is None
