"""Paged attention against dense attention, one sequence at a time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.kernels.plain.attention import paged_attention, write_kv
from motet.kernels.windows import AttentionChunk
from motet.tests.rigs.given_back import poison_before_window
from motet.workers.execution.device_rows import make_inputs
from motet.workers.models.rotary import rotary_table
from motet.workers.models.rotary_config import RotaryConfig
from motet.workers.plan import SequencePlan, StepPlan, packed, unpacked

pytestmark = pytest.mark.slow
BLOCK, HEAD_DIM, NUM_KV_HEADS, NUM_PAGES = 4, 8, 2, 400
ROTARY = rotary_table(RotaryConfig(10000.0, "default", {}), HEAD_DIM, 128)
# bfloat16 keeps 8 bits of K, V and of the result.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


def dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    num_rows: int,
) -> torch.Tensor:
    """Dense attention of the last rows of one sequence. q `[rows, heads, dim]`, k, v `[context, kv_heads, dim]`."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[2] ** -0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    position = torch.arange(len(k) - num_rows, len(k)).unsqueeze(1)
    key = torch.arange(len(k)).unsqueeze(0)
    hidden = key > position
    if isinstance(window, AttentionChunk):
        hidden |= key.div(window, rounding_mode="floor") < position.div(window, rounding_mode="floor")
    elif window is not None:
        hidden |= key <= position - window
    weights = scores.masked_fill(hidden, -torch.inf).exp()
    total = weights.sum(-1) if sinks is None else weights.sum(-1) + sinks.exp().unsqueeze(1)
    return torch.einsum("hqk,khd->qhd", weights / total.unsqueeze(-1), v)


def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary embedding as a product of complex numbers, independent of the kernels' way. x `[rows, heads, dim]`."""
    half = HEAD_DIM // 2
    frequency = 10000.0 ** -(torch.arange(half, dtype=torch.float64) / half)
    turn = torch.polar(torch.ones(1, dtype=torch.float64), positions.double().unsqueeze(1) * frequency).unsqueeze(1)
    turned = torch.complex(x[..., :half].double(), x[..., half:].double()) * turn
    return torch.cat((turned.real, turned.imag), -1).float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", [1, 2, 4])
@settings(deadline=None, max_examples=25)
@given(
    sequences=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), min_size=1, max_size=8),
    window=st.one_of(st.none(), st.integers(1, 30), st.integers(1, 30).map(AttentionChunk)),
    softcap=st.sampled_from([None, 0.5, 5.0]),
    sink=st.sampled_from([None, -3.0, 2.0]),
    seed=st.integers(0, 2**20),
)
def test_rows_attend_to_their_own_sequence(
    dtype: torch.dtype,
    group: int,
    sequences: list[tuple[int, int]],
    window: int | None,
    softcap: float | None,
    sink: float | None,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    free = torch.randperm(NUM_PAGES, generator=generator).tolist()
    kv = torch.full((NUM_PAGES, 2, BLOCK, NUM_KV_HEADS, HEAD_DIM), torch.nan, dtype=dtype)  # foreign content shows
    plans = [
        SequencePlan(i, (0,) * new, old, packed(free.pop() for _ in range(-(-(old + new) // BLOCK))), None, None)
        for i, (old, new) in enumerate(sequences)
    ]
    contents = [
        torch.randn(2, old + new, NUM_KV_HEADS, HEAD_DIM, generator=generator).to(dtype) for old, new in sequences
    ]
    for plan, content in zip(plans, contents, strict=True):  # what earlier steps left in the pages
        for position in range(plan.start):
            page, slot = unpacked(plan.pages)[position // BLOCK], position % BLOCK
            turned = rotate(content[0, position : position + 1].float(), torch.tensor([position]))[0]
            kv[page, 0, slot], kv[page, 1, slot] = turned.to(dtype), content[1, position]
    batch = make_inputs(StepPlan(1, tuple(plans), (), ()), {}, BLOCK, torch.device("cpu")).attention
    q = torch.randn(batch.query_starts[-1], NUM_KV_HEADS * group, HEAD_DIM, generator=generator).to(dtype)
    k, v = (torch.cat([c[i, plan.start :] for c, plan in zip(contents, plans, strict=True)]) for i in (0, 1))
    turned_q = write_kv(q, k, v, ROTARY, kv, batch)
    poison_before_window(kv, batch, window)
    sinks = None if sink is None else sink + torch.arange(q.shape[1]) / 4
    out = paged_attention(turned_q, kv, batch, HEAD_DIM**-0.5, window, softcap, sinks)
    for i, (plan, content) in enumerate(zip(plans, contents, strict=True)):
        rows = slice(batch.query_starts[i], batch.query_starts[i + 1])
        positions = torch.arange(content.shape[1])
        expected = dense(
            rotate(q[rows].float(), positions[plan.start :]),
            rotate(content[0].float(), positions).to(dtype).float(),
            content[1].float(),
            window,
            softcap,
            sinks,
            len(plan.token_ids),
        )
        torch.testing.assert_close(out[rows].float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
