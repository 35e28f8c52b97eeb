"""Measures how often a demo model gives exactly the right answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from .chat import END_OF_TURN, answered, chat_prompt, question_messages
from .tools import TOOLS, ToolQuestion

_BATCH_SIZE = 64
_MAX_NEW_TOKENS = 64


@dataclass(frozen=True)
class WrongAnswer:
    question: str
    expected: str
    given: str


@dataclass(frozen=True)
class Accuracy:
    """Exact matches; `wrong` holds all the others."""

    num_questions: int
    wrong: tuple[WrongAnswer, ...]

    @property
    def share(self) -> float:
        return 1 - len(self.wrong) / self.num_questions


def exact_match(
    model: Any, tokenizer: PreTrainedTokenizerFast, pairs: Sequence[tuple[str, str]], system: str | None = None
) -> Accuracy:
    """Greedy answers of `model` to the (question, right answer) pairs, each asked in a fresh conversation."""
    prompts = [chat_prompt(tokenizer, question_messages(question, system)) for question, _ in pairs]
    return _matches(model, tokenizer, prompts, pairs)


def exact_tool_use(
    model: Any, tokenizer: PreTrainedTokenizerFast, questions: Sequence[ToolQuestion]
) -> tuple[Accuracy, Accuracy]:
    """Of the calls that `model` makes for the questions, both tools given, and of its answers to the tools' results."""
    found = []
    for num_messages in (2, 4):  # up to the call, and up to the answer
        prompts, pairs = [], []
        for question in questions:
            messages = question.messages()[:num_messages]
            prompts.append(chat_prompt(tokenizer, messages[:-1], TOOLS))
            pairs.append((question.text, answered(tokenizer, messages, TOOLS).removesuffix(END_OF_TURN)))
        found.append(_matches(model, tokenizer, prompts, pairs))
    return found[0], found[1]


def exact_beside_tools(model: Any, tokenizer: PreTrainedTokenizerFast, pairs: Sequence[tuple[str, str]]) -> Accuracy:
    """As `exact_match`, with tools given that are of no use."""
    prompts = [chat_prompt(tokenizer, question_messages(question), TOOLS) for question, _ in pairs]
    return _matches(model, tokenizer, prompts, pairs)


def _matches(
    model: Any, tokenizer: PreTrainedTokenizerFast, prompts: Sequence[str], pairs: Sequence[tuple[str, str]]
) -> Accuracy:
    wrong: list[WrongAnswer] = []
    for start in range(0, len(pairs), _BATCH_SIZE):
        answers = _answers(model, tokenizer, prompts[start : start + _BATCH_SIZE])
        for (question, expected), given in zip(pairs[start : start + _BATCH_SIZE], answers, strict=True):
            if given != expected:
                wrong.append(WrongAnswer(question, expected, given))
    return Accuracy(len(pairs), tuple(wrong))


@torch.no_grad()
def _answers(model: Any, tokenizer: PreTrainedTokenizerFast, prompts: Sequence[str]) -> list[str]:
    model.eval()
    inputs = tokenizer(list(prompts), add_special_tokens=False, padding=True, padding_side="left", return_tensors="pt")
    generated = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=_MAX_NEW_TOKENS,
        do_sample=False,
    )
    num_prompt_tokens = inputs["input_ids"].shape[1]
    return [tokenizer.decode(row[num_prompt_tokens:], skip_special_tokens=True) for row in generated]
