"""How models write tool calls, by the names of their formats, where a grammar can say it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, Literal

import msgspec


class Tags(msgspec.Struct, frozen=True):
    """The texts around an argument: `{key}` in the opening stands for its name."""

    opening: str
    closing: str


class CallText(msgspec.Struct, frozen=True):
    """The texts around the arguments. `{name}` in `begin` stands for the tool's name."""

    begin: str
    end: str = ""
    first: str = ""  # before the first call
    between: str = ""  # two calls
    last: str = ""  # behind the last call
    trigger: str = ""  # with which only calls begin; empty: there is none
    tags: Tags | None = None  # around each argument
    are_keywords: bool = False  # the arguments are `key=value`, with JSON for values
    text_mark: str = ""  # at both ends of texts, in JSON whose keys have no quotes; empty: texts and keys are JSON
    is_alone: bool = False  # an answer has one call
    content: str = ""  # before an answer that is not a call
    behind_thoughts: str = ""


class WantedCalls(msgspec.Struct, frozen=True):
    """The tool calls that an answer may or must have."""

    text: CallText
    tools: list[tuple[str, dict[str, Any]]]  # names, and schemas of the arguments
    must_call: bool
    is_one: bool  # no more than one call
    # Of the tools whose only argument `input` is a text of a grammar, by name: its syntax, and the grammar.
    inputs: dict[str, tuple[Literal["lark", "regex"], str]] = {}


_HERMES: Final = '{"name": "{name}", "arguments": '
_TOOL_CALL, _TOOL_CALL_END = "<tool_call>", "</tool_call>"
_SEP, _BEGIN, _END = "<｜tool▁sep｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_FIRST, _LAST = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"

_PYTHON, _PYTHON_END = "<|tool_call_start|>", "<|tool_call_end|>"
_GEMMA: Final = "<|tool_call>"
_HARMONY: Final = "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"

CALL_TEXTS: Final[Mapping[str, CallText]] = MappingProxyType(
    {
        "hermes": CallText(f"{_TOOL_CALL}\n{_HERMES}", f"}}\n{_TOOL_CALL_END}", between="\n", trigger=_TOOL_CALL),
        "qwen-xml": CallText(
            f"{_TOOL_CALL}\n<function={{name}}>\n",
            f"</function>\n{_TOOL_CALL_END}",
            between="\n",
            trigger=_TOOL_CALL,
            tags=Tags("<parameter={key}>\n", "\n</parameter>\n"),
        ),
        "glm": CallText(
            f"{_TOOL_CALL}{{name}}\n",
            _TOOL_CALL_END,
            between="\n",
            trigger=_TOOL_CALL,
            tags=Tags("<arg_key>{key}</arg_key>\n<arg_value>", "</arg_value>\n"),
        ),
        "llama-json": CallText('{"name": "{name}", "parameters": ', "}", between="; "),
        "pythonic": CallText("{name}(", ")", first="[", between=", ", last="]", are_keywords=True),
        "lfm": CallText(
            "{name}(",
            ")",
            first=f"{_PYTHON}[",
            between=", ",
            last=f"]{_PYTHON_END}",
            trigger=_PYTHON,
            are_keywords=True,
        ),
        "gemma": CallText(f"{_GEMMA}call:{{name}}", "<tool_call|>", trigger=_GEMMA, text_mark='<|"|>'),
        "gpt-oss": CallText(
            _HARMONY,
            is_alone=True,
            content="<|channel|>final<|message|>",
            behind_thoughts="<|start|>assistant",
        ),
        "mistral": CallText(_HERMES, "}", first="[TOOL_CALLS][", between=", ", last="]", trigger="[TOOL_CALLS]"),
        "mistral-args": CallText("[TOOL_CALLS]{name}[ARGS]", trigger="[TOOL_CALLS]"),
        "deepseek": CallText(
            f"{_BEGIN}function{_SEP}{{name}}\n```json\n",
            f"\n```{_END}",
            first=_FIRST,
            between="\n",
            last=_LAST,
            trigger=_FIRST,
        ),
        "deepseek-3.1": CallText(f"{_BEGIN}{{name}}{_SEP}", _END, first=_FIRST, last=_LAST, trigger=_FIRST),
    }
)
