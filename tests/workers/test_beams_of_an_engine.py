"""Beam search from request to answer over a real engine, against transformers; beams share pages."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from motet.tests.rigs.engine_dispatcher import EngineDispatcher, client_of
from motet.tests.rigs.engine_rig import Stock
from motet.tests.rigs.oracle import RECIPES, VOCAB_SIZE, write_adapters, write_model
from motet.tests.rigs.router_rig import BASE

TOLERANCE = 1e-3  # of scores in float32
ADAPTER = RECIPES[2].name
ENDS = list(range(2, VOCAB_SIZE, 6))  # so that beams end at many lengths
PROMPT = [random.Random(7).randrange(VOCAB_SIZE) for _ in range(21)]


@dataclass(frozen=True)
class Bench:
    stock: Stock
    model: Any  # transformers, with the adapter


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("beams")
    path = write_model("llama", folder / "model")
    adapters = write_adapters(path, folder / "adapters")
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, adapters[ADAPTER], adapter_name=ADAPTER).eval()
    yield Bench(Stock.make(path, adapters, folder / "store"), model)
    torch.set_num_threads(num_threads)


def found_by_transformers(
    bench: Bench, adapter: str | None, width: int, max_tokens: int, length_penalty: float, ends: list[int] | None
) -> list[tuple[list[int], float]]:
    """Tokens after the prompt, and scores, the best beam first."""
    arguments = {
        "input_ids": torch.tensor([PROMPT]),
        "num_beams": width,
        "num_return_sequences": width,
        "max_new_tokens": max_tokens,
        "early_stopping": "never",
        "length_penalty": length_penalty,
        "do_sample": False,
        "eos_token_id": ends,
        "pad_token_id": VOCAB_SIZE - 2,
        "return_dict_in_generate": True,
        "output_scores": True,
    }
    if ends is None:
        bench.model.generation_config.eos_token_id = None
    if adapter is None:
        with bench.model.disable_adapter():
            said = bench.model.generate(**arguments)
    else:
        said = bench.model.generate(**arguments)
    found = []
    for row, score in zip(said.sequences[:, len(PROMPT) :].tolist(), said.sequences_scores.tolist(), strict=True):
        end = next((i + 1 for i, token in enumerate(row) if token in (ends or ())), max_tokens)
        found.append((row[:end], score))
    return found


async def ask(bench: Bench, **fields: Any) -> tuple[Any, EngineDispatcher]:
    """The answer, and the sequences that the engine got for it."""
    with bench.stock.engine(num_pages=400, kv_host_bytes=0) as rig:
        dispatcher = EngineDispatcher(rig)
        async with client_of(dispatcher, bench.stock, ADAPTER) as client:
            body = {"model": BASE, "prompt": PROMPT, "return_token_ids": True, **fields}
            response = await client.post("/v1/completions", json=body)
        rig.finish()
        rig.assert_idle()
        return response.json(), dispatcher


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("adapter", [None, ADAPTER])
async def test_it_finds_what_transformers_finds(bench: Bench, adapter: str | None, length_penalty: float) -> None:
    width, max_tokens = 4, 12
    expected = found_by_transformers(bench, adapter, width, max_tokens, length_penalty, ENDS)
    answer, _ = await ask(
        bench,
        model=adapter or BASE,
        use_beam_search=True,
        n=width,
        max_tokens=max_tokens,
        length_penalty=length_penalty,
        stop_token_ids=ENDS,
        ignore_eos=True,
        logprobs=1,
    )
    choices = answer["choices"]
    assert [choice["token_ids"] for choice in choices] == [tokens for tokens, _ in expected]
    for choice, (tokens, score) in zip(choices, expected, strict=True):
        own = sum(choice["logprobs"]["token_logprobs"]) / len(tokens) ** length_penalty
        assert own == pytest.approx(score, abs=TOLERANCE)
        assert choice["finish_reason"] == ("stop" if tokens[-1] in ENDS else "length")
    if length_penalty == 0:
        assert min(len(tokens) for tokens, _ in expected) < max_tokens
    assert answer["usage"]["completion_tokens"] == sum(len(tokens) for tokens, _ in expected)


async def test_the_models_own_end_counts_unless_it_is_ignored(bench: Bench) -> None:
    for ignored, ends in ((False, [VOCAB_SIZE - 1]), (True, None)):
        expected = found_by_transformers(bench, None, 6, 10, 1.0, ends)
        answer, _ = await ask(bench, use_beam_search=True, n=6, max_tokens=10, ignore_eos=ignored)
        assert [choice["token_ids"] for choice in answer["choices"]] == [tokens for tokens, _ in expected]


@pytest.mark.parametrize("width", [1, 4])
async def test_a_search_is_one_request_and_computes_what_forks_need(bench: Bench, width: int) -> None:
    max_tokens = 30
    answer, dispatcher = await ask(bench, use_beam_search=True, n=width, max_tokens=max_tokens, ignore_eos=True)
    assert len(answer["choices"]) == width
    assert len(dispatcher.requests) == 1
    counters = dispatcher.load().counters
    assert counters.num_computed_tokens == len(PROMPT) + width * (max_tokens - 1)
    assert counters.num_generated_tokens == 1 + width * (max_tokens - 1)
    assert counters.num_steps == max_tokens


async def test_best_of_answers_with_the_likeliest(bench: Bench) -> None:
    drawn, _ = await ask(bench, n=5, max_tokens=8, seed=11, logprobs=0, ignore_eos=True)
    answer, dispatcher = await ask(bench, n=2, best_of=5, max_tokens=8, seed=11, ignore_eos=True)

    def mean(choice: Any) -> float:
        logprobs = choice["logprobs"]["token_logprobs"]
        return float(sum(logprobs) / len(logprobs))

    best = sorted(drawn["choices"], key=mean, reverse=True)[:2]
    assert [choice["token_ids"] for choice in answer["choices"]] == [choice["token_ids"] for choice in best]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    assert answer["usage"]["completion_tokens"] == 5 * 8
    assert dispatcher.load().counters.num_cached_tokens >= 4 * 16  # the prompt's full pages were computed once
