"""Masked sampling, by each backend, against logits in which the forbidden tokens cannot be chosen."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from motet.kernels import joint_sampling
from motet.kernels.plain.sampling import PlainSampling
from motet.kernels.sampling import SamplingKernels
from motet.tests.rigs.native_builds import HERE, load_build
from motet.tests.rigs.stand_in_gpu.stand_in_gpu import stand_in_gpu
from motet.workers.decoding.token_choice import sample
from motet.workers.decoding.token_counts import TokenCounts
from motet.workers.plan import SamplePlan, SeenTokens, packed
from motet.workers.wire.messages import SamplingParams

VOCAB = 1003  # no whole number of words
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
    counts = [TokenCounts(seen) if plan.params.has_penalty else None for plan in plans]
    if backend is not None:
        return sample(logits.clone(), plans, backend, counts, masks)
    with stand_in_gpu():
        return sample(logits.to(torch.device("cuda", 0)), plans, PlainSampling(), counts, masks)


def mask_of(allowed: set[int]) -> bytes:
    bits = np.zeros(-(-VOCAB // 32) * 32, np.uint8)
    bits[[*allowed]] = 1
    return np.packbits(bits, bitorder="little").tobytes()


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
    found = chosen(backend, logits, plans, {row: mask_of(tokens) for row, tokens in allowed.items()})
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
    assert chosen(backend, logits, plans, {0: mask_of({3, 4}), 1: mask_of({5})}) == [None, None]
