"""Tool calls in llguidance's Lark: each fits its tool's schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from .call_texts import CallText, Tags, WantedCalls
from .lark_pieces import ANY_TEXT, json_value, quoted, text_with_tokens

_SPACES: Final = r"(/[\x20\x0A]{1,4}/)?"
_NO_TEXT: Final = ("pattern", "minLength", "maxLength", "format")  # of texts that stand as they are


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


def after_thought(grammar: str, opening: str, closing: str, special_ids: Mapping[str, int]) -> str:
    """The grammar, before which the model may think. `opening`: empty where it thinks already."""
    begin = text_with_tokens(opening, special_ids) if opening else ""
    if closing in special_ids:
        end = f"thoughts: {ANY_TEXT} <[{special_ids[closing]}]>"
    else:
        end = f"thoughts[lazy]: {ANY_TEXT} {quoted(closing)}"
    thought = f"({begin} thoughts {_SPACES})?" if opening else f"thoughts {_SPACES}"
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
            arguments = self._arguments(number, schema, text)
            self._lines.append(f"arguments_{number}: {arguments}")
            opening = self._text((before + begin).removeprefix(without))
            self._lines.append(f"first_{number}: {opening} arguments_{number} {self._text(text.end)}")
        more = ""
        if not self._wanted.is_one and (text.last or not without):  # others begin with the trigger again
            nexts = []
            for number, (name, _) in enumerate(tools):
                begin = self._text(text.between + text.begin.replace("{name}", name))
                self._lines.append(f"next_{number}: {begin} arguments_{number} {self._text(text.end)}")
                nexts.append(f"next_{number}")
            more = f"({' | '.join(nexts)})*"
        self._lines.append(f"calls: ({' | '.join(firsts)}) {more} {self._text(text.last)}")
        return "calls"

    def _arguments(self, number: int, schema: dict[str, Any], text: CallText) -> str:
        if text.tags is None:
            return json_value(schema if "type" in schema else {"type": "object", **schema}, self._spaces)
        properties = schema.get("properties", {})
        if not isinstance(properties, dict) or not set(schema) & {"properties", "type"}:
            raise ValueError("only schemas with properties are supported with this model's form of calls.")
        required = schema.get("required", [])
        parts = []
        for place, (key, value) in enumerate(properties.items()):
            rule = f"argument_{number}_{place}"
            self._lines.append(f"{rule}: {self._tagged(f'{number}_{place}', key, value, schema, text.tags)}")
            parts.append(rule if key in required else f"{rule}?")
        return " ".join(parts) or '""'

    def _tagged(self, number: str, key: str, value: Any, root: dict[str, Any], tags: Tags) -> str:
        opening = self._text(tags.opening.replace("{key}", key))
        kind = value.get("type") if isinstance(value, dict) else None
        choices = value.get("enum", [value["const"]] if "const" in value else None) if isinstance(value, dict) else None
        if isinstance(choices, list) and choices and all(isinstance(one, str) for one in choices):
            return f"{opening} ({' | '.join(map(quoted, choices))}) {self._text(tags.closing)}"
        if isinstance(kind, str) and kind != "string":
            shared: dict[str, Any] = {name: root[name] for name in ("$defs", "definitions") if name in root}
            return f"{opening} {json_value({**shared, **value}, self._spaces)} {self._text(tags.closing)}"
        if kind == "string" and (found := [name for name in _NO_TEXT if name in value]):
            raise ValueError(f"of texts the keyword {found[0]!r} is not supported with this model's form of calls.")
        if kind != "string":
            raise ValueError(f"the argument {key!r} needs one type with this model's form of calls.")
        self._lines.append(f"text_{number}[lazy]: {ANY_TEXT} {quoted(tags.closing)}")
        return f"{opening} text_{number}"

    def _text(self, text: str) -> str:
        return text_with_tokens(text, self._special_ids) if text else ""
