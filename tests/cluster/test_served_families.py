"""Families through the served API, each from its folder alone: tokens and log-probabilities of transformers and PEFT.

Adapters are uploaded; one of them has all linears that PEFT finds. Each base costs two seconds of CPU, for a gang, a
router, the process that checks uploads, and the models that answers are compared with. CI serves one of each kind.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from redis.asyncio import Redis
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from motet.adapters.format.validation import validate
from motet.adapters.packing.layout import Dtype
from motet.tests.rigs.full_pool import fill_to_the_last_page
from motet.tests.rigs.grammar_tokenizer import write_tokenizer
from motet.tests.rigs.oracle import (
    VARIANTS,
    VOCAB_SIZE,
    WITHOUT_OUT_PROJ,
    WRAPPED,
    patterns_may_match_nothing,
    write_model,
)
from motet.tests.rigs.router_rig import events_of
from motet.tests.rigs.served_folder import ServedFolder, served_folder
from motet.workers.memory.page_arrays import pool_of
from motet.workers.models.config import ModelConfig
from motet.workers.models.sharding import ModelSharding

pytestmark = [pytest.mark.slow, pytest.mark.each_kind]
TOLERANCE = 4e-4  # of log-probabilities in float32; below it a choice is a close call, which rounding may decide
BFLOAT16_TOLERANCE = 0.25  # of log-probabilities, in the mean
BLOCK_SIZE, NUM_TOKENS, LONGEST, NUM_TOP = 8, 32, 45, 5
IN_ALL_WAYS = ("llama", "gpt_oss", "deepseek_v3", "qwen3_5", "falcon_h1_biases")  # in CI too
EVERY_LINEAR, SOME = "every-linear", "some"
ADAPTERS: Mapping[str, Mapping[str, Any]] = {
    EVERY_LINEAR: {"r": 3, "lora_alpha": 6, "target_modules": "all-linear"},
    SOME: {
        "r": 5,
        "lora_alpha": 2,
        "use_rslora": True,
        "target_modules": r".*\.(q_proj|q_b_proj|kv_b_proj|qkv_proj|o_proj|in_proj|in_proj_qkvz?)",
    },
}
MODELS: Sequence[str | None] = (None, EVERY_LINEAR, SOME, None, SOME, EVERY_LINEAR)
BEGINNING = [(7 * place + 3) % VOCAB_SIZE for place in range(19)]
FIELDS = {
    "max_tokens": NUM_TOKENS,
    "temperature": 0,
    "ignore_eos": True,
    "logprobs": NUM_TOP,
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
}


@dataclass(frozen=True)
class Question:
    adapter: str | None
    prompt: list[int]
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    folder: Path
    models: Mapping[str | None, Any]  # transformers', with each adapter's products added to the weights

    @torch.inference_mode()
    def logprobs(self, token_ids: Sequence[int], adapter: str | None) -> torch.Tensor:
        """`[num_tokens, vocab]`: row i is what the token after token i is chosen from."""
        model = self.models[adapter]
        if model.config.model_type == "llama4":  # the whole model raises without a picture
            model = model.language_model
        logits: torch.Tensor = model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0]
        return logits.log_softmax(-1)


def _write_adapters(variant: str, model_path: Path, folder: Path) -> dict[str | None, Any]:
    """Writes folders of PEFT with random matrices. Returns transformers' models with each of them merged in."""
    loader = AutoModelForImageTextToText if variant in WRAPPED else AutoModelForCausalLM
    base = loader.from_pretrained(model_path, dtype=torch.float32, attn_implementation="eager").eval()
    models: dict[str | None, Any] = {None: base}
    generator = torch.Generator().manual_seed(5)
    for name, options in ADAPTERS.items():
        with patterns_may_match_nothing():
            peft = get_peft_model(deepcopy(base), LoraConfig(**options, exclude_modules=_excluded(base, variant)))
        for key, parameter in peft.named_parameters():
            is_text = variant not in WRAPPED or "language_model" in key  # after training on text B of vision is 0
            if "lora_A" in key or ("lora_B" in key and is_text):
                std = 0.3 if "lora_B" in key else parameter.shape[-1] ** -0.5
                parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * std)
        peft.save_pretrained(folder / name)
        models[name] = peft.merge_and_unload().eval()
    return models


