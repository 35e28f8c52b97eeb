"""The Triton kernels against their plain twins, interpreted on the CPU.

Only in float32, because the interpreter multiplies bfloat16 wrongly; `benchmarks/gpu` checks bfloat16 on a GPU.
"""

from __future__ import annotations

import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.adapters.adapter import MODULES, BaseShape
from motet.adapters.packing.layout import AdapterLayout
from motet.kernels.attention import AttentionBatch
from motet.kernels.backend import triton_kernels
from motet.kernels.gpu.lora import LoraTuning, TritonLora
from motet.kernels.lora import ABSENT, LoraGeometry, LoraSegment, ModuleSlice, PagedAdapter
from motet.kernels.plain import attention as plain_attention
from motet.kernels.plain.lora import PlainLora
from motet.kernels.windows import AttentionChunk
from motet.workers.execution.device_rows import make_inputs
from motet.workers.models.rotary import rotary_table
from motet.workers.models.rotary_config import RotaryConfig
from motet.workers.plan import SequencePlan, StepPlan, packed

CPU = torch.device("cpu")
KERNELS = triton_kernels(CPU, torch.float32)
TOLERANCE = 2e-4  # sums run in another order
GROUPS = ((0, 1, 2), (3,), (4, 5), (6,), (0, 1, 2, 4))  # of modules that share an input


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=TOLERANCE, equal_nan=True)


