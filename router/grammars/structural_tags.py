"""vLLM's structural tags: text in which structures must follow, as xgrammar describes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ..openai_api.structured_output import ResponseFormat
from .gbnf import is_gbnf, lark_of_gbnf
from .lark_pieces import ANY_TEXT, clients_lark, json_value, quoted, regular_expression, text_with_tokens


def structural_tags(wanted: ResponseFormat, special_ids: Mapping[str, int], spaces: str | None) -> str:
    """A whole grammar. Raises ValueError.

    `structures` and `triggers`, the older form, say the same as a `format` of the type "triggered_tags".
    """
    form = wanted.format
    if form is None:
        if wanted.structures is None or wanted.triggers is None:
            raise ValueError("a structural tag needs 'format', or 'structures' and 'triggers'.")
        contents = [True if one.schema is None else one.schema for one in wanted.structures]
        tags = [
            {
                "type": "tag",
                "begin": one.begin,
                "content": {"type": "json_schema", "json_schema": schema},
                "end": one.end,
            }
            for one, schema in zip(wanted.structures, contents, strict=True)
        ]
        form = {"type": "triggered_tags", "triggers": wanted.triggers, "tags": tags}
    rules = _Rules(special_ids, spaces)
    rules.lines[0] = f"start: {rules.expression(form, ends=True)}"
    return "\n".join(rules.lines)


class _Tag(msgspec.Struct, forbid_unknown_fields=True, tag="tag"):
    begin: str
    content: dict[str, Any]
    end: str


class _TriggeredTags(msgspec.Struct, forbid_unknown_fields=True, tag="triggered_tags"):
    triggers: list[str]
    tags: list[_Tag]
    at_least_one: bool = False
    stop_after_first: bool = False


class _TagsWithSeparator(msgspec.Struct, forbid_unknown_fields=True, tag="tags_with_separator"):
    tags: list[_Tag]
    separator: str
    at_least_one: bool = False
    stop_after_first: bool = False


class _ConstString(msgspec.Struct, forbid_unknown_fields=True, tag="const_string"):
    value: str


class _JsonSchema(msgspec.Struct, forbid_unknown_fields=True, tag="json_schema"):
    json_schema: dict[str, Any] | bool


class _Regex(msgspec.Struct, forbid_unknown_fields=True, tag="regex"):
    pattern: str


class _Grammar(msgspec.Struct, forbid_unknown_fields=True, tag="grammar"):
    grammar: str


class _AnyText(msgspec.Struct, forbid_unknown_fields=True, tag="any_text"):
    pass


class _Sequence(msgspec.Struct, forbid_unknown_fields=True, tag="sequence"):
    elements: list[dict[str, Any]]


class _Or(msgspec.Struct, forbid_unknown_fields=True, tag="or"):
    elements: list[dict[str, Any]]


_Format = (
    _Tag
    | _TriggeredTags
    | _TagsWithSeparator
    | _ConstString
    | _JsonSchema
    | _Regex
    | _Grammar
    | _AnyText
    | _Sequence
    | _Or
)


class _Rules:
    """A grammar as it grows."""

    def __init__(self, special_ids: Mapping[str, int], spaces: str | None) -> None:
        self._special_ids, self._spaces = special_ids, spaces
        self.lines = ["", f"TEXT: {ANY_TEXT}"]  # the first is for the start

    def expression(self, value: Mapping[str, Any], *, ends: bool) -> str:
        """`ends`: nothing follows it, so it may end with any text."""
        form: _Format = msgspec.convert(value, _Format)
        match form:
            case _ConstString():
                return text_with_tokens(form.value, self._special_ids)
            case _JsonSchema():
                return json_value(form.json_schema, self._spaces)
            case _Regex():
                return regular_expression(form.pattern)
            case _Grammar():
                text = form.grammar
                text = lark_of_gbnf(text) if is_gbnf(text) else clients_lark(text, self._special_ids)
                return f"%lark {{\n{text}\n}}"
            case _AnyText():
                return self._any_text(ends)
            case _Sequence():
                last = len(form.elements) - 1
                parts = [self.expression(one, ends=ends and at == last) for at, one in enumerate(form.elements)]
                return " ".join(parts) or '""'
            case _Or():
                return self._one_of([self.expression(one, ends=ends) for one in form.elements])
            case _Tag():
                return self._text(form.begin) + " " + self._rest(form, ends)
            case _TriggeredTags():
                return self._triggered(form, ends)
            case _TagsWithSeparator():
                tag = self._one_of([self._text(one.begin) + " " + self._rest(one, ends=False) for one in form.tags])
                more = "" if form.stop_after_first else f" ({self._text(form.separator)} {tag})*"
                return f"({tag}{more})" + ("" if form.at_least_one else "?")

    def _rest(self, tag: _Tag, ends: bool) -> str:
        """A tag's content and end."""
        if tag.content.get("type") == "any_text" and tag.end:
            return self._up_to(tag.end)
        return f"{self.expression(tag.content, ends=ends and not tag.end)} {self._text(tag.end)}"

    def _triggered(self, form: _TriggeredTags, ends: bool) -> str:
        if not form.triggers or not form.tags or not all(form.triggers):
            raise ValueError("at least one trigger and one structure are needed, and no trigger is empty.")
        of_trigger: dict[str, list[str]] = {}
        for position, tag in enumerate(form.tags):
            trigger = next(filter(tag.begin.startswith, form.triggers), None)
            if trigger is None:
                raise ValueError(f"the structure {position} begins with {tag.begin[:40]!r}, and no trigger does.")
            rest = f"{self._text(tag.begin.removeprefix(trigger))} {self._rest(tag, ends=False)}"
            of_trigger.setdefault(trigger, []).append(rest)
        calls = [f"{self._up_to(trigger)} {self._one_of(rests)}" for trigger, rests in of_trigger.items()]
        call = self._one_of(calls)
        if form.stop_after_first:
            return call if form.at_least_one else f"({call} | {self._any_text(ends)})"
        return f"{call}{'+' if form.at_least_one else '*'} {self._any_text(ends)}"

    def _any_text(self, ends: bool) -> str:
        if not ends:
            raise ValueError("any text must come last, or be the content of a tag that has an end.")
        return "TEXT"

    def _up_to(self, end: str) -> str:
        """Any text, up to the first `end`."""
        if end in self._special_ids:
            return f"TEXT <[{self._special_ids[end]}]>"
        name = f"text_{len(self.lines)}"
        self.lines.append(f"{name}[lazy]: TEXT {quoted(end)}")
        return name

    def _text(self, text: str) -> str:
        return text_with_tokens(text, self._special_ids)

    @staticmethod
    def _one_of(ways: Sequence[str]) -> str:
        if not ways:
            raise ValueError("there is nothing to choose from.")
        return f"({' | '.join(ways)})"
