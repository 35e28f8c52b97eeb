"""Tool calls in llguidance's Lark: each fits its tool's schema."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, Literal

import msgspec

from .lark_pieces import (
    ANY_TEXT,
    clients_lark,
    json_value,
    quoted,
    quoted_lark,
    quoted_pattern,
    regular_expression,
    text_with_tokens,
)

# How models write tool calls, by the names of their formats, where a grammar can say it.


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


# JSON with bare keys, and with marks in the place of quotes, in llguidance's Lark: as Gemma writes arguments.

_BARE_KEY: Final = re.compile(r"\w+")
_NOTES: Final = frozenset({"title", "description", "default", "examples", "$schema", "$defs", "definitions"})
_OF_OBJECTS: Final = frozenset({"type", "properties", "required", "additionalProperties"})
_MAX_DEPTH: Final = 32


class BareJson:
    """Rules for values of one schema. What the notation cannot say, such as a pattern, is written as JSON."""

    def __init__(self, prefix: str, mark: str, text: str, json: Callable[[Any], str]) -> None:
        """`prefix`: of all rules. `mark`: that begins a text. `text`: what follows up to the mark that ends it.

        Both are pieces of Lark, and `json` makes one of a schema.
        """
        self.lines: list[str] = []
        self._prefix, self._mark, self._text, self._json = prefix, mark, text, json

    def value(self, schema: Any, depth: int = 0) -> str:
        """The name of its rule."""
        rule = f"{self._prefix}_{len(self.lines)}"
        self.lines.append("")  # its place, before those of its parts
        place = len(self.lines) - 1
        self.lines[place] = f"{rule}: {self._written(schema, depth)}"
        return rule

    def _written(self, schema: Any, depth: int) -> str:
        words = set(schema) - _NOTES if isinstance(schema, dict) else set()
        kind = schema.get("type") if isinstance(schema, dict) else None
        if depth < _MAX_DEPTH:
            if words == {"type"} and kind == "string":
                return f"{self._mark} {self._text}"
            if words <= {"type", "enum"} and "enum" in words and kind in (None, "string"):
                choices = schema["enum"]
                if isinstance(choices, list) and choices and all(isinstance(choice, str) for choice in choices):
                    return f"{self._mark} ({' | '.join(map(quoted, choices))}) {self._mark}"
            if words == {"type", "items"} and kind == "array" and isinstance(schema["items"], dict):
                item = self.value(schema["items"], depth + 1)
                return f'"[" ({item} ("," {item})*)? "]"'
            if words <= _OF_OBJECTS and kind == "object" and isinstance(schema.get("properties"), dict):
                return self._object(schema["properties"], schema.get("required", ()), depth)
        return self._json(schema)

    def _object(self, properties: dict[str, Any], required: Sequence[str], depth: int) -> str:
        members = []
        for key, schema in properties.items():
            name = key if _BARE_KEY.fullmatch(key) else f'"{key}"'
            members.append((f"{quoted(name + ':')} {self.value(schema, depth + 1)}", key in required))
        rules, written = listed(members, ",", f"{self._prefix}_{len(self.lines)}")
        self.lines += rules
        return f'"{{" {written} "}}"'


def listed(members: Sequence[tuple[str, bool]], between: str, prefix: str) -> tuple[list[str], str]:
    """Rules, and a piece of Lark, for a list of members in this order, each with whether it must be there.

    `prefix`: of the rules.
    """
    rules: list[str] = []
    later = first = '""'  # what may follow a member, and the whole list from here on
    for number, (member, is_needed) in reversed([*enumerate(members)]):
        begin, goes_on = f"{prefix}_begin_{number}", f"{prefix}_on_{number}"
        rules.append(f"{begin}: {member} {later}" + ("" if is_needed else f" | {first}"))
        another = f"{quoted(between)} {member} {later}"
        rules.append(f"{goes_on}: {another}" + ("" if is_needed else f" | {later}"))
        first, later = begin, goes_on
    return rules, first


_SPACES: Final = r"(/[\x20\x0A]{1,4}/)?"
# Python's parser takes JSON, but for these: half of a surrogate pair, and numbers that floats do not hold exactly.
_PYTHON_TEXT: Final = r'/"([^"\\\x00-\x1F\x7F]|\\["\\\/bfnrt])*"/'
_PYTHON_BOUNDS: Final = {"minimum": -(2**53) + 1, "maximum": 2**53 - 1}
_PYTHON_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:[-.][A-Za-z0-9_]+)*")
_ANY_NAME: Final = "/[A-Za-z_][A-Za-z0-9_]{0,62}/"
INPUT: Final = "input"  # the only argument of a custom tool
_NO_TEXT: Final = ("pattern", "minLength", "maxLength", "format")  # of strings that are written without quotes


def with_calls(calls: WantedCalls, answer: str | None, special_ids: Mapping[str, int], spaces: str | None) -> str:
    """A whole grammar of tool calls, or of `answer`, a whole grammar, where none must be made.

    None: then of any text with calls in it. Raises ValueError for schemas that cannot be written so.
    """
    text, rules = calls.text, _Rules(calls, special_ids, spaces)
    if calls.must_call:
        return rules.lines(f"start: {_SPACES} {rules.calls(text.first)}")
    if answer is not None:
        return rules.lines(f"start: {_SPACES} {rules.calls(text.first)} | answer", f"answer: %lark {{\n{answer}\n}}")
    if not text.trigger:
        raise ValueError("strict tools beside free text are not supported with this model's form of calls.")
    if text.trigger in special_ids:
        head = f"head: TEXT <[{special_ids[text.trigger]}]>"
    else:
        head = f"head[lazy]: TEXT {quoted(text.trigger)}"
    repeats = "?" if calls.is_one else "*"
    body = rules.calls(text.first, text.trigger)
    return rules.lines(f"start: (head {body}){repeats} {'' if calls.is_one else 'TEXT'}", head, f"TEXT: {ANY_TEXT}")


def after_thought(grammar: str, opening: str, closing: str, behind: str, special_ids: Mapping[str, int]) -> str:
    """The grammar, before which the model may think.

    `opening`: empty where it thinks already. `behind`: what must stand between a thought and the rest.
    """
    begin = text_with_tokens(opening, special_ids) if opening else ""
    if closing in special_ids:
        end = f"thoughts: {ANY_TEXT} <[{special_ids[closing]}]>"
    else:
        end = f"thoughts[lazy]: {ANY_TEXT} {quoted(closing)}"
    after = text_with_tokens(behind, special_ids) if behind else _SPACES
    thought = f"({begin} thoughts {after})?" if opening else f"thoughts {after}"
    return f"start: {thought} after\n{end}\nafter: %lark {{\n{grammar}\n}}"


class _Rules:
    def __init__(self, calls: WantedCalls, special_ids: Mapping[str, int], spaces: str | None) -> None:
        self._calls = calls
        self._special_ids = special_ids
        self._spaces = spaces
        self._lines: list[str] = []

    def lines(self, *first: str) -> str:
        return "\n".join([*first, *self._lines])

    def calls(self, before: str, without: str = "") -> str:
        """The rule's name for all calls that come together, what stands before the first included.

        `without`: the beginning of it that has been written already.
        """
        text, tools = self._calls.text, self._calls.tools
        firsts = [f"first_{number}" for number in range(len(tools))]
        for number, (name, schema) in enumerate(tools):
            begin = text.begin.replace("{name}", name)
            if name in self._calls.inputs:
                arguments = self._input(*self._calls.inputs[name], text)
            else:
                arguments = self._arguments(number, schema, text)
            self._lines.append(f"arguments_{number}: {arguments}")
            opening = self._text((before + begin).removeprefix(without))
            self._lines.append(f"first_{number}: {opening} arguments_{number} {self._text(text.end)}")
        more = ""
        if not (self._calls.is_one or text.is_alone) and (
            text.last or not without
        ):  # others begin with the trigger again
            nexts = []
            for number, (name, _) in enumerate(tools):
                begin = self._text(text.between + text.begin.replace("{name}", name))
                self._lines.append(f"next_{number}: {begin} arguments_{number} {self._text(text.end)}")
                nexts.append(f"next_{number}")
            more = f"({' | '.join(nexts)})*"
        self._lines.append(f"calls: ({' | '.join(firsts)}) {more} {self._text(text.last)}")
        return "calls"

    def _input(self, syntax: str, definition: str, text: CallText) -> str:
        """The arguments of a tool whose only one is a text of a grammar."""
        if text.text_mark or text.tags is not None:
            if text.tags is None:
                before, behind = "{" + f"{INPUT}:{text.text_mark}", text.text_mark + "}"
            else:
                before, behind = text.tags.opening.replace("{key}", INPUT), text.tags.closing
            value = regular_expression(definition) if syntax == "regex" else clients_lark(definition, {})
        else:
            before, behind = (f'{INPUT}="', '"') if text.are_keywords else ('{"' + INPUT + '": "', '"}')
            value = f"/{quoted_pattern(definition)}/" if syntax == "regex" else quoted_lark(definition)
        grammar = f"start: {value}" if syntax == "regex" else value
        return f"{self._text(before)} %lark {{\n{grammar}\n}} {self._text(behind)}"

    def _arguments(self, number: int, schema: dict[str, Any], text: CallText) -> str:
        whole = schema if "type" in schema else {"type": "object", **schema}
        if text.text_mark:
            return self._bare(number, whole, text.text_mark)
        if text.tags is None and not text.are_keywords:
            return json_value(whole, self._spaces)
        properties = schema.get("properties", {})
        if not isinstance(properties, dict) or not set(schema) & {"properties", "type"}:
            raise ValueError("only schemas with properties are supported with this model's form of calls.")
        required = schema.get("required", [])
        if not properties and schema.get("additionalProperties") in (None, True) and "properties" not in schema:
            return self._any_arguments(number, text.tags)
        if text.tags is None:
            return self._keywords(number, schema, properties, required)
        parts = []
        for place, (key, value) in enumerate(properties.items()):
            rule = f"argument_{number}_{place}"
            self._lines.append(f"{rule}: {self._tagged(f'{number}_{place}', key, value, schema, text.tags)}")
            parts.append(rule if key in required else f"{rule}?")
        return " ".join(parts) or '""'

    def _any_arguments(self, number: int, tags: Tags | None) -> str:
        """The arguments of a tool without a schema."""
        if tags is None:
            argument = f'{_ANY_NAME} "=" {json_value(True, self._spaces)}'
            return f'({argument} (", " {argument})*)?'
        before, behind = tags.opening.split("{key}")
        self._lines.append(f"text_{number}[lazy]: {ANY_TEXT} {quoted(tags.closing)}")
        return f"({self._text(before)} {_ANY_NAME} {self._text(behind)} text_{number})*"

    def _keywords(self, number: int, root: dict[str, Any], properties: dict[str, Any], required: list[str]) -> str:
        members = []
        for key, value in properties.items():
            if not _PYTHON_NAME.fullmatch(key):
                raise ValueError(
                    f"the argument {key!r} is not a name in Python, as this model's format of calls requires."
                )
            members.append((f"{quoted(key + '=')} {self._python_value(root, value)}", key in required))
        rules, arguments = listed(members, ", ", f"argument_{number}")
        self._lines += rules
        return arguments

    def _python_value(self, root: dict[str, Any], value: Any) -> str:
        if (
            isinstance(value, dict)
            and value.get("type") == "string"
            and not {*value} - {"type", "description", "title"}
        ):
            return _PYTHON_TEXT
        if isinstance(value, dict) and value.get("type") == "integer":
            value = {**_PYTHON_BOUNDS, **value}
        return self._json(root, value)

    def _bare(self, number: int, schema: dict[str, Any], mark: str) -> str:
        if mark in self._special_ids:
            ending, text = f"<[{self._special_ids[mark]}]>", f"bare_{number}"
            self._lines.append(f"{text}: {ANY_TEXT} {ending}")
        else:
            ending, text = quoted(mark), f"bare_{number}"
            self._lines.append(f"{text}[lazy]: {ANY_TEXT} {ending}")
        bare = BareJson(f"bare_{number}", ending, text, lambda value: self._json(schema, value))
        rule = bare.value(schema)
        self._lines += bare.lines
        return rule

    def _json(self, root: dict[str, Any], value: Any) -> str:
        """JSON of a part of the schema `root`."""
        if not isinstance(value, dict):
            return json_value(bool(value), self._spaces)
        shared: dict[str, Any] = {name: root[name] for name in ("$defs", "definitions") if name in root}
        return json_value({**shared, **value}, self._spaces)

    def _tagged(self, number: str, key: str, value: Any, root: dict[str, Any], tags: Tags) -> str:
        opening = self._text(tags.opening.replace("{key}", key))
        kind = value.get("type") if isinstance(value, dict) else None
        choices = value.get("enum", [value["const"]] if "const" in value else None) if isinstance(value, dict) else None
        if isinstance(choices, list) and choices and all(isinstance(choice, str) for choice in choices):
            return f"{opening} ({' | '.join(map(quoted, choices))}) {self._text(tags.closing)}"
        if isinstance(kind, str) and kind != "string":
            return f"{opening} {self._json(root, value)} {self._text(tags.closing)}"
        if kind == "string" and (keywords := [name for name in _NO_TEXT if name in value]):
            raise ValueError(f"of texts the keyword {keywords[0]!r} is not supported with this model's form of calls.")
        if kind != "string":
            raise ValueError(f"the argument {key!r} needs one type with this model's form of calls.")
        self._lines.append(f"text_{number}[lazy]: {ANY_TEXT} {quoted(tags.closing)}")
        return f"{opening} text_{number}"

    def _text(self, text: str) -> str:
        return text_with_tokens(text, self._special_ids) if text else ""
