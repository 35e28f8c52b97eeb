"""Chats with tools, thoughts and documents, and the prompt that transformers makes of each, by any template.

OpenAI's API has one form for what templates read in several. So transformers gets each form, and the prompt is
that of the first form unless another one shows more of what was said: what motet finds out by probes is found here by
looking at the results.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from types import MappingProxyType
from typing import Any, Final

import msgspec
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from motet.router.http.errors import ApiError
from motet.router.openai.chat_prompt import chat_prompt
from motet.router.openai.request_schema import ChatRequest
from motet.router.text.control_tokens import TEMPLATE_ERRORS
from motet.router.text.text import TextService
from motet.tests.rigs.router_rig import byte_level_tokenizer
from motet.tests.rigs.stand_in_engine import INFO

Json = dict[str, Any]
_NAME: Final = re.compile(r"<[|｜]?[\w▁|]{1,40}[|｜]?>|</\w{1,40}>|\[/?[A-Z_]{3,20}\]")
_DUMPED: Final = re.compile(r"""["']type["']: ["']text["']|\{'city'""")
_WEATHER: Final = MappingProxyType(
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a place, in °C.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Its name."},
                    "days": {"type": "integer", "description": "How many."},
                },
                "required": ["city"],
            },
        },
    }
)
_NOTHING: Final = MappingProxyType({"type": "object", "properties": {}})
_CLOCK: Final = {"name": "clock", "description": "The time.", "parameters": dict(_NOTHING)}
TOOLS: Final = [dict(_WEATHER), {"type": "function", "function": _CLOCK}]
BARE_TOOL: Final[Json] = {"type": "function", "function": {"name": "clock"}}
ASK: Final[Json] = {"role": "user", "content": "What is the weather in Zürich?"}
SYSTEM: Final[Json] = {"role": "system", "content": "Answer in one line."}
NESTED: Final = {"city": "Uster", "days": 3, "at": {"lat": 47.4, "tags": ["lake", None, True]}, "note": 'a\nb "é" <i>'}


def _part(text: str) -> Json:
    return {"type": "text", "text": text}


