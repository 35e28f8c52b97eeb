"""KV of eight bits: what is written into a page, and attention over it, against attention over the same numbers."""

from __future__ import annotations

import pytest
import torch

from motet.kernels.attention import AttentionBatch
from motet.kernels.backend import plain_kernels, with_float8_kv
from motet.kernels.float8 import FLOAT8, LARGEST
from motet.kernels.float8_kv import Float8KV, float8_view
from motet.kernels.pages import copy_runs, read_pages, write_pages
from motet.kernels.plain import attention as plain_attention
from motet.kernels.plain.float8_kv import numbers_of, paged_attention, write_kv
from motet.tests.rigs.given_back import poison_before_window
from motet.workers.execution.device_rows import make_inputs
from motet.workers.models.rotary import rotary_table
from motet.workers.models.rotary_config import RotaryConfig
from motet.workers.plan import SequencePlan, StepPlan, packed

CPU = torch.device("cpu")
BLOCK, KV_HEADS, HEAD_DIM, LAYERS, PAGES = 8, 2, 16, 2, 20
ROTARY = rotary_table(RotaryConfig(10000.0, "default", {}), HEAD_DIM, 200)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
NUMBERS = torch.arange(127, dtype=torch.uint8).view(FLOAT8).double()  # all that are not negative, ascending


def pool_of_nan(dtype: torch.dtype) -> torch.Tensor:
    """Pages whose every value and scale is NaN."""
    num_bytes = 2 * BLOCK * KV_HEADS * (HEAD_DIM + 4)
    return torch.full((PAGES, LAYERS, num_bytes), 0xFF, dtype=torch.uint8).view(dtype)


def layer_of(pool: torch.Tensor, layer: int) -> Float8KV:
    return float8_view(pool[:, layer], BLOCK, KV_HEADS, HEAD_DIM)


def batch_of(sequences: list[tuple[int, int]], seed: int = 3) -> AttentionBatch:
    """`sequences`: tokens before, new tokens. Each has its pages in the order of its number, whatever is new."""
    free = torch.randperm(PAGES, generator=torch.Generator().manual_seed(seed)).tolist()
    plans = [
        SequencePlan(i, (0,) * new, old, packed(free[5 * i : 5 * i + -(-(old + new) // BLOCK)]), None, None)
        for i, (old, new) in enumerate(sequences)
    ]
    return make_inputs(StepPlan(1, tuple(plans), (), ()), {}, BLOCK, CPU).attention


def heads(num_rows: int, dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v, whose heads differ in size by thousands, and some of which are zero."""
    made = torch.randn(num_rows, 4 + 2 * KV_HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(seed))
    made *= 10.0 ** torch.linspace(-2, 1.5, num_rows)[:, None, None]
    made[num_rows // 2, -1] = 0.0
    q, k, v = made.to(dtype).split([4, KV_HEADS, KV_HEADS], 1)
    return q, k, v


@DTYPES
def test_each_head_of_a_token_is_rounded_with_a_scale_of_its_own(dtype: torch.dtype) -> None:
    batch, (q, k, v), pool = batch_of([(0, 30), (3, 1)]), heads(31, dtype), pool_of_nan(dtype)
    kv = layer_of(pool, 1)
    turned = write_kv(q, k, v, ROTARY, kv, batch)
    twin = torch.zeros(PAGES, 2, BLOCK, KV_HEADS, HEAD_DIM)
    expected = plain_attention.write_kv(q.float(), k.float(), v.float(), ROTARY, twin, batch)
    assert torch.equal(turned, expected.to(dtype))
    exact = twin[batch.row_pages, :, batch.row_slots].double()  # [rows, 2, heads, dim]
    scales = kv.scales[batch.row_pages, :, :, batch.row_slots].double()
    torch.testing.assert_close(scales, exact.abs().amax(-1) / LARGEST, rtol=1e-6, atol=1e-30)
    written = numbers_of(kv)[batch.row_pages, :, batch.row_slots].double()
    nearest = (exact.abs().unsqueeze(-1) - NUMBERS * scales[..., None, None]).abs().amin(-1)
    assert ((written - exact).abs() - nearest <= 1e-4 * scales.unsqueeze(-1)).all(), "each is the nearest number"
    assert (pool[:, 0].view(torch.uint8) == 0xFF).all(), "another layer was written"
    others = torch.ones(PAGES, BLOCK, dtype=torch.bool)
    others[batch.row_pages, batch.row_slots] = False
    assert kv.scales.transpose(2, 3)[others.unsqueeze(1).expand(-1, 2, -1)].isnan().all(), "another token was written"


@DTYPES
def test_what_is_written_depends_on_the_token_alone(dtype: torch.dtype) -> None:
    """The bits are the same however a prompt is cut, and whatever else is in the batch."""
    together, apart, (q, k, v) = pool_of_nan(dtype), pool_of_nan(dtype), heads(30, dtype)
    write_kv(q, k, v, ROTARY, layer_of(together, 0), batch_of([(0, 20), (7, 10)]))
    for first, last, sequences in ((0, 13, [(0, 13)]), (13, 20, [(13, 7)])):
        rows = slice(first, last)
        write_kv(q[rows], k[rows], v[rows], ROTARY, layer_of(apart, 0), batch_of(sequences))
    for row in range(20, 30):
        batch = batch_of([(0, 1), (row - 13, 1)])
        both = [0, row]
        write_kv(q[both], k[both], v[both], ROTARY, layer_of(apart, 0), batch)
    assert torch.equal(together.view(torch.uint8), apart.view(torch.uint8))


@DTYPES
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_attention_is_that_over_the_same_numbers(dtype: torch.dtype, window: int | None, softcap: float | None) -> None:
    """Chunks and decodes together; what lies beyond a context and before a window is NaN, in values and scales."""
    kv = layer_of(pool_of_nan(dtype), 0)
    for sequences in ([(0, 25), (0, 17), (0, 9)], [(25, 1), (17, 6), (9, 1)]):
        batch = batch_of(sequences)
        q, k, v = (x / x.abs().amax() for x in heads(batch.query_starts[-1], dtype))
        q = write_kv(q, k, v, ROTARY, kv, batch)
        poison_before_window(kv, batch, window)
        sinks = None if softcap is None else torch.linspace(-2.0, 3.0, q.shape[1])
        out = paged_attention(q, kv, batch, 0.25, window, softcap, sinks)
        expected = plain_attention.paged_attention(q.float(), numbers_of(kv), batch, 0.25, window, softcap, sinks)
        assert out.dtype == dtype
        torch.testing.assert_close(out, expected.to(dtype), rtol=0, atol=0)
        assert not out.isnan().any()


@DTYPES
def test_pages_are_moved_to_the_last_bit(dtype: torch.dtype) -> None:
    """Whatever their bytes would be as numbers of the pool, NaN included."""
    pool = torch.randint(0, 256, (PAGES, LAYERS, 2 * BLOCK * KV_HEADS * 20), dtype=torch.uint8)
    pool[3:6] = 0xFF
    as_numbers = pool.clone().view(dtype)
    content = read_pages(as_numbers, [4, 9, 2])
    for move in (write_pages, copy_runs):
        target = torch.zeros_like(as_numbers)
        move(target, [7, 8, 1], content)
        assert torch.equal(target[[7, 8, 1]].view(torch.uint8), pool[[4, 9, 2]])


def test_which_kernels_compute_it_is_reported() -> None:
    kernels = with_float8_kv(plain_kernels())
    assert kernels.choice == "torch; attention by torch on KV in float8"
    assert (kernels.write_kv, kernels.paged_attention) == (write_kv, paged_attention)
