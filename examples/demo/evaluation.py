"""Measures how often a demo model gives exactly the right answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from .chat import chat_prompt, question_messages

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
    wrong: list[WrongAnswer] = []
    for start in range(0, len(pairs), _BATCH_SIZE):
        chunk = pairs[start : start + _BATCH_SIZE]
        prompts = [chat_prompt(tokenizer, question_messages(question, system)) for question, _ in chunk]
        for (question, expected), given in zip(chunk, _answers(model, tokenizer, prompts), strict=True):
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
