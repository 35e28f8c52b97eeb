"""What a worker computes before it is ready: every kernel that requests need later is compiled by then."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="Triton is for Linux on x86-64")

from motet.kernels.backend import triton_kernels
from motet.tests.rigs.engine_rig import Stock
from motet.tests.rigs.oracle import RECIPES, VOCAB_SIZE, write_adapters, write_model
from motet.tests.rigs.specialisations import Specialisation, launched_specialisations
from motet.tests.rigs.stand_in_gpu.stand_in_gpu import stand_in_gpu
from motet.workers import worker_builder
from motet.workers.execution import runner
from motet.workers.execution.warm_up import Rows, StepLimits, doubled, largest_steps, warm_up_steps
from motet.workers.wire.messages import SamplingParams

ADAPTERS = (None, RECIPES[0].name, RECIPES[1].name)
LIMITS = {"max_num_sequences": 6, "max_tokens_per_step": 320}  # more rows than LoRA's short tiles take
CHOSEN: dict[str, Any] = {"max_tokens": 3, "ignore_eos": True}
WAYS = (
    SamplingParams(temperature=0.0, **CHOSEN),
    SamplingParams(temperature=0.8, seed=3, top_p=0.9, num_logprobs=2, **CHOSEN),
    SamplingParams(temperature=0.9, seed=4, repetition_penalty=1.2, **CHOSEN),
)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Stock:
    folder = tmp_path_factory.mktemp("llama")
    model = write_model("llama", folder / "model")
    adapters = write_adapters(model, folder / "adapters")
    chosen = {name: adapters[name] for name in ADAPTERS if name is not None}
    return Stock.make(model, chosen, folder / "store", block_size=16, dtype="bfloat16")


@contextmanager
def recorded_gpu() -> Iterator[set[Specialisation]]:
    """Workers with Triton's kernels, whose launches are recorded. Linears give zeros, so that logits are finite."""

    def zeros(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return torch.zeros((len(x), len(weight)), dtype=x.dtype, device=x.device)

    kernels = replace(triton_kernels(torch.device("cuda"), torch.bfloat16), linear=zeros)
    with (
        stand_in_gpu(),
        mock.patch.object(worker_builder, "choose_kernels", return_value=kernels),
        launched_specialisations() as found,
    ):
        yield found


def specialisations_of(stock: Stock, seed: int) -> tuple[set[Specialisation], set[Specialisation]]:
    """Those before the engine is ready, and those that requests of many lengths needed beside them."""
    generator = random.Random(seed)
    with recorded_gpu() as found, stock.engine(200, device="cuda", **LIMITS) as rig:
        before = set(found)
        for sequence_id in range(24):
            prompt = generator.choices(range(VOCAB_SIZE), k=generator.choice((1, 2, 9, 40, 130, 250)))
            rig.submit(sequence_id, prompt, generator.choice(ADAPTERS), WAYS[sequence_id % len(WAYS)])
            for _ in range(generator.choice((0, 0, 1, 3))):
                rig.step()
        rig.finish()
        assert [told.error for told in rig.told.values()] == [None] * 24
        return before, found - before


def test_serving_needs_no_kernel_that_was_not_compiled(llama: Stock) -> None:
    before, later = specialisations_of(llama, seed=1)
    kernels = Counter(name for name, *_ in before)
    assert {"decode_kernel", "chunk_kernel", "shrink_kernel", "expand_kernel", "write_kv_kernel"} <= kernels.keys()
    assert later == set(), sorted({name for name, *_ in later})


def test_steps_that_are_left_out_are_missed(llama: Stock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts alone, as a worker once computed them, leave kernels to be compiled while it serves."""
    monkeypatch.setattr(runner, "warm_up_steps", lambda limits: ((Rows(length, 0, 0),) for length in (2, 16, 128)))
    _, later = specialisations_of(llama, seed=1)
    assert {name for name, *_ in later} == {"split_kernel", "decode_kernel"}


@pytest.mark.parametrize("limits", [StepLimits(320, 6, 256), StepLimits(2048, 256, 8192), StepLimits(4, 9, 3)])
def test_steps_stay_within_the_limits(limits: StepLimits) -> None:
    steps = [*warm_up_steps(limits), *largest_steps(limits)]
    for step in steps:
        assert 0 < len(step) <= limits.max_sequences
        assert sum(rows.num_tokens for rows in step) <= limits.max_tokens
        assert all(rows.num_tokens > 0 and rows.start + rows.num_tokens <= limits.longest for rows in step)
    assert max(sum(rows.num_tokens for rows in step) for step in steps) == limits.max_tokens
    assert len(steps) < 100


def test_one_sequence_of_one_token() -> None:
    assert list(warm_up_steps(StepLimits(1, 1, 1))) == [(Rows(1, 0, 0),)] * 2


def test_numbers_are_doubled_to_the_end() -> None:
    assert list(doubled(2, 9)) == [2, 4, 8, 9]
    assert list(doubled(2, 8)) == [2, 4, 8]
    assert list(doubled(1, 0)) == []
