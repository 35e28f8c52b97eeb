"""Masked sampling, by each backend, against logits in which the forbidden tokens cannot be chosen."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from motet.kernels import joint_sampling
from motet.kernels.plain.sampling import PlainSampling
from motet.kernels.sampling import SamplingKernels
from motet.tests.rigs.native_builds import HERE, load_build
from motet.tests.rigs.stand_in_gpu.stand_in_gpu import stand_in_gpu
from motet.workers.decoding.mask_source import mask_of
from motet.workers.decoding.token_choice import sample
from motet.workers.decoding.token_counts import TokenCounts
from motet.workers.plan import SamplePlan, SeenTokens, packed
from motet.workers.wire.messages import SamplingParams, TokenRules

VOCAB = 1003  # not a whole number of words
WAYS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "num_logprobs": 3},
    {"temperature": 2.0, "top_p": 0.999},
    {"temperature": 1.0, "top_k": 4, "min_p": 0.01},
    {"temperature": 0.0, "logit_bias": {5: 100.0}, "num_logprobs": 0},
    {"temperature": 1.5, "repetition_penalty": 1.4, "presence_penalty": 0.5},
)
ROWS = [way for way in WAYS for _ in range(5)]


@pytest.fixture(scope="module", params=["torch", "native", "gpu"])
def backend(request: pytest.FixtureRequest) -> SamplingKernels | None:
    """None: as on a GPU."""
    if request.param == "gpu":
        return None
    return PlainSampling() if request.param == "torch" else load_build((torch.float32, 1, HERE)).sampling


def chosen(
    backend: SamplingKernels | None, logits: torch.Tensor, plans: list[SamplePlan], masks: dict[int, bytes]
) -> list[Any]:
    seen = SeenTokens(packed([1, 2, 3]), packed([4, 4]))
    counts = [
        TokenCounts.of(replace(plan, seen=plan.seen or seen)) if plan.params.has_penalty else None for plan in plans
    ]
    if backend is not None:
        return sample(logits.clone(), plans, backend, counts, masks)
    with stand_in_gpu():
        return sample(logits.to(torch.device("cuda", 0)), plans, PlainSampling(), counts, masks)


@pytest.mark.parametrize("most_rows", [2, 1000])
def test_only_what_a_mask_allows_is_chosen_and_all_else_is_as_without(
    backend: SamplingKernels | None, monkeypatch: pytest.MonkeyPatch, most_rows: int
) -> None:
    monkeypatch.setattr(joint_sampling, "_MOST_BYTES", most_rows * VOCAB * 4)
    generator = random.Random(1)
    logits = torch.randn(len(ROWS), VOCAB, generator=torch.Generator().manual_seed(2)) * 3
    plans = [SamplePlan(SamplingParams(**way), 7, row) for row, way in enumerate(ROWS)]
    allowed = {
        row: {*generator.sample(range(VOCAB), generator.choice([1, 3, 400]))} for row in range(len(ROWS)) if row % 3
    }
    found = chosen(backend, logits, plans, {row: mask_of((*tokens,), VOCAB) for row, tokens in allowed.items()})
    free = chosen(backend, logits, plans, {})
    by_hand = logits.clone()
    for row, tokens in allowed.items():
        by_hand[row, [token for token in range(VOCAB) if token not in tokens]] = -torch.inf
    raw = logits.log_softmax(-1)
    for row, (got, of_free, of_masked) in enumerate(zip(found, free, chosen(backend, by_hand, plans, {}), strict=True)):
        if row not in allowed:
            assert got == of_free
            continue
        assert got.token_id in allowed[row]
        assert got.token_id == of_masked.token_id
        if plans[row].params.num_logprobs is not None:
            assert got.logprobs.chosen == pytest.approx(float(raw[row, got.token_id]), abs=1e-4)
            assert got.logprobs.top_ids == of_free.logprobs.top_ids


def test_rows_that_are_not_finite_stay_so(backend: SamplingKernels | None) -> None:
    logits = torch.full((2, VOCAB), torch.nan)
    plans = [SamplePlan(SamplingParams(temperature=temperature), 0, 0) for temperature in (0.0, 1.0)]
    assert chosen(backend, logits, plans, {0: mask_of((3, 4), VOCAB), 1: mask_of((5,), VOCAB)}) == [None, None]


def test_within_a_grammar_rules_hold_and_an_answer_that_must_end_ends(backend: SamplingKernels | None) -> None:
    """A row of which nothing is left has no token."""
    generator, few = random.Random(5), range(12)
    logits = torch.randn(200, VOCAB, generator=torch.Generator().manual_seed(3))
    plans, masks, expected = list[SamplePlan](), dict[int, bytes](), logits.clone()

    def some(most: int) -> list[int]:
        return generator.sample(few, generator.randrange(most))

    for row in range(len(logits)):
        rules = TokenRules(
            allowed_token_ids=(*some(9),),
            bad_words=(*((*some(3), token) for token in some(4)),),
            min_tokens=generator.randrange(5),
            late_token_ids=(*some(3),),
        )
        output, in_grammar = some(4), {*some(12), generator.randrange(12)}
        params = SamplingParams(temperature=generator.choice([0.0, 1.0]), rules=rules)
        seen = SeenTokens(packed([]), packed(output))
        plans.append(SamplePlan(params, 7, len(output), seen, is_constrained=True))
        masks[row] = mask_of((*in_grammar,), VOCAB)
        left = {
            token
            for token in in_grammar
            if not any([*output, token][-len(word) :] == [*word] for word in rules.bad_words)
            and (token in rules.allowed_token_ids or not rules.allowed_token_ids)
        }
        if len(output) < rules.min_tokens and left - {*rules.late_token_ids}:
            left -= {*rules.late_token_ids}
        expected[row, [token for token in range(VOCAB) if token not in left]] = -torch.inf
    free = [SamplePlan(SamplingParams(temperature=plan.params.temperature), 7, plan.index) for plan in plans]
    found = chosen(backend, logits, plans, masks)
    assert found == chosen(backend, expected, free, {})
    assert 10 < found.count(None) < 100
