"""Tool calls in llguidance's Lark: each fits its tool's schema."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from .bare_json import BareJson, listed
from .call_texts import CallText, Tags, WantedCalls
from .lark_pieces import ANY_TEXT, clients_lark, json_value, quoted, regular_expression, text_with_tokens
from .quoted_lark import quoted_lark, quoted_pattern

_SPACES: Final = r"(/[\x20\x0A]{1,4}/)?"
# Python's parser takes JSON, but for these: half of a surrogate pair, and numbers that floats do not hold exactly.
_PYTHON_TEXT: Final = r'/"([^"\\\x00-\x1F\x7F]|\\["\\\/bfnrt])*"/'
_PYTHON_BOUNDS: Final = {"minimum": -(2**53) + 1, "maximum": 2**53 - 1}
_PYTHON_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:[-.][A-Za-z0-9_]+)*")
_ANY_NAME: Final = "/[A-Za-z_][A-Za-z0-9_]{0,62}/"
INPUT: Final = "input"  # the only argument of a custom tool
_NO_TEXT: Final = ("pattern", "minLength", "maxLength", "format")  # of strings that are written without quotes


def with_calls(wanted: WantedCalls, answer: str | None, special_ids: Mapping[str, int], spaces: str | None) -> str:
    """A whole grammar of tool calls, or of `answer`, a whole grammar, where none must be made.

    None: then of any text with calls in it. Raises ValueError for schemas that cannot be written so.
    """
    text, rules = wanted.text, _Rules(wanted, special_ids, spaces)
    if wanted.must_call:
        return rules.lines(f"start: {_SPACES} {rules.calls(text.first)}")
    if answer is not None:
        return rules.lines(f"start: {_SPACES} {rules.calls(text.first)} | answer", f"answer: %lark {{\n{answer}\n}}")
    if not text.trigger:
        raise ValueError("strict tools beside free text are not supported with this model's form of calls.")
    if text.trigger in special_ids:
        head = f"head: TEXT <[{special_ids[text.trigger]}]>"
    else:
        head = f"head[lazy]: TEXT {quoted(text.trigger)}"
    repeats = "?" if wanted.is_one else "*"
    body = rules.calls(text.first, text.trigger)
    return rules.lines(f"start: (head {body}){repeats} {'' if wanted.is_one else 'TEXT'}", head, f"TEXT: {ANY_TEXT}")


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
    def __init__(self, wanted: WantedCalls, special_ids: Mapping[str, int], spaces: str | None) -> None:
        self._wanted = wanted
        self._special_ids = special_ids
        self._spaces = spaces
        self._lines: list[str] = []

    def lines(self, *first: str) -> str:
        return "\n".join([*first, *self._lines])

    def calls(self, before: str, without: str = "") -> str:
        """The rule's name for all calls that come together, what stands before the first included.

        `without`: the beginning of it that has been written already.
        """
        text, tools = self._wanted.text, self._wanted.tools
        firsts = [f"first_{number}" for number in range(len(tools))]
        for number, (name, schema) in enumerate(tools):
            begin = text.begin.replace("{name}", name)
            if name in self._wanted.inputs:
                arguments = self._input(*self._wanted.inputs[name], text)
            else:
                arguments = self._arguments(number, schema, text)
            self._lines.append(f"arguments_{number}: {arguments}")
            opening = self._text((before + begin).removeprefix(without))
            self._lines.append(f"first_{number}: {opening} arguments_{number} {self._text(text.end)}")
        more = ""
        if not (self._wanted.is_one or text.is_alone) and (
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
        if isinstance(choices, list) and choices and all(isinstance(one, str) for one in choices):
            return f"{opening} ({' | '.join(map(quoted, choices))}) {self._text(tags.closing)}"
        if isinstance(kind, str) and kind != "string":
            return f"{opening} {self._json(root, value)} {self._text(tags.closing)}"
        if kind == "string" and (found := [name for name in _NO_TEXT if name in value]):
            raise ValueError(f"of texts the keyword {found[0]!r} is not supported with this model's form of calls.")
        if kind != "string":
            raise ValueError(f"the argument {key!r} needs one type with this model's form of calls.")
        self._lines.append(f"text_{number}[lazy]: {ANY_TEXT} {quoted(tags.closing)}")
        return f"{opening} text_{number}"

    def _text(self, text: str) -> str:
        return text_with_tokens(text, self._special_ids) if text else ""