def calling(*calls: tuple[str, Mapping[str, Any]], **fields: Any) -> Json:
    made = [
        {"id": f"call0000{number}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for number, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": None, **fields, "tool_calls": made}


def result(content: str, number: int = 0) -> Json:
    return {"role": "tool", "tool_call_id": f"call0000{number}", "content": content}


def said(content: str, **fields: Any) -> Json:
    return {"role": "assistant", "content": content, **fields}


_CALL: Final = calling(("get_weather", {"city": "Winterthur", "days": 2}))
_RESULT: Final = result('{"sky": "rain in Zürich", "degrees": 11.5}')
CASES: Final[Mapping[str, Json]] = MappingProxyType(
    {
        "text": {"messages": [SYSTEM, ASK]},
        "turns": {"messages": [ASK, said("Rain."), {"role": "user", "content": "And tomorrow?"}]},
        "parts": {"messages": [{"role": "user", "content": [_part("One,"), _part("two")]}]},
        "developer": {"messages": [{**SYSTEM, "role": "developer"}, ASK]},
        "tools": {"messages": [SYSTEM, ASK], "tools": TOOLS},
        "bare tool": {"messages": [ASK], "tools": [BARE_TOOL]},
        "no choice": {"messages": [ASK], "tools": TOOLS, "tool_choice": "none"},
        "call": {"messages": [ASK, _CALL, _RESULT], "tools": TOOLS},
        "call without tools": {"messages": [ASK, _CALL, _RESULT]},
        "call and text": {"messages": [SYSTEM, ASK, {**_CALL, "content": "I look it up."}, _RESULT], "tools": TOOLS},
        "empty text": {"messages": [ASK, {**_CALL, "content": ""}, _RESULT], "tools": TOOLS},
        "two calls": {
            "messages": [
                ASK,
                calling(("get_weather", {"city": "Chur"}), ("clock", {})),
                result("sun"),
                result("noon", 1),
            ],
            "tools": TOOLS,
        },
        "nested": {"messages": [ASK, calling(("get_weather", NESTED)), _RESULT], "tools": TOOLS},
        "thought": {"messages": [ASK, {**_CALL, "reasoning_content": "I need its weather."}, _RESULT], "tools": TOOLS},
        "thoughts": {
            "messages": [ASK, {**_CALL, "reasoning": "I need it."}, _RESULT, said("Rain.", reasoning="It rains."), ASK],
            "tools": TOOLS,
        },
        "answered": {"messages": [ASK, _CALL, _RESULT, said("Rain."), ASK], "tools": TOOLS},
        "documents": {"messages": [ASK], "documents": [{"title": "Zürich", "text": "It rains there."}]},
        "no thinking": {"messages": [ASK], "chat_template_kwargs": {"enable_thinking": False}},
    }
)  # fmt: skip


class TemplateRig:
    """A service with one template, whose control tokens its tokenizer has, and transformers with the same."""

    def __init__(self, template: str) -> None:
        self.backend = byte_level_tokenizer()
        names = sorted({*_NAME.findall(template), "<s>", "</s>"})
        special = [AddedToken(name, special="|" in name or "｜" in name, normalized=False) for name in names]
        self.backend.add_tokens(special)
        self._names = {self.backend.token_to_id(name): name for name in names}
        self.theirs = PreTrainedTokenizerFast(tokenizer_object=self.backend, bos_token="<s>", eos_token="</s>")
        self.theirs.chat_template = template
        self.service = TextService(self.theirs)
        shown = [self._text_of([_in_form(ASK, form, "", "")]) for form in ("as sent", "parts")]
        is_of_parts = ASK["content"] not in shown[0] and ASK["content"] in shown[1]
        self._contents = ("parts", "as sent", "text") if is_of_parts else ("as sent", "parts", "text")

    async def ours(self, case: Json) -> list[int] | str:
        """The prompt's tokens, or the status and the words of a refusal."""
        request = msgspec.convert({"model": "m", **case}, ChatRequest)
        try:
            return (await chat_prompt(request, self.service, INFO)).token_ids
        except ApiError as error:
            return f"{error.status_code} {error.detail.message}"

    def expected(self, case: Json) -> list[int] | str:
        """The same by transformers alone."""
        found, refusal = self._best(case)
        return refusal if found is None else list(self.backend.encode(found, add_special_tokens=False).ids)

    def control(self, token_ids: Sequence[int]) -> list[str]:
        """The control tokens among them."""
        return [self._names[one] for one in token_ids if one in self._names]

    def _best(self, case: Json) -> tuple[str | None, str]:
        """The text, or None and the refusal's words."""
        texts: list[str | None] = []
        refusal = ""
        for messages in _forms(case["messages"], self._contents):
            try:
                texts.append(self._apply(messages, case))
            except TEMPLATE_ERRORS as error:
                texts.append(None)
                refusal = refusal or str(error)
        marks = _marks(case["messages"])
        shown = [_num_shown(text, marks) for text in texts]
        best = shown.index(max(shown))
        if shown[0] < 0 and shown[best] < len(marks):
            return None, refusal
        return texts[best], refusal

    def _text_of(self, messages: list[Json]) -> str:
        """Empty: the template refuses them."""
        try:
            return self._apply(messages, {})
        except TEMPLATE_ERRORS:
            return ""

    def _apply(self, messages: list[Json], case: Json) -> str:
        known = "'developer'" in self.theirs.chat_template or '"developer"' in self.theirs.chat_template
        chat = [{**one, "role": "system"} if one["role"] == "developer" and not known else one for one in messages]
        options = {name: case[name] for name in ("tools", "documents") if name in case}
        options |= case.get("chat_template_kwargs", {})
        return str(self.theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, **options))

    def close(self) -> None:
        self.service.close()


def _forms(messages: list[Json], contents: Sequence[str]) -> Iterator[list[Json]]:
    """Copies of the messages in each form; first the one that transformers documents."""
    for content, empty, arguments in product(contents, ("as sent", ""), ("object", "text")):
        yield [_in_form(message, content, empty, arguments) for message in messages]


def _in_form(message: Json, content: str, empty: str, arguments: str) -> Json:
    changed = dict(message)
    if message["content"] is None:
        changed["content"] = "" if empty == "" else None
    elif content == "parts" and isinstance(message["content"], str):
        changed["content"] = [{"type": "text", "text": message["content"]}]
    elif content == "text" and isinstance(message["content"], list):
        changed["content"] = "\n".join(part["text"] for part in message["content"])
    if "tool_calls" in message and arguments == "object":
        changed["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
            for call in message["tool_calls"]
        ]
    return changed


def _num_shown(text: str | None, marks: Sequence[str]) -> int:
    """-1: the template refused it. What a template writes as Python or JSON would, it does not show."""
    if text is None:
        return -1
    return 0 if _DUMPED.search(text) else sum(mark in text for mark in marks)


def _marks(messages: list[Json]) -> list[str]:
    """Pieces of what was said that a prompt shows in whatever form. Templates may leave out what was thought."""
    marks = []
    for message in messages:
        content = message["content"] or ""
        marks += [part["text"] for part in content] if isinstance(content, list) else [content.strip('{}"')]
        for call in message.get("tool_calls", ()):
            marks.append(call["function"]["name"])
            values = json.loads(call["function"]["arguments"]).values()
            marks += [value for value in values if isinstance(value, str) and value.isalpha()]
    return [mark for mark in marks if mark]