def _excluded(base: Any, variant: str) -> str | None:
    """What PEFT refuses, and the router of a wrapped Llama 4, which it takes for a linear."""
    if base.config.model_type in WITHOUT_OUT_PROJ:
        return r".*out_proj"
    return {"gemma4_vision": r".*vision_tower.*", "llama4_vision": r".*router"}.get(variant)


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp(request.param)
    model_path = write_model(request.param, folder / "model")
    write_tokenizer(model_path)
    case = Case(folder, _write_adapters(request.param, model_path, folder))
    rows = torch.stack([case.logprobs(BEGINNING, adapter)[-1] for adapter in case.models])
    apart = (rows[:, None] - rows[None]).abs().amax(dim=-1) + torch.eye(len(rows)) * 10
    assert apart.min() > 0.1, "the adapters make no difference to compare"
    yield case
    torch.set_num_threads(num_threads)


@asynccontextmanager
async def _served(case: Case, redis: Redis, data_dir: Path, degree: int, dtype: Dtype) -> AsyncIterator[ServedFolder]:
    """With a pool that holds the longest sequence with its adapter, and little more."""
    model_path = case.folder / "model"
    model = ModelConfig.from_folder(model_path)
    try:
        sharding = ModelSharding(model, degree)
    except ValueError as error:
        pytest.skip(str(error))
    geometry = pool_of(sharding, BLOCK_SIZE, getattr(torch, dtype), 1)
    layout, num_adapter_pages = sharding.layout(BLOCK_SIZE, dtype), 0
    for name in ADAPTERS:
        config, tensors = (case.folder / name / file for file in ("adapter_config.json", "adapter_model.safetensors"))
        ranks = validate(config.read_bytes(), tensors, model.shape).module_ranks
        num_adapter_pages = max(num_adapter_pages, layout.num_pages(ranks))
    num_pages = 3 + (LONGEST + NUM_TOKENS) // BLOCK_SIZE + 3 * geometry.state.num_pages + num_adapter_pages
    settings = {
        "dtype": dtype,
        "tensor_parallel": degree,
        "block_size": BLOCK_SIZE,
        "pool_bytes": num_pages * geometry.page_bytes,
        "max_tokens_per_step": 16,
        "num_threads": 1,
    }
    async with served_folder(model_path, data_dir, redis, **settings) as served:
        fill_to_the_last_page(served.loop._engine._scheduler)
        for name in ADAPTERS:
            await served.upload(name, case.folder / name)
        yield served


def _questions() -> list[Question]:
    """Some begin alike, one is streamed, one draws two answers, and one has its prompt scored."""
    generator = random.Random(3)
    questions = []
    for number, adapter in enumerate(MODELS):
        rest = [generator.randrange(VOCAB_SIZE) for _ in range(generator.randint(1, LONGEST - len(BEGINNING)))]
        questions.append(Question(adapter, [*BEGINNING, *rest] if number > 1 else rest))
    questions.append(Question(EVERY_LINEAR, questions[-1].prompt, {"n": 2, "temperature": 1.0, "seed": 3}))
    questions.append(Question(SOME, questions[0].prompt, {"stream": True}))
    questions.append(Question(None, questions[2].prompt, {"prompt_logprobs": NUM_TOP}))
    return questions


async def _choices(served: ServedFolder, question: Question) -> list[Any]:
    """The choices of its answer, put together where it is streamed."""
    response = await served.complete(question.adapter, question.prompt, **{**FIELDS, **question.fields})
    if "stream" not in question.fields:
        choices: list[Any] = response.json()["choices"]
        return choices
    token_ids, tops = list[int](), list[Any]()
    for event in events_of(response.content)[:-1]:
        (choice,) = event.chunk["choices"]
        token_ids += choice["token_ids"]
        tops += choice["logprobs"]["top_logprobs"]
    return [{"token_ids": token_ids, "logprobs": {"top_logprobs": tops}}]


