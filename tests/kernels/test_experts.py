"""Mixture-of-experts products against one row and one expert at a time."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import silu

from motet.kernels.backend import plain_kernels
from motet.kernels.experts import Routing, choose_experts
from motet.kernels.plain.experts import PlainExperts

HIDDEN, WIDTH = 12, 8
# bfloat16 keeps 8 bits of each product.
pytestmark = pytest.mark.slow
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-2}


def test_experts_have_biases_of_their_own() -> None:
    weight, bias = torch.zeros(3, 2, HIDDEN), torch.arange(6.0).view(3, 2)
    kernels, chosen = PlainExperts(), torch.tensor([[2, 0], [1, 2]])
    groups = kernels.group(chosen, torch.ones(2, 2), 0, 3)
    found = kernels.linear(torch.ones(4, HIDDEN), weight, groups, bias)
    assert found.tolist() == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [4.0, 5.0]]


def one_by_one(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Each row through each of its experts, in float32."""
    x, gate_up, down = x.float(), gate_up.float(), down.float()
    out = torch.zeros(len(x), down.shape[1])
    for row in range(len(x)):
        for expert, weight in zip(chosen[row].tolist(), weights[row].tolist(), strict=True):
            gate, up = (gate_up[expert] @ x[row]).chunk(2)
            out[row] += weight * (down[expert] @ (silu(gate) * up))
    return out


def part(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, first: int
) -> torch.Tensor:
    """The partial sum of a worker that has the experts from `first` on."""
    kernels = PlainExperts()
    groups = kernels.group(chosen, weights, first, len(gate_up))
    inner = plain_kernels().gated(kernels.linear(x[groups.rows], gate_up, groups), "silu")
    return kernels.combine(kernels.linear(inner, down, groups), groups, len(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(deadline=None, max_examples=50)
@given(num_rows=st.integers(0, 20), num_experts=st.integers(1, 9), top_k=st.integers(1, 4), seed=st.integers(0, 2**20))
def test_grouped_products_are_those_of_each_row_alone(
    dtype: torch.dtype, num_rows: int, num_experts: int, top_k: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    top_k = min(top_k, num_experts)
    x = torch.randn(num_rows, HIDDEN, generator=generator).to(dtype)
    gate_up = (torch.randn(num_experts, 2 * WIDTH, HIDDEN, generator=generator) * HIDDEN**-0.5).to(dtype)
    down = (torch.randn(num_experts, HIDDEN, WIDTH, generator=generator) * WIDTH**-0.5).to(dtype)
    # A steep router, so that some experts get most rows and others none.
    chosen, weights = choose_experts(torch.randn(num_rows, num_experts, generator=generator) * 4, Routing(top_k))
    expected = one_by_one(x, gate_up, down, chosen, weights)
    whole = part(x, gate_up, down, chosen, weights, 0)
    assert whole.dtype == dtype
    torch.testing.assert_close(whole.float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])

    cut = int(torch.randint(num_experts + 1, (1,), generator=generator))  # experts shared by two workers
    partial = [part(x, gate_up[s], down[s], chosen, weights, s.start) for s in (slice(0, cut), slice(cut, num_experts))]
    torch.testing.assert_close(
        torch.stack(partial).sum(0).float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )

    half = WIDTH // 2  # features of each expert shared by two workers
    narrow = [
        part(x, torch.cat((gate_up[:, f], gate_up[:, g]), 1), down[:, :, f], chosen, weights, 0)
        for f, g in ((slice(0, half), slice(WIDTH, WIDTH + half)), (slice(half, WIDTH), slice(WIDTH + half, None)))
    ]
    torch.testing.assert_close(
        torch.stack(narrow).sum(0).float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )


@settings(deadline=None)
@given(
    experts=st.lists(st.permutations(range(7)).map(lambda order: order[:3]), max_size=12),
    first=st.integers(0, 6),
    num_experts=st.integers(1, 7),
)
def test_pairs_are_sorted_by_expert_and_then_by_row(experts: list[list[int]], first: int, num_experts: int) -> None:
    chosen = torch.tensor(experts, dtype=torch.int64).view(-1, 3)
    weights = torch.arange(chosen.numel(), dtype=torch.float32).view(-1, 3)  # names each pair
    groups = PlainExperts().group(chosen, weights, first, num_experts)
    expected = [
        [(row, row * 3 + own.index(expert)) for row, own in enumerate(experts) if expert in own]
        for expert in range(first, first + num_experts)
    ]
    bounds = groups.offsets.tolist()
    found = list(zip(groups.rows.tolist(), groups.weights.tolist(), strict=True))
    assert [found[start:end] for start, end in pairwise(bounds)] == expected
    assert (bounds[0], bounds[-1]) == (0, len(found))


def test_experts_of_the_best_groups_are_chosen_by_what_their_bias_adds() -> None:
    """Worked out by hand: scores are sigmoids, and the third of three groups is closed."""
    chances = torch.tensor([[0.5, 0.2, 0.4, 0.4, 0.9, 0.05]])
    bias = torch.tensor([0.0, 0.3, 0.0, 0.4, -0.5, 0.0])  # 0.5 0.5, 0.4 0.8, 0.4 0.05
    routing = Routing(3, True, "sigmoid", has_bias=True, num_groups=3, top_groups=2, scale=2.0)
    chosen, weights = choose_experts(chances.logit(), routing, bias)
    by_expert = dict(zip(chosen[0].tolist(), weights[0].tolist(), strict=True))
    assert by_expert == pytest.approx({3: 0.8 / 1.1, 0: 1.0 / 1.1, 1: 0.4 / 1.1})
    with_eps = choose_experts(chances.logit(), replace(routing, eps=0.1), bias)[1]
    torch.testing.assert_close(with_eps, weights * 1.1 / 1.2)
    whole = choose_experts(chances.logit(), replace(routing, num_groups=1, top_groups=1, has_bias=False))
    assert {*whole[0][0].tolist()} == {4, 0, 2} or {*whole[0][0].tolist()} == {4, 0, 3}


def test_the_likeliest_experts_are_chosen() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [5.0, 5.0, -5.0]])
    chosen, weights = choose_experts(logits, Routing(2, is_normalized=True))
    assert [set(row) for row in chosen.tolist()] == [{1, 2}, {0, 1}]
    torch.testing.assert_close(weights.sum(-1), torch.ones(2))
    torch.testing.assert_close(weights[0, 0] / weights[0, 1], torch.tensor(1.0).exp())
    _, plain = choose_experts(logits, Routing(2))
    torch.testing.assert_close(plain[0, 0], logits[0].softmax(-1)[1])
