"""Triton's attention over KV of eight bits, interpreted on the CPU, against its twin."""

from __future__ import annotations

import pytest
import torch

from motet.kernels.attention import AttentionBatch
from motet.kernels.backend import triton_kernels, with_float8_kv
from motet.kernels.float8_kv import Float8KV, float8_view
from motet.kernels.plain import float8_kv as twin
from motet.workers.execution.device_rows import make_inputs
from motet.workers.models.rotary import rotary_table
from motet.workers.models.rotary_config import RotaryConfig
from motet.workers.plan import SequencePlan, StepPlan, packed

CPU = torch.device("cpu")
KERNELS = with_float8_kv(triton_kernels(CPU, torch.float32))
TOLERANCE = 2e-4  # sums run in another order
BLOCK = 16
SEQUENCES = [(0, 1), (16, 1), (14, 18), (300, 1), (70, 3)]  # old tokens, new rows


def paged(sequences: list[tuple[int, int]], kv_heads: int, head_dim: int) -> tuple[torch.Tensor, AttentionBatch]:
    """A pool of NaN, values and scales alike, and the batch of the new rows, in pages of random order."""
    generator = torch.Generator().manual_seed(head_dim)
    counts = [-(-(old + new) // BLOCK) for old, new in sequences]
    free = torch.randperm(sum(counts) + 3, generator=generator).tolist()
    pool = torch.full((len(free), 2, 2 * BLOCK * kv_heads * (head_dim + 4)), 0xFF, dtype=torch.uint8)
    plans = [
        SequencePlan(i, (0,) * new, old, packed(free.pop() for _ in range(count)), None, None)
        for i, ((old, new), count) in enumerate(zip(sequences, counts, strict=True))
    ]
    return pool.view(torch.float32), make_inputs(StepPlan(1, tuple(plans), (), ()), {}, BLOCK, CPU).attention


def filled(pool: torch.Tensor, batch: AttentionBatch, kv_heads: int, head_dim: int) -> Float8KV:
    """The second layer, with KV of all tokens that the batch sees: large ones and small ones, and a head of zeros."""
    kv = float8_view(pool[:, 1], BLOCK, kv_heads, head_dim)
    generator = torch.Generator().manual_seed(1)
    for sequence, context in enumerate(batch.context_lens):
        places = torch.arange(context)
        pages = batch.pages[int(batch.page_starts[sequence]) + places // BLOCK].long()
        for side in range(2):
            x = torch.randn(context, kv_heads, head_dim, generator=generator)
            x *= 10.0 ** torch.randint(-2, 1, (context, kv_heads, 1), generator=generator)
            x[context // 2, 0] = 0.0
            values, scales = twin._QUANTISE(x.flatten(0, 1))
            kv.values[pages, side, places % BLOCK] = values.view(torch.uint8).view(x.shape)
            kv.scales[pages, side, :, places % BLOCK] = scales.view(x.shape[:2])
    return kv


@pytest.mark.parametrize(("head_dim", "group", "kv_heads"), [(80, 2, 1), (128, 4, 2)])
def test_what_is_written_is_the_twins(head_dim: int, group: int, kv_heads: int) -> None:
    pool, batch = paged(SEQUENCES, kv_heads, head_dim)
    generator = torch.Generator().manual_seed(3)
    heads = torch.randn(batch.query_starts[-1], kv_heads * (group + 2), head_dim, generator=generator)
    heads[2, -1] = 0.0
    q, k, v = heads.split([kv_heads * group, kv_heads, kv_heads], dim=1)
    scaled = {"llama_4_scaling_beta": 0.3, "original_max_position_embeddings": 16.0}  # queries, by their position
    rotary = rotary_table(RotaryConfig(10000.0, "default", scaled), head_dim, 400)
    twin_pool = pool.clone()
    kv, expected = (float8_view(of[:, 1], BLOCK, kv_heads, head_dim) for of in (pool, twin_pool))
    turned = KERNELS.write_kv(q, k, v, rotary, kv, batch)
    expected_turned = twin.write_kv(q, k, v, rotary, expected, batch)
    torch.testing.assert_close(turned, expected_turned, atol=TOLERANCE, rtol=TOLERANCE)
    torch.testing.assert_close(kv.scales, expected.scales, atol=0, rtol=1e-6, equal_nan=True)
    # A number that lies between two of float8's may go to either, as its last bit has it.
    differ = kv.values != expected.values
    assert differ.sum() <= 2, "the bits of all other values are equal"
    assert torch.equal(pool[:, 0].view(torch.uint8), twin_pool[:, 0].view(torch.uint8)), "another layer was written"


@pytest.mark.parametrize(
    ("head_dim", "group", "kv_heads", "window", "softcap"),
    [(64, 1, 2, None, None), (80, 2, 1, None, None), (128, 4, 2, 40, 30.0)],
)
def test_attention(head_dim: int, group: int, kv_heads: int, window: int | None, softcap: float | None) -> None:
    """Decodes and chunks, page edges, windows and caps; what lies beyond a context is NaN."""
    pool, batch = paged(SEQUENCES, kv_heads, head_dim)
    kv = filled(pool, batch, kv_heads, head_dim)
    q = torch.randn(batch.query_starts[-1], kv_heads * group, head_dim, generator=torch.Generator().manual_seed(2))
    sinks = None if group == 1 else torch.arange(kv_heads * group) / 2.0
    actual = KERNELS.paged_attention(q, kv, batch, head_dim**-0.5, window, softcap, sinks)
    expected = twin.paged_attention(q, kv, batch, head_dim**-0.5, window, softcap, sinks)
    torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=TOLERANCE)
    assert not actual.isnan().any()


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_what_is_no_number_stays_none() -> None:
    """In K and in V: a head with a NaN gives no answer, and the other heads give theirs."""
    pool, batch = paged([(0, 3)], 2, 16)
    q, k, v = torch.randn(3, 6, 16, generator=torch.Generator().manual_seed(2)).split([2, 2, 2], dim=1)
    rotary = rotary_table(RotaryConfig(10000.0, "default", {}), 16, 8)
    for is_v in (False, True):
        kv = float8_view(pool[:, 1], BLOCK, 2, 16)
        spoiled = [x.clone() for x in (k, v)]
        spoiled[is_v][0, 1, 5] = torch.nan
        turned = KERNELS.write_kv(q, spoiled[0], spoiled[1], rotary, kv, batch)
        out = KERNELS.paged_attention(turned, kv, batch, 0.25, None)
        assert not out[:, 0].isnan().any() and not out[:, 1].isfinite().any()