def paged(
    sequences: list[tuple[int, int]], block_size: int, num_kv_heads: int, head_dim: int, generator: torch.Generator
) -> tuple[torch.Tensor, AttentionBatch]:
    """A pool whose second layer holds old KV in pages of any order, NaN elsewhere; and the batch of new rows."""
    num_pages = sum(-(-(old + new) // block_size) for old, new in sequences) + 3
    free = torch.randperm(num_pages, generator=generator).tolist()
    pool = torch.full((num_pages, 2, 2, block_size, num_kv_heads, head_dim), torch.nan)
    plans = []
    for i, (old, new) in enumerate(sequences):
        pages = tuple(free.pop() for _ in range(-(-(old + new) // block_size)))
        plans.append(SequencePlan(i, (0,) * new, old, packed(pages), None, None))
        content = torch.randn(old, 2, num_kv_heads, head_dim, generator=generator)
        for position in range(old):
            pool[pages[position // block_size], 1, :, position % block_size] = content[position]
    return pool, make_inputs(StepPlan(1, tuple(plans), (), ()), {}, block_size, CPU).attention


@settings(deadline=None, max_examples=25)
@given(
    sequences=st.lists(
        st.tuples(st.sampled_from([0, 1, 15, 16, 17, 100, 300]), st.sampled_from([1, 1, 1, 2, 7, 20])),
        min_size=1,
        max_size=4,
    ),
    head_dim=st.sampled_from([16, 32, 64, 80, 96, 128, 256]),
    group=st.integers(1, 8),
    num_kv_heads=st.integers(1, 3),
    block_size=st.sampled_from([4, 16, 32]),
    window=st.one_of(st.none(), st.integers(1, 60), st.integers(1, 60).map(AttentionChunk)),
    softcap=st.one_of(st.none(), st.just(30.0)),
    seed=st.integers(0, 2**20),
)
def test_attention(
    sequences: list[tuple[int, int]],
    head_dim: int,
    group: int,
    num_kv_heads: int,
    block_size: int,
    window: int | None,
    softcap: float | None,
    seed: int,
) -> None:
    """Any number of old tokens and of new rows, in pages of random order; pages hold NaN beyond a context."""
    check_attention(sequences, head_dim, group, num_kv_heads, block_size, window, softcap, seed)


def check_attention(
    sequences: list[tuple[int, int]],
    head_dim: int,
    group: int,
    num_kv_heads: int,
    block_size: int,
    window: int | None,
    softcap: float | None,
    seed: int,
) -> None:
    """`sequences`: (old tokens, new rows) of each."""
    generator = torch.Generator().manual_seed(seed)
    pool, batch = paged(sequences, block_size, num_kv_heads, head_dim, generator)
    # One tensor of heads side by side, as a layer's linear gives them: q, k and v are strided.
    heads = torch.randn(batch.query_starts[-1], num_kv_heads * (group + 2), head_dim, generator=generator)
    q, k, v = heads.split([num_kv_heads * group, num_kv_heads, num_kv_heads], dim=1)
    scaled = {"llama_4_scaling_beta": 0.3, "original_max_position_embeddings": 16.0}  # queries, by their position
    rotary = rotary_table(RotaryConfig(10000.0, "default", scaled if seed % 2 else {}), head_dim, 400)
    kv, twin_kv = pool[:, 1], pool.clone()[:, 1]
    turned = KERNELS.write_kv(q, k, v, rotary, kv, batch)
    expected_turned = plain_attention.write_kv(q, k, v, rotary, twin_kv, batch)
    close(turned, expected_turned)
    close(kv, twin_kv)
    sinks = torch.randn(q.shape[1], generator=generator) * 9 if seed % 2 else None
    how = (head_dim**-0.5, window, softcap, sinks)
    actual = KERNELS.paged_attention(expected_turned, twin_kv, batch, *how)
    close(actual, plain_attention.paged_attention(expected_turned, twin_kv, batch, *how))
    assert pool[:, 0].isnan().all(), "another layer was written"


HEADS = [(64, 1), (80, 2), (96, 3), (128, 4), (256, 5), (64, 6), (80, 7), (128, 8)]  # size, and how many share K and V


@pytest.mark.parametrize(("head_dim", "group"), HEADS)
def test_attention_of_each_shape(head_dim: int, group: int) -> None:
    """One token, page edges, and a prompt chunk after a context."""
    check_attention([(0, 1), (15, 1), (16, 1), (14, 18)], head_dim, group, 1, 16, None, None, seed=group)


def test_long_context() -> None:
    """All splits of a decode are used, and a chunk passes over many tiles."""
    generator = torch.Generator().manual_seed(1)
    pool, batch = paged([(8191, 1), (8189, 3)], 16, 1, 16, generator)
    q = torch.randn(4, 2, 16, generator=generator)
    kv = pool[:, 1]
    kv[batch.row_pages, :, batch.row_slots] = torch.randn(4, 2, 1, 16, generator=generator)
    for window, sinks in ((None, None), (3000, None), (None, torch.tensor([6.0, -2.0]))):
        actual = KERNELS.paged_attention(q, kv, batch, 0.25, window, None, sinks)
        close(actual, plain_attention.paged_attention(q, kv, batch, 0.25, window, None, sinks))


def test_attention_of_nothing() -> None:
    rows = torch.zeros(0, dtype=torch.int64)
    batch = AttentionBatch((0,), (), rows.int(), rows, 0, rows, rows, rows)
    q, k, kv = torch.zeros(0, 6, 64), torch.zeros(0, 2, 64), torch.full((3, 2, 16, 2, 64), torch.nan)
    rotary = rotary_table(RotaryConfig(10000.0, "default", {}), 64, 8)
    assert KERNELS.write_kv(q, k, k, rotary, kv, batch).shape == (0, 6, 64)
    assert KERNELS.paged_attention(q, kv, batch, 0.125, None).shape == (0, 6, 64)
    assert kv.isnan().all()


def test_lora_of_nothing() -> None:
    geometry, pool, y = LoraGeometry(1, 96, 16, ((48, 48),)), torch.full((2, 1, 96), torch.nan), torch.ones(3, 48)
    for segments in ([], [LoraSegment(0, 3, PagedAdapter((1,), (ABSENT,)))]):
        prepared = KERNELS.lora.prepare(segments, geometry, CPU)
        shrunk = KERNELS.lora.shrink(torch.ones(3, 48), pool, 0, prepared, (0,))
        KERNELS.lora.expand(y, shrunk.unsqueeze(0), pool, 0, prepared, (0,))
    assert (y == 1).all()


def test_padding_rows_write_nothing_and_give_zeros() -> None:
    """A captured launch has more rows than its batch: those at a negative position."""
    generator = torch.Generator().manual_seed(2)
    pool, batch = paged([(40, 1), (200, 1)], 16, 2, 16, generator)
    padded = AttentionBatch(
        query_starts=(0, 1, 2, 3, 4),
        context_lens=(),
        pages=batch.pages,
        page_starts=torch.cat((batch.page_starts, torch.tensor([0, 0]))),
        most_pages=batch.most_pages,
        positions=torch.cat((batch.positions, torch.tensor([-1, -1]))),
        row_pages=torch.cat((batch.row_pages, torch.tensor([0, 0]))),
        row_slots=torch.cat((batch.row_slots, torch.tensor([0, 0]))),
    )
    heads = torch.randn(4, 8, 16, generator=generator)
    q, k, v = heads.split([4, 2, 2], dim=1)
    rotary = rotary_table(RotaryConfig(10000.0, "default", {}), 16, 400)
    kv, twin_kv = pool[:, 1], pool.clone()[:, 1]
    turned = KERNELS.write_kv(q, k, v, rotary, kv, padded)
    expected = plain_attention.write_kv(q[:2], k[:2], v[:2], rotary, twin_kv, batch)
    close(turned[:2], expected)
    close(kv, twin_kv)
    for sinks in (None, torch.tensor([3.0, -3.0, 200.0, 0.0])):
        out = KERNELS.paged_attention(turned, kv, padded, 0.25, None, None, sinks)
        close(out[:2], plain_attention.paged_attention(expected, kv, batch, 0.25, None, None, sinks))
        assert (out[2:] == 0).all()


ranks_of_adapter = st.dictionaries(st.sampled_from(MODULES), st.sampled_from([1, 2, 3, 8, 17, 64, 256]), min_size=1)
SIDES = {
    "q_proj": (48, 48),
    "k_proj": (48, 16),
    "v_proj": (48, 16),
    "o_proj": (48, 48),
    "gate_proj": (48, 80),
    "up_proj": (48, 80),
    "down_proj": (80, 48),
}


def adapters_in_pool(
    batch: list[tuple[dict[str, int] | None, int]], slab: int, generator: torch.Generator
) -> tuple[torch.Tensor, list[LoraSegment], LoraGeometry, int]:
    """A pool that is NaN wherever the adapters are not, the segments, their geometry, and how many rows there are."""
    layout = AdapterLayout(BaseShape(2, SIDES), slab, "float32")
    geometry = LoraGeometry(2, slab, layout.tile, tuple(SIDES[module] for module in MODULES))
    num_pages = sum(layout.num_pages(ranks) for ranks, _ in batch if ranks) + 3
    free = torch.randperm(num_pages, generator=generator).tolist()
    pool = torch.full((num_pages, 2, slab), torch.nan)
    segments, start = [], 0
    for ranks, num_rows in batch:
        if ranks:
            pages = tuple(free.pop() for _ in range(layout.num_pages(ranks)))
            content = torch.full((len(pages) * slab,), torch.nan)  # a page's tail may be anything
            size = layout.num_elements(ranks)
            content[:size] = torch.randn(size, generator=generator) * 0.1
            pool[list(pages), 1] = content.view(-1, slab)
            at = layout.offsets(ranks)
            places = (ModuleSlice(at[m].rank, at[m].rank, at[m].a, at[m].b) if m in at else ABSENT for m in MODULES)
            segments.append(LoraSegment(start, start + num_rows, PagedAdapter(pages, tuple(places))))
        start += num_rows
    return pool, segments, geometry, start


@settings(deadline=None, max_examples=15)
@given(
    batch=st.lists(
        st.tuples(st.one_of(st.none(), ranks_of_adapter), st.sampled_from([1, 1, 5, 16, 17, 300])),
        min_size=1,
        max_size=5,
    ),
    slab=st.sampled_from([96, 256, 6144, 100]),  # 100: no runs of 16 elements, so that the twin computes
    seed=st.integers(0, 2**20),
)
def test_lora(batch: list[tuple[dict[str, int] | None, int]], slab: int, seed: int) -> None:
    """Mixed ranks, absent modules, rows without adapters; NaN everywhere else in the pool."""
    generator = torch.Generator().manual_seed(seed)
    pool, segments, geometry, num_rows = adapters_in_pool(batch, slab, generator)
    twin = PlainLora()
    prepared, twin_prepared = KERNELS.lora.prepare(segments, geometry, CPU), twin.prepare(segments, geometry, CPU)
    for modules in GROUPS:
        x = torch.randn(num_rows, geometry.sides[modules[0]][0], generator=generator)
        y = torch.randn(num_rows, sum(geometry.sides[m][1] for m in modules), generator=generator)
        expected = y.clone()
        twin.add(expected, x, pool, 1, twin_prepared, modules)
        KERNELS.lora.add(y, x, pool, 1, prepared, modules)
        close(y, expected)


def test_an_expand_program_goes_through_many_columns() -> None:
    """Ranks of one and of several tiles, modules that are not whole multiples of a program's columns."""
    generator = torch.Generator().manual_seed(6)
    adapters = [({"q_proj": 17, "k_proj": 3, "gate_proj": 40}, 5), (None, 2), ({"v_proj": 33, "up_proj": 8}, 17)]
    pool, segments, geometry, num_rows = adapters_in_pool(adapters, 256, generator)
    lora, twin = TritonLora(LoraTuning(expand_programs=1, expand_width=16, shrink_width=16)), PlainLora()
    prepared, twin_prepared = lora.prepare(segments, geometry, CPU), twin.prepare(segments, geometry, CPU)
    for modules in ((0, 1, 2), (4, 5), (0, 1, 2, 4)):
        x = torch.randn(num_rows, geometry.sides[modules[0]][0], generator=generator)
        y = torch.randn(num_rows, sum(geometry.sides[m][1] for m in modules), generator=generator)
        expected = y.clone()
        twin.add(expected, x, pool, 1, twin_prepared, modules)
        lora.add(y, x, pool, 1, prepared, modules)
        close(y, expected)


def test_rows_without_runs_of_16_are_the_twins_and_one_line_says_so(caplog: pytest.LogCaptureFixture) -> None:
    lora, geometry = triton_kernels(CPU, torch.float32).lora, LoraGeometry(1, 100, 4, ((48, 48),))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            lora.prepare([], geometry, CPU)
    assert ["no runs of 16" in record.getMessage() for record in caplog.records] == [True]


@settings(deadline=None, max_examples=5)
@given(
    batches=st.lists(st.lists(st.one_of(st.none(), ranks_of_adapter), min_size=1, max_size=6), min_size=2, max_size=3),
    seed=st.integers(0, 2**20),
)
def test_a_reserved_batch_becomes_any_that_fits(batches: list[list[dict[str, int] | None]], seed: int) -> None:
    """Batches one after the other, as a captured launch gets them: nothing of the batch before is left."""
    generator = torch.Generator().manual_seed(seed)
    lora = KERNELS.lora
    assert isinstance(lora, TritonLora)
    longest = max(len(batch) for batch in batches)
    reserved = None
    for batch in batches:
        pool, segments, geometry, _num_rows = adapters_in_pool([(ranks, 1) for ranks in batch], 256, generator)
        if reserved is None:
            whole = lora.reserve(longest + 40, longest + 3, 4000, 256, geometry, CPU)
            assert whole is not None
            reserved = lora.part(whole, longest, longest)
        prepared = lora.prepare(segments, geometry, CPU)
        assert lora.refill(reserved, prepared)
        x = torch.randn(longest, 48, generator=generator)
        y = torch.randn(longest, 80, generator=generator)
        expected = y.clone()
        lora.expand(expected, lora.shrink(x, pool, 1, prepared, (0, 1, 2)).unsqueeze(0), pool, 1, prepared, (0, 1, 2))
        lora.expand(y, lora.shrink(x, pool, 1, reserved, (0, 1, 2)).unsqueeze(0), pool, 1, reserved, (0, 1, 2))
        close(y, expected)
        assert lora.refill(reserved, None)
        before = y.clone()
        lora.expand(y, lora.shrink(x, pool, 1, reserved, (0, 1, 2)).unsqueeze(0), pool, 1, reserved, (0, 1, 2))
        torch.testing.assert_close(y, before, atol=0, rtol=0)


def test_a_reserved_batch_refuses_what_has_no_room() -> None:
    generator = torch.Generator().manual_seed(3)
    _, segments, geometry, _ = adapters_in_pool([({"q_proj": 64}, 1), ({"q_proj": 8}, 300)], 256, generator)
    lora = KERNELS.lora
    assert isinstance(lora, TritonLora)
    for rows, pages, ranks, given_segments in (
        (1, 4000, 64, segments[:1] * 2),  # rows
        (8, 3, 64, segments[:1]),  # pages
        (8, 4000, 32, segments[:1]),  # ranks
        (256, 4000, 64, segments[1:]),  # so many rows of one adapter that it wants wider tiles
    ):
        reserved = lora.reserve(rows, rows, pages, ranks, geometry, CPU)
        assert reserved is not None
        assert not lora.refill(reserved, lora.prepare(given_segments, geometry, CPU))
        assert not reserved.tiles.any()
    assert lora.reserve(1, 1, 1, 16, LoraGeometry(1, 100, 4, geometry.sides), CPU) is None


@pytest.mark.parametrize("degree", [2, 4])
def test_lora_in_a_gang(degree: int) -> None:
    """Each worker has a part of A's rows; the vectors of all workers are gathered."""
    generator = torch.Generator().manual_seed(degree)
    rank, num_in, num_out, slab = 8, 64, 32, 256
    a, b = torch.randn(rank, num_in, generator=generator), torch.randn(rank, num_out, generator=generator)
    x, y = torch.randn(3, num_in, generator=generator), torch.randn(3, num_out, generator=generator)
    geometry = LoraGeometry(1, slab, 32, ((num_in, num_out),))
    share, shrunk, pools, prepared = rank // degree, [], [], []
    for worker in range(degree):
        content = torch.cat((a[worker * share : (worker + 1) * share].flatten(), b.flatten()))
        pool = torch.full((8, 1, slab), torch.nan)
        pages = (5, 2, 7)[: -(-len(content) // slab)]
        padded = torch.cat((content, torch.full((len(pages) * slab - len(content),), torch.nan)))
        pool[list(pages), 0] = padded.view(-1, slab)
        adapter = PagedAdapter(pages, (ModuleSlice(rank, share, 0, share * num_in),))
        prepared.append(KERNELS.lora.prepare([LoraSegment(0, 3, adapter)], geometry, CPU))
        shrunk.append(KERNELS.lora.shrink(x, pool, 0, prepared[-1], (0,)))
        pools.append(pool)
    expected = y + x @ a.t() @ b
    for pool, batch in zip(pools, prepared, strict=True):
        own = y.clone()
        KERNELS.lora.expand(own, torch.stack(shrunk), pool, 0, batch, (0,))
        close(own, expected)
