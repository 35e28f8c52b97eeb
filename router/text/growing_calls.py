"""Tool calls that are shown while a model still writes them, where it writes them as JSON."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any, Final

from .call_parsing import Call, KnownTools
from .growing_arguments import GrowingArguments

_MAX_HEAD_CHARS: Final = 1024  # of a call, before its arguments
_MEMBER: Final = r'"(?:[^"\\]|\\.)*+"\s*:\s*"(?:[^"\\]|\\.)*+"\s*'  # {"type": "function"
_OBJECT: Final = r'(?=\{\s*["}])'
_ENDS: Final = " \t\r\n}]"


@dataclass(frozen=True)
class CallHeads:
    """What stands before the arguments of a call in a region of a response template's field."""

    first: re.Pattern[str]  # with the group `name`, unless the region's mark has it
    following: re.Pattern[str] | None  # of another call behind the first; None: a region has one


def call_heads(field: Any) -> CallHeads | None:
    """None: calls are not JSON, or their arguments are not written unchanged in them."""
    args = field.content_args
    if field.content != "json" or args.get("string_delims") or args.get("unquoted_keys"):
        return None
    content = "" if field.transform_each else "content."
    function: Any = {"name": f"{{{content}name}}", "arguments": f"{{{content}arguments}}"}
    if field.transform is not None:
        function = field.transform.get("function") if isinstance(field.transform, dict) else None
        if function == "{content}":
            function = {"name": "{content.name}", "arguments": "{content.arguments}"}
    if not isinstance(function, dict):
        return None
    name, arguments = (str(function.get(key)) for key in ("name", "arguments"))
    if (name, arguments) == ("{name}", "{content}") and not field.transform_each:
        return CallHeads(re.compile(rf"\s*{_OBJECT}"), None)
    keys = [re.fullmatch(rf"\{{{re.escape(content)}(\w+)\}}", one) for one in (name, arguments)]
    if None in keys:
        return None
    name, arguments = (key[1] for key in keys if key is not None)
    head = (
        rf'\{{\s*(?:(?!"{name}"|"{arguments}"){_MEMBER},\s*)*+"{name}"\s*:\s*"(?P<name>[^"\\]+)"\s*,\s*'
        rf'(?:(?!"{name}"|"{arguments}"){_MEMBER},\s*)*+"{arguments}"\s*:\s*{_OBJECT}'
    )
    if not field.transform_each:
        return CallHeads(re.compile(rf"\s*{head}"), None)
    separator = args.get("separator")
    opening, between = (r"\[\s*", ",") if separator is None else ("", re.escape(separator))
    more = rf"\s*(?:,\s*{_MEMBER})*+\}}\s*{between}\s*{head}"
    return CallHeads(re.compile(rf"\s*{opening}{head}"), re.compile(more))


class GrowingCalls:
    """The calls of one region. None is shown before its tool and the begin of its arguments are certain."""

    def __init__(self, heads: CallHeads, captures: Mapping[str, str], tools: KnownTools, number: int) -> None:
        """`number`: of its first call among those of the answer."""
        self._heads, self._captures, self._tools, self._first = heads, captures, tools, number
        self._head: re.Pattern[str] | None = heads.first  # that may come next; None: no call comes any more
        self._text = ""  # not read yet; at the end the text after the calls
        self._rest: list[str] = []  # what is behind all calls
        self._arguments: GrowingArguments | None = None  # of the call that grows
        self.num_begun = self.num_whole = 0

    def copy(self) -> GrowingCalls:
        found = copy(self)
        found._rest = [*self._rest]
        found._arguments = None if self._arguments is None else self._arguments.copy()
        return found

    def feed(self, text: str) -> list[Call]:
        """What the text adds to calls: the name of a new one, and what follows of its arguments."""
        return [*self._added(text)]

    def finish(self) -> tuple[list[Call], str]:
        """What is left of the last call's arguments, and the text after the calls."""
        rest = "".join([*self._rest, self._text]).lstrip(_ENDS)
        if self._arguments is None:
            return [], rest
        text = self._arguments.finish()
        return [Call(self._number, "", text)] if text else [], rest

    @property
    def _number(self) -> int:
        return self._first + self.num_begun - 1

    def _added(self, text: str) -> Iterator[Call]:
        self._text += text
        while self._text:
            if self._arguments is None:
                name = self._next_name()
                if name is None:
                    return
                self.num_begun += 1
                self._arguments = GrowingArguments(self._tools, name)
                yield Call(self._number, name, "")
            shown, self._text = self._arguments.feed(self._text)
            if shown:
                yield Call(self._number, "", shown)
            if self._arguments.is_over:
                self.num_whole += 1
                self._arguments, self._head = None, self._heads.following

    def _next_name(self) -> str | None:
        """The name of the tool that is called next. None: not known yet, or there is no further call."""
        match = None if self._head is None else self._head.match(self._text, 0, _MAX_HEAD_CHARS)
        if match is None and self._head is not None and len(self._text) < _MAX_HEAD_CHARS:
            return None
        name = None if match is None else {**self._captures, **match.groupdict()}.get("name")
        if name is None or name not in self._tools.properties:
            self._head = None
            self._rest.append(self._text)
            self._text = ""
            return None
        assert match is not None
        self._text = self._text[match.end() :]
        return name
