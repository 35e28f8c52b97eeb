"""A GPU's engine launches each step before it knows the tokens of the last one, and answers what the CPU answers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from motet.kernels import joint_sampling
from motet.kernels.staging import Arriving
from motet.tests.rigs.engine_dispatcher import EngineDispatcher, client_of
from motet.tests.rigs.engine_rig import EngineRig, SequenceOutput, Stock
from motet.tests.rigs.full_pool import fill_to_the_last_page
from motet.tests.rigs.oracle import RECIPES, VOCAB_SIZE, write_adapters, write_model
from motet.tests.rigs.router_rig import BASE
from motet.tests.rigs.stand_in_gpu.gpu_worker import gpu_of_twins
from motet.tests.rigs.stand_in_gpu.stand_in_gpu import StandInGpu
from motet.tests.rigs.stand_in_gpu.timeline import OrderError
from motet.workers.execution.executor import FeedingExecutor
from motet.workers.execution.runner import Runner
from motet.workers.wire.messages import SamplingParams, ThinkingBudget, TokenRules

ADAPTER = RECIPES[0].name
PROMPT = [random.Random(7).randrange(VOCAB_SIZE) for _ in range(11)]
NUM_TOKENS = 8
ALLOWED = (*range(6),)
# A bad word of three tokens for each of one, so that every third token needs those before it.
RULES = TokenRules(
    allowed_token_ids=ALLOWED,
    bad_words=(*((a, b, a) for a in ALLOWED for b in ALLOWED), *((a, a) for a in ALLOWED), (5,)),
    min_tokens=3,
    late_token_ids=(1, 2),
)
END_OF_THOUGHT = (9, 4)
THINKING = TokenRules(thinking=ThinkingBudget(3, (8,), END_OF_THOUGHT, has_begun=True))
WAYS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "seed": 2, "num_logprobs": 1, "rules": THINKING},
    {"temperature": 0.9, "seed": 4, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"temperature": 0.8, "seed": 3, "top_p": 0.9, "num_logprobs": 2, "rules": RULES},
)


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Stock:
    folder = tmp_path_factory.mktemp("fed")
    model = write_model("llama", folder / "model")
    adapters = write_adapters(model, folder / "adapters")
    return Stock.make(model, {ADAPTER: adapters[ADAPTER]}, folder / "store")


@contextmanager
def engine(
    stock: Stock, device: str, num_pages: int = 60, **settings: Any
) -> Iterator[tuple[EngineRig, StandInGpu | None]]:
    on_gpu = gpu_of_twins() if device == "cuda" else nullcontext()
    with on_gpu as gpu, stock.engine(num_pages, device=device, **settings) as rig:
        yield rig, gpu


def ask(rig: EngineRig, num: int = 3, **more: Any) -> list[SequenceOutput]:
    """Sequences of one length, each with another way of choosing, every other one with an adapter."""
    generator = random.Random(num)
    for index in range(num):
        sampling = SamplingParams(**({"max_tokens": NUM_TOKENS, "ignore_eos": True} | WAYS[index % 3] | more))
        rig.submit(index, generator.choices(range(VOCAB_SIZE), k=11), ADAPTER if index % 2 else None, sampling)
    rig.finish()
    rig.assert_idle()
    return list(rig.outputs.values())


def assert_same(there: list[SequenceOutput], here: list[SequenceOutput]) -> None:
    for output, other in zip(there, here, strict=True):
        assert (output.token_ids, output.finish_reason, output.error) == (other.token_ids, other.finish_reason, None)
        assert [said.chosen for said in output.logprobs] == pytest.approx([s.chosen for s in other.logprobs], abs=1e-3)


def waits_for_tokens(gpu: StandInGpu) -> list[bool]:
    """Of each wait for a step's tokens: has the device nothing to do when they are known?"""
    return [wait.leaves_idle for wait in gpu.tally.waits_of("worker") if wait.line.startswith("kernels/staging.py")]


