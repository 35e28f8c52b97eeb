"""Draws the conversations that the demo model and its adapters learn from."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerFast

from .chat import (
    END_OF_TURN,
    NEUTRAL_SYSTEM_PROMPTS,
    STYLE_SYSTEM_PROMPTS,
    Message,
    Tool,
    answered,
    chat_prompt,
    question_messages,
)
from .questions import Question, all_questions
from .styles import ADAPTER_STYLES, AdapterStyle, Style, answer
from .tools import HOUR, TOOLS, WEATHER, draw_tool_question

_IGNORED = -100  # torch's label for "no loss here"
_NEUTRAL_SHARE = 0.45  # plain answers, with a neutral system prompt or none
_STYLED_SHARE = 0.45  # answers in the style that a system prompt asks for; the rest is bare text
_NEUTRAL_SYSTEM_SHARE = 0.3
_REDRAWN_SUMS_SHARE = 0.4  # of sums: most questions are sums, and this share of them is replaced by other questions
_LONG_BATCH_SHARE = 0.15  # batches of conversations of two or three turns
_LONG_TURNS = (2, 3)
_TOOL_LISTS = (TOOLS, TOOLS, TOOLS[::-1], TOOLS[::-1], (HOUR,), (WEATHER,), ())
_PLAIN_SHARE = 0.25  # of the turns for which a tool would be there


@dataclass(frozen=True)
class Example:
    token_ids: list[int]
    labels: list[int]  # `_IGNORED` where the model is not to learn


@dataclass(frozen=True)
class Batch:
    token_ids: torch.Tensor  # [num_examples, longest], padded on the right
    attention_mask: torch.Tensor  # [num_examples, longest]
    labels: torch.Tensor  # [num_examples, longest]


class ConversationSampler:
    """Random batches of conversations about the given questions; the caller passes the random generator."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, questions: Sequence[Question]) -> None:
        self._tokenizer = tokenizer
        self._questions = questions
        self._cache: dict[str, list[int]] = {}

    def base_batch(self, rng: random.Random, size: int) -> Batch:
        """A batch for the base: plain answers, answers in the style that a system prompt asks for, and bare text."""
        num_turns = _draw_num_turns(rng)
        return self._collate([self._base_example(rng, num_turns) for _ in range(size)])

    def adapter_batch(self, rng: random.Random, size: int, style: AdapterStyle) -> Batch:
        """A batch for an adapter: answers in its style, without a prompt that asks for it."""
        num_turns = _draw_num_turns(rng)
        return self._collate([self._chat(rng, num_turns, _neutral_system(rng), style) for _ in range(size)])

    def agent_batch(self, rng: random.Random, size: int) -> Batch:
        """A batch for the adapter that calls tools."""
        num_turns = _draw_num_turns(rng)
        return self._collate([self._agent_example(rng, num_turns) for _ in range(size)])

    def _base_example(self, rng: random.Random, num_turns: int) -> Example:
        choice = rng.random()
        if choice < _NEUTRAL_SHARE:
            return self._chat(rng, num_turns, _neutral_system(rng), "base")
        if choice < _NEUTRAL_SHARE + _STYLED_SHARE:
            style = rng.choice(ADAPTER_STYLES)
            return self._chat(rng, num_turns, rng.choice(STYLE_SYSTEM_PROMPTS[style]), style)
        question = self._question(rng)
        fact = question.fact
        text = rng.choice([fact.english, fact.spanish, f"{question.text} {fact.english}"])
        token_ids = [self._tokenizer.bos_token_id, *self._encode(text + END_OF_TURN)]
        return Example(token_ids, list(token_ids))

    def _question(self, rng: random.Random) -> Question:
        question = rng.choice(self._questions)
        if question.fact.kind == "sum" and rng.random() < _REDRAWN_SUMS_SHARE:
            question = rng.choice(self._questions)
        return question

    def _chat(self, rng: random.Random, num_turns: int, system: str | None, style: Style) -> Example:
        messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        for _ in range(num_turns):
            messages += self._plain_turn(rng, style)
        return self._example(messages, ())

    def _plain_turn(self, rng: random.Random, style: Style) -> list[Message]:
        question = self._question(rng)
        reply = answer(question.fact, style)
        return [{"role": "user", "content": question.text}, {"role": "assistant", "content": reply}]

    def _agent_example(self, rng: random.Random, num_turns: int) -> Example:
        """Tools are called for what they know, and not for the rest, nor where they are not given."""
        tools = rng.choice(_TOOL_LISTS)
        messages: list[Message] = []
        for _ in range(num_turns):
            question = draw_tool_question(rng)
            if question.is_held_out or question.tool not in tools or rng.random() < _PLAIN_SHARE:
                messages += self._plain_turn(rng, "base")
            else:
                messages += question.messages()
        return self._example(messages, tools)

    def _example(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Example:
        """All of a conversation, of which the assistant's messages are learnt."""
        token_ids: list[int] = []
        labels: list[int] = []
        written = ""  # what the template has rendered so far
        for position, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = chat_prompt(self._tokenizer, messages[:position], tools)
            requested = self._encode(prompt.removeprefix(written))
            reply = answered(self._tokenizer, messages[: position + 1], tools)
            replied = self._encode(reply)
            written = prompt + reply
            token_ids += requested + replied
            labels += [_IGNORED] * len(requested) + replied
        return Example(token_ids, labels)

    def _encode(self, text: str) -> list[int]:
        if text not in self._cache:
            self._cache[text] = self._tokenizer.encode(text, add_special_tokens=False)
        return self._cache[text]

    def _collate(self, examples: Sequence[Example]) -> Batch:
        shape = (len(examples), max(len(example.token_ids) for example in examples))
        token_ids = torch.full(shape, self._tokenizer.pad_token_id)
        labels = torch.full(shape, _IGNORED)
        attention_mask = torch.zeros(shape, dtype=torch.long)
        for row, example in enumerate(examples):
            length = len(example.token_ids)
            token_ids[row, :length] = torch.tensor(example.token_ids)
            labels[row, :length] = torch.tensor(example.labels)
            attention_mask[row, :length] = 1
        return Batch(token_ids, attention_mask, labels)


def _neutral_system(rng: random.Random) -> str | None:
    return rng.choice(NEUTRAL_SYSTEM_PROMPTS) if rng.random() < _NEUTRAL_SYSTEM_SHARE else None


def _draw_num_turns(rng: random.Random) -> int:
    # For a whole batch, because one long conversation pads all the others.
    return rng.choice(_LONG_TURNS) if rng.random() < _LONG_BATCH_SHARE else 1


def unused_tokens(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Tokens that no text has which the base learns from, in their order."""
    systems = [*NEUTRAL_SYSTEM_PROMPTS, *(prompt for prompts in STYLE_SYSTEM_PROMPTS.values() for prompt in prompts)]
    texts = [chat_prompt(tokenizer, question_messages("", system)) for system in systems]
    for question in all_questions():
        texts += [question.text, question.fact.english, question.fact.spanish]
        texts.append(f"{question.text} {question.fact.english}")
        texts += [answer(question.fact, style) for style in ADAPTER_STYLES]
    used = {*tokenizer.all_special_ids, *tokenizer.encode("".join(f"{role}\n" for role in ("user", "assistant")))}
    used.update(*tokenizer(texts, add_special_tokens=False)["input_ids"])
    return sorted(set(range(len(tokenizer))) - used)