def _rows(question: Question, choice: Any) -> list[tuple[int, dict[int, float]]]:
    """For each scored token of the prompt, then each of the answer: its id, and log-probabilities by id."""
    tops = choice["logprobs"]["top_logprobs"]
    assert len(choice["token_ids"]) == len(tops) == NUM_TOKENS
    named = [{int(name.removeprefix("token_id:")): value for name, value in top.items()} for top in tops]
    rows = [*zip(choice["token_ids"], named, strict=True)]
    if "prompt_logprobs" not in question.fields:
        return rows
    scores = [{int(name): one["logprob"] for name, one in row.items()} for row in choice["prompt_logprobs"][1:]]
    return [*zip(question.prompt[1:], scores, strict=True), *rows]


def _assert_exact(case: Case, question: Question, choice: Any) -> None:
    """Tokens that are greedy by the oracle's own numbers, and log-probabilities that are the oracle's."""
    rows = _rows(question, choice)
    expected = case.logprobs([*question.prompt, *choice["token_ids"][:-1]], question.adapter)[-len(rows) :]
    for number, ((token_id, shown), row) in enumerate(zip(rows, expected, strict=True)):
        where = f"{question}, row {number - len(rows)} from the end"
        assert [*shown.values()] == pytest.approx([float(row[each]) for each in shown], abs=TOLERANCE), where
        likeliest = float(row.topk(NUM_TOP).values[-1])
        assert sum(value > likeliest - TOLERANCE for value in shown.values()) >= NUM_TOP, where
        if number >= len(rows) - NUM_TOKENS and "temperature" not in question.fields:
            assert row.max() - row[token_id] < TOLERANCE, where


def _assert_near(case: Case, questions: Sequence[Question], answers: Sequence[list[Any]]) -> None:
    """The log-probabilities of first tokens are near those of the oracle, which computes in float32."""
    apart = []
    for question, choices in zip(questions, answers, strict=True):
        expected = case.logprobs(question.prompt, question.adapter)[-1]
        for choice in choices:
            _, shown = _rows(question, choice)[-NUM_TOKENS]
            apart.append(sum(abs(value - float(expected[each])) for each, value in shown.items()) / len(shown))
    assert median(apart) < BFLOAT16_TOLERANCE, apart  # rounding may choose another expert for a row


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each base is served by a worker alone, in float32. Some, with --thorough all, also by two and in bfloat16."""
    bases: list[str] = [*VARIANTS, *WRAPPED]
    ways: list[tuple[int, Dtype]] = [(1, "float32"), (2, "float32"), (1, "bfloat16")]
    served = [
        (base, *way)
        for base in bases
        for way in ways
        if way == ways[0] or base in IN_ALL_WAYS or metafunc.config.option.thorough
    ]
    metafunc.parametrize(("case", "degree", "dtype"), served, indirect=["case"])


async def test_a_mixed_batch(case: Case, degree: int, dtype: Dtype, redis_client: Redis, tmp_path: Path) -> None:
    """Prompts in chunks, beside decodes, preempted; then some that go on behind a prompt that was there."""
    async with _served(case, redis_client, tmp_path, degree, dtype) as served:
        questions = _questions()
        answers = await asyncio.gather(*(_choices(served, question) for question in questions))
        assert served.load.counters.num_preemptions > 0
        if dtype == "bfloat16":
            _assert_near(case, questions, answers)
            return
        for question, choices in zip(questions, answers, strict=True):
            assert len(choices) == question.fields.get("n", 1)
            for choice in choices:
                _assert_exact(case, question, choice)
        first, second = answers[len(MODELS)]
        assert first["token_ids"] != second["token_ids"], "both choices are alike"
        num_cached = 0
        for num_more in range(3):
            question = Question(EVERY_LINEAR, [*BEGINNING, *range(num_more)])
            response = await served.complete(EVERY_LINEAR, question.prompt, **FIELDS)
            _assert_exact(case, question, response.json()["choices"][0])
            num_cached += response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert num_cached >= 2 * BLOCK_SIZE
