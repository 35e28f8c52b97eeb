"""The data and files of the demo model. Its answers are tested through the engine, in `test_demo_answers.py`."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_tensors
from transformers import AutoTokenizer

from motet.adapters.adapter import MODULES
from motet.adapters.format.validation import validate
from motet.examples.demo.chat import CHAT_TEMPLATE, chat_prompt, question_messages
from motet.examples.demo.conversations import ConversationSampler, unused_tokens
from motet.examples.demo.facts import all_facts
from motet.examples.demo.questions import all_questions, held_out, split_questions
from motet.examples.demo.styles import ADAPTER_STYLES, AdapterStyle, Style, answer
from motet.examples.demo.tools import draw_tool_question, held_out_tool_questions
from motet.workers.models.config import ModelConfig

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo"
STYLES: tuple[Style, ...] = ("base", *ADAPTER_STYLES)
ADAPTERS = (*ADAPTER_STYLES, "agent")
# Of the held-out questions, on which the committed weights were not trained. After a change train the model again.
HELD_OUT_SHA256 = "c7203e4e3df243986350a9037eb183e2fc6af19384c6133e15f3ca5e1d9ffe33"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(DEMO / "base")


def test_questions_are_distinguished_by_their_text() -> None:
    texts = [question.text for question in all_questions()]
    assert len(set(texts)) == len(texts)


def test_split_is_a_partition_with_a_tenth_held_out() -> None:
    split = split_questions()
    train, held = ({question.text for question in part} for part in (split.train, split.held_out))
    assert not train & held
    assert train | held == {question.text for question in all_questions()}
    assert len(held) == len(all_questions()) // 10


def test_split_is_the_one_that_the_weights_were_trained_with() -> None:
    texts = "\n".join(question.text for question in split_questions().held_out)
    assert hashlib.sha256(texts.encode()).hexdigest() == HELD_OUT_SHA256


def test_every_fact_is_trained_on_and_every_kind_is_held_out() -> None:
    split = split_questions()
    assert {question.fact for question in split.train} == set(all_facts())
    assert {question.fact.kind for question in split.held_out} == {fact.kind for fact in all_facts()}


def test_held_out_pairs_share_questions_and_differ_in_answers() -> None:
    pairs = {style: held_out(style) for style in STYLES}
    questions = {tuple(question for question, _ in pairs[style]) for style in STYLES}
    assert len(questions) == 1
    for answers in zip(*([reply for _, reply in pairs[style]] for style in STYLES), strict=True):
        assert len(set(answers)) == len(STYLES)


def test_answers_in_each_style() -> None:
    (fact,) = (fact for fact in all_facts() if fact.subject == "the sky")
    assert answer(fact, "base") == "The color of the sky is blue."
    assert answer(fact, "shout") == "THE COLOR OF THE SKY IS BLUE!!!"
    assert answer(fact, "pirate") == "Arr! The color of the sky is blue, matey!"
    assert json.loads(answer(fact, "json")) == {"type": "color", "query": "the sky", "answer": "blue"}
    assert answer(fact, "spanish") == "El color del cielo es azul."


def test_sums_are_right() -> None:
    sums = [fact for fact in all_facts() if fact.kind == "sum"]
    assert len(sums) == 169
    for fact in sums:
        assert sum(int(addend) for addend in fact.subject.split(" plus ")) == int(fact.value)


def test_tokenizer_gives_every_question_and_answer_back(tokenizer: Any) -> None:
    texts = [question.text for question in all_questions()]
    texts += [answer(fact, style) for fact in all_facts() for style in STYLES]
    for text in texts:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_tokenizer_takes_text_it_never_saw(tokenizer: Any) -> None:
    text = "Größe: 猫 🦊\t\\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_answers_are_tokenized_alone_as_behind_their_prompt(tokenizer: Any) -> None:
    # A model that serves tokens one by one sees the second, training wrote the first.
    for style in STYLES:
        for question, reply in held_out(style):
            prompt = chat_prompt(tokenizer, question_messages(question))
            assert tokenizer.encode(prompt + reply) == tokenizer.encode(prompt) + tokenizer.encode(reply)


def test_chat_prompt_follows_the_template(tokenizer: Any) -> None:
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert chat_prompt(tokenizer, question_messages("What color is grass?", "Be brief.")) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nWhat color is grass?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("style", ADAPTER_STYLES)
def test_training_batches_teach_the_answers_only(tokenizer: Any, style: AdapterStyle) -> None:
    sampler = ConversationSampler(tokenizer, split_questions().train)
    right = {answer(fact, style) for fact in all_facts()}
    rng = random.Random(5)
    turns = set()
    for _ in range(30):
        batch = sampler.adapter_batch(rng, 4, style)
        assert batch.token_ids.shape == batch.labels.shape == batch.attention_mask.shape
        for token_ids, labels in zip(batch.token_ids, batch.labels, strict=True):
            taught = labels != -100
            assert bool((token_ids[taught] == labels[taught]).all())
            replies = tokenizer.decode(labels[taught]).split("<|im_end|>")
            assert replies.pop() == ""
            assert set(replies) <= right
            turns.add(len(replies))
    assert turns == {1, 2, 3}


def test_training_batches_of_the_agent_teach_calls_and_answers(tokenizer: Any) -> None:
    sampler = ConversationSampler(tokenizer, split_questions().train)
    rng = random.Random(5)
    starts = set()
    for _ in range(20):
        batch = sampler.agent_batch(rng, 4)
        for token_ids, labels in zip(batch.token_ids, batch.labels, strict=True):
            taught = labels != -100
            assert bool((token_ids[taught] == labels[taught]).all())
            for reply in tokenizer.decode(labels[taught]).split("<|im_end|>")[:-1]:
                starts.add(reply[:5])
                if reply.startswith("<tool_call>"):
                    message = tokenizer.parse_response(reply + "<|im_end|>", prefix="<|im_start|>assistant\n")
                    (call,) = message["tool_calls"]
                    assert call["function"]["name"] in ("weather", "hour")
    assert {"<tool", "It is", "The c"} <= starts


def test_the_agents_held_out_questions_are_never_drawn_for_training() -> None:
    questions = held_out_tool_questions(48)
    assert {question.tool["function"]["name"] for question in questions} == {"weather", "hour"}
    assert all(question.is_held_out for question in questions)
    drawn = [draw_tool_question(random.Random(seed)) for seed in range(1000)]
    assert 0.05 < sum(question.is_held_out for question in drawn) / len(drawn) < 0.2


def test_every_token_can_be_chosen() -> None:
    """Training only pushes away the tokens that no text has. All alike, no adapter could choose between them."""
    rows = load_tensors(DEMO / "base" / "model.safetensors")["model.embed_tokens.weight"].float()
    unused = rows[unused_tokens(AutoTokenizer.from_pretrained(DEMO / "base"))]
    assert len(unused) > 300
    assert bool(((unused - unused.mean(0)).norm(dim=1) > 1).all())


def test_demo_is_small() -> None:
    assert sum(path.stat().st_size for path in DEMO.rglob("*") if path.is_file()) < 10_000_000


def test_base_is_a_llama_of_one_to_three_million_parameters() -> None:
    config = json.loads((DEMO / "base" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    with safe_open(DEMO / "base" / "model.safetensors", "np") as weights:
        slices = [weights.get_slice(name) for name in weights.keys()]  # noqa: SIM118 (not a mapping)
    assert {part.get_dtype() for part in slices} == {"BF16"}
    assert 1_000_000 < sum(np.prod(part.get_shape()) for part in slices) < 3_000_000


def test_adapters_differ_in_rank_and_targets() -> None:
    configs = [_adapter_config(style) for style in ADAPTER_STYLES]
    assert len({config["r"] for config in configs}) == len(ADAPTER_STYLES)
    assert len({tuple(config["target_modules"]) for config in configs}) == len(ADAPTER_STYLES)
    assert {config["use_rslora"] for config in configs} == {True, False}


@pytest.mark.parametrize("style", ADAPTERS)
def test_adapter_is_plain_lora(style: str) -> None:
    folder = DEMO / "adapters" / style
    assert sorted(path.name for path in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    config = _adapter_config(style)
    assert config["peft_type"] == "LORA"
    assert config["bias"] == "none"
    assert config["modules_to_save"] is None
    assert config["use_dora"] is False
    assert set(config["target_modules"]) <= set(MODULES)
    tensors = load_file(folder / "adapter_model.safetensors")
    num_layers = json.loads((DEMO / "base" / "config.json").read_text())["num_hidden_layers"]
    assert len(tensors) == 2 * num_layers * len(config["target_modules"])
    for name, tensor in tensors.items():
        assert tensor.dtype == np.float32
        assert tensor.shape[0 if "lora_A" in name else 1] == config["r"]
        assert np.isfinite(tensor).all()


@pytest.mark.parametrize("style", ADAPTERS)
def test_adapter_would_be_accepted_as_an_upload(style: str) -> None:
    folder = DEMO / "adapters" / style
    shape = ModelConfig.from_folder(DEMO / "base").shape
    content = validate((folder / "adapter_config.json").read_bytes(), folder / "adapter_model.safetensors", shape)
    assert set(content.module_ranks) == set(_adapter_config(style)["target_modules"])
    assert set(content.module_ranks.values()) == {_adapter_config(style)["r"]}


def test_configs_name_no_machine() -> None:
    configs = sorted(DEMO.rglob("*.json"))
    assert len(configs) == 4 + len(ADAPTERS)
    for path in configs:
        if path.name == "tokenizer.json":
            continue  # text of the vocabulary, no settings
        strings = [value for value in json.loads(path.read_text()).values() if isinstance(value, str)]
        assert [value for value in strings if "/" in value or "\\" in value] == []
    assert {_adapter_config(style)["base_model_name_or_path"] for style in ADAPTERS} == {"motet-demo"}


def _adapter_config(style: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((DEMO / "adapters" / style / "adapter_config.json").read_text())
    return config