def test_the_device_has_the_next_step_before_the_host_knows_the_tokens_of_the_last(
    stock: Stock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Penalties included. An engine that waits for the tokens before it lays out the next step is found."""

    def idle() -> tuple[int, int]:
        with engine(stock, "cuda") as (rig, gpu):
            assert gpu is not None
            ask(rig)
            gpu.tally.clear()
            rig.outputs.clear()
            ask(rig)
            waits = waits_for_tokens(gpu)
            return sum(waits), len(waits)

    num_idle, num_waits = idle()
    assert num_waits >= NUM_TOKENS
    assert num_idle <= 2, "the last step has none after it"
    monkeypatch.setattr(FeedingExecutor, "feeds_tokens", False)
    num_idle, num_waits = idle()
    assert num_idle == num_waits >= NUM_TOKENS


def test_tokens_that_are_read_before_they_have_arrived_are_found(stock: Stock, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Arriving.read

    def hasty(arriving: Arriving) -> Any:
        arriving._arrival = None
        return read(arriving)

    monkeypatch.setattr(Arriving, "read", hasty)
    with pytest.raises(OrderError, match="pinned memory"), engine(stock, "cuda") as (rig, _):
        ask(rig)


def test_a_sequence_that_stops_ends_though_the_next_step_has_begun(stock: Stock) -> None:
    with engine(stock, "cpu") as (rig, _):
        stops = tuple(output.token_ids[3] for output in ask(rig))
    answers = []
    for device in ("cpu", "cuda"):
        with engine(stock, device) as (rig, _):
            answers.append(ask(rig, stop_token_ids=stops))
    assert_same(*answers)
    assert {output.finish_reason for output in answers[1]} == {"stop"}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_rules_hold_whatever_was_fed_or_computed_again(stock: Stock, device: str) -> None:
    with engine(stock, device, num_pages=stock.num_pages(19, ADAPTER) + 7) as (rig, _):
        fill_to_the_last_page(rig.engine._scheduler)
        requested = ask(rig, num=6, max_tokens=16, rules=RULES)
        assert rig.engine.load().counters.num_preemptions
    for output in requested:
        tokens = output.token_ids
        assert len(tokens) == 16
        assert set(tokens) <= {0, 1, 2, 3, 4}
        assert not {1, 2} & {*tokens[: RULES.min_tokens]}
        assert all(a not in (b, c) and b != c for a, b, c in zip(tokens, tokens[1:], tokens[2:], strict=False))


def test_who_is_preempted_goes_on_as_on_the_cpu(stock: Stock) -> None:
    answers, numbers = [], []
    for device in ("cpu", "cuda"):
        with engine(stock, device, num_pages=stock.num_pages(19, ADAPTER) + 7) as (rig, _):
            fill_to_the_last_page(rig.engine._scheduler)
            answers.append(ask(rig, num=6, max_tokens=16))
            numbers.append(rig.engine.load().counters.num_preemptions)
    assert_same(*answers)
    assert min(numbers) > 0
    assert all((*reported.token_ids[3:5],) == END_OF_THOUGHT for reported in answers[1][::3])


def test_draws_that_must_look_through_the_whole_vocabulary_are_known_before_they_are_fed(
    stock: Stock, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(stock, "cpu") as (rig, _):
        here = ask(rig, temperature=1.5, top_p=0.98)
    monkeypatch.setattr(joint_sampling, "FIRST_LOOK", 4)
    looked, look = list[int](), joint_sampling._draw_from_all

    def counted(*given: Any) -> Any:
        looked.append(1)
        return look(*given)

    monkeypatch.setattr(joint_sampling, "_draw_from_all", counted)
    with engine(stock, "cuda") as (rig, _):
        assert_same(ask(rig, temperature=1.5, top_p=0.98), here)
    assert looked


def test_draws_that_are_draw_from_all_again_have_their_own_logits(
    stock: Stock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All recordings write into one buffer. The next step, which is fed nothing of this one's, may be one of them."""

    def requested(rig: EngineRig) -> list[SequenceOutput]:
        rig.submit(0, PROMPT, None, SamplingParams(max_tokens=1, ignore_eos=True, seed=3, temperature=1.5, top_p=0.98))
        one_token = SamplingParams(max_tokens=1, ignore_eos=True, temperature=0.0, logit_bias={7: 60.0})
        rig.submit(1, [token + 1 for token in PROMPT], None, one_token)  # with other logits than the first
        rig.finish()
        return list(rig.outputs.values())

    one_prompt = {"max_tokens_per_step": len(PROMPT)}
    with engine(stock, "cpu", **one_prompt) as (rig, _):
        here = requested(rig)
    monkeypatch.setattr(joint_sampling, "FIRST_LOOK", 2)
    launch, buffers = Runner._launch, list[torch.Tensor]()

    def in_one_buffer(runner: Runner, inputs: Any) -> Any:
        launched = launch(runner, inputs)
        if not buffers:
            buffers.append(torch.zeros_like(launched.logits))
        return launched._replace(logits=buffers[0].copy_(launched.logits))

    with engine(stock, "cuda", **one_prompt) as (rig, _):
        monkeypatch.setattr(Runner, "_launch", in_one_buffer)
        assert_same(requested(rig), here)
        buffers.clear()


async def test_beams_are_those_of_the_cpu(stock: Stock, tmp_path: Path) -> None:
    bodies = {"model": BASE, "prompt": PROMPT, "return_token_ids": True, "use_beam_search": True, "n": 3}
    answers = []
    for device in ("cpu", "cuda"):
        with engine(stock, device, num_pages=100) as (rig, _):
            async with client_of(EngineDispatcher(rig), stock, ADAPTER) as client:
                body = bodies | {"max_tokens": 5, "ignore_eos": True, "logprobs": 1}
                answer = (await client.post("/v1/completions", json=body)).json()
            rig.finish()
            rig.assert_idle()
        answers.append([choice["token_ids"] for choice in answer["choices"]])
    assert answers[0] == answers[1] and len(answers[0]) == 3
