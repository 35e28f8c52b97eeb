"""JSON with bare keys, and with marks in the place of quotes, in llguidance's Lark: as Gemma writes arguments."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Final

from .lark_pieces import quoted

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
                if isinstance(choices, list) and choices and all(isinstance(one, str) for one in choices):
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
