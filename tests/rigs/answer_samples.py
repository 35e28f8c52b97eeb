"""Texts of answers in each format that is known, and the message that each of them is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from motet.router.text.answer_format import AnswerFormat, named_format
from motet.router.text.call_parsing import Call, KnownTools
from motet.router.text.response_reader import Piece, Reading, ResponseReader, TextPiece

TOOLS: Final[list[dict[str, Any]]] = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {"type": "object", "properties": {"a": {"type": "string"}, "n": {"type": "integer"}}},
        },
    },
    {"type": "function", "function": {"name": "g", "parameters": {"type": "object", "properties": {}}}},
]
ARGUMENTS: Final = '{"a": "x {\\"y\\"} é", "n": 3}'
_F: Final[tuple[str, dict[str, Any]]] = ("f", {"a": 'x {"y"} é', "n": 3})
_G: Final[tuple[str, dict[str, Any]]] = ("g", {})
_CALL_BEGIN, _SEP, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


@dataclass(frozen=True)
class Sample:
    text: str
    content: str = ""
    reasoning: str = ""
    calls: Sequence[tuple[str, dict[str, Any]]] = ()
    prompt: str = ""
    is_alike: bool = True  # transformers reads it so, too; else it forgets content before calls, or knows no list


SAMPLES: Final = MappingProxyType(
    {
        "hermes": Sample(
            f'<think>\nwell\n</think>\n\nSo.\n<tool_call>\n{{"name": "f", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
            '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>',
            "So.",
            "well",
            [_F, _G],
            is_alike=False,
        ),
        "qwen-xml": Sample(
            "<think>\nwell\n</think>\n\n<tool_call>\n<function=f>\n<parameter=a>\n  x\ny\n</parameter>\n<parameter=n>\n"
            "3\n</parameter>\n</function>\n</tool_call>",
            "",
            "well",
            [("f", {"a": "  x\ny", "n": 3})],
        ),
        "glm": Sample(
            "<think>hm</think>\n<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>5</arg_value>\n<arg_key>n</arg_key>\n"
            "<arg_value>3</arg_value>\n</tool_call>",
            "",
            "hm",
            [("f", {"a": "5", "n": 3})],
        ),
        "llama-json": Sample(
            f'{{"name": "f", "parameters": {ARGUMENTS}}}; {{"name": "g", "parameters": {{}}}}',
            calls=[_F, _G],
            is_alike=False,
        ),
        "pythonic": Sample('[f(a="x, y", n=3), g()]', calls=[("f", {"a": "x, y", "n": 3}), _G]),
        "lfm": Sample(
            '<|tool_call_start|>[f(a="x, y", n=3), g()]<|tool_call_end|>Here.',
            "Here.",
            calls=[("f", {"a": "x, y", "n": 3}), _G],
        ),
        "mistral": Sample(f'Hm[TOOL_CALLS] [{{"name": "f", "arguments": {ARGUMENTS}}}]', "Hm", calls=[_F]),
        "mistral-args": Sample(
            f"[THINK]hm[/THINK]Ok[TOOL_CALLS]f[ARGS]{ARGUMENTS}[TOOL_CALLS]g[ARGS]{{}}", "Ok", "hm", [_F, _G]
        ),
        "gemma": Sample(
            '<|channel>thought\nhm\n<channel|>Ok<|tool_call>call:f{a:<|"|>x {"y"} é<|"|>,n:3}<tool_call|>',
            "Ok",
            "hm",
            [_F],
        ),
        "gpt-oss": Sample(
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>So.<|end|>"
            "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
            f"{ARGUMENTS}<|call|>",
            "So.",
            "hm",
            [_F],
        ),
        "deepseek": Sample(
            f"hm</think>\nSo.<｜tool▁calls▁begin｜>{_CALL_BEGIN}function{_SEP}f\n```json\n{ARGUMENTS}\n```{_CALL_END}\n"
            f"{_CALL_BEGIN}function{_SEP}g\n```json\n{{}}\n```{_CALL_END}<｜tool▁calls▁end｜>",
            "So.",
            "hm",
            [_F, _G],
            prompt="Ask.<｜Assistant｜><think>\n",
            is_alike=False,
        ),
        "deepseek-3.1": Sample(
            f"So.<｜tool▁calls▁begin｜>{_CALL_BEGIN}f{_SEP}{ARGUMENTS}{_CALL_END}{_CALL_BEGIN}g{_SEP}{{}}{_CALL_END}"
            "<｜tool▁calls▁end｜>",
            "So.",
            calls=[_F, _G],
            prompt="<｜Assistant｜></think>",
            is_alike=False,  # its content begins with </think> then
        ),
        "think": Sample("a b</think> c d ", "c d", "a b", prompt="<|im_start|>assistant\n<think>\n"),
    }
)


def reader_of(name: str, prompt: str = "", **options: Any) -> ResponseReader:
    found: AnswerFormat = named_format(name)
    functions = [tool["function"] for tool in TOOLS]
    known = KnownTools({one["name"]: {**one["parameters"]["properties"]} for one in functions})
    return ResponseReader(Reading(found, known, **options), prompt)


def message_of(pieces: Sequence[Piece]) -> dict[str, Any]:
    """As transformers shapes it: without what is empty."""
    found: dict[str, Any] = {"content": "", "reasoning": "", "tool_calls": []}
    for piece in pieces:
        if isinstance(piece, Call):
            if piece.name:
                assert piece.number == len(found["tool_calls"])
                found["tool_calls"].append({"type": "function", "function": {"name": piece.name, "arguments": ""}})
            assert piece.number == len(found["tool_calls"]) - 1
            found["tool_calls"][-1]["function"]["arguments"] += piece.arguments
        else:
            assert isinstance(piece, TextPiece) and piece.text
            found[piece.part] += piece.text
    for call in found["tool_calls"]:
        with suppress(ValueError, RecursionError):  # which has been cut off
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return {key: value for key, value in found.items() if value}


def message_of_sample(sample: Sample) -> dict[str, Any]:
    calls = [
        {"type": "function", "function": {"name": name, "arguments": arguments}} for name, arguments in sample.calls
    ]
    found = {"content": sample.content, "reasoning": sample.reasoning, "tool_calls": calls}
    return {key: value for key, value in found.items() if value}
