"""Tool calls that are shown while a model still writes them, where it writes them as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any, Final

from .call_parsing import Call, KnownTools

# The arguments of a call as they come: the text of a JSON object.

_PLAIN: Final = re.compile(r'[^"\\]+')  # of a string
_BETWEEN: Final = re.compile(r'[^"{}\[\],:]+')  # strings
_HEX: Final = re.compile("[0-9a-fA-F]*")
_LOW: Final = re.compile(r"\\(?:u(?:[dD](?:[c-fC-F][0-9a-fA-F]{0,2})?)?)?")  # a low surrogate, as far as it has come
_ESCAPE_CHARS: Final = 6  # \u0000
_NO_CHARACTER: Final = "\\ufffd"
_CONTROLS: Final = {code: f"\\u{code:04x}" for code in range(32)}  # which strict readers refuse in strings
_Read = tuple[str, int]  # what is shown of a piece, and where it ends


class GrowingArguments:
    """What is shown after k characters follows from these k alone, however they were cut.

    A text that the tool's schema wants as another type is shown once all of it has come, as that type.
    """

    def __init__(self, tools: KnownTools, name: str) -> None:
        """`name`: of the tool."""
        self._tools, self._name = tools, name
        self._depth = 0
        self._in_string = False
        self._is_value = False  # what comes next in the object is one, and no key
        self._key = ""  # the last one of the object
        self._string: list[str] | None = None  # the one that comes, if it is a key of the object or held back
        self._half = ""  # of an escape
        self.is_over = False

    def feed(self, text: str) -> tuple[str, str]:
        """What it adds, and the text behind the object. May not be called once it `is_over`."""
        text, self._half = self._half + text, ""
        pieces: list[str] = []
        place = 0
        while place < len(text) and not self.is_over:
            read = self._in_text(text, place) if self._in_string else self._between(text, place)
            if read is None:
                self._half, place = text[place:], len(text)
            else:
                piece, place = read
                pieces.append(self._json_of(piece))
        return "".join(pieces), text[place:]

    def finish(self) -> str:
        """What was held back of arguments that end too early."""
        string = self._string if self._is_value and self._string is not None else []
        return "".join([*string, self._half])

    def _in_text(self, text: str, place: int) -> _Read | None:
        if text[place] == "\\":
            return _escape(text, place)
        match = _PLAIN.match(text, place)
        if match is None:
            self._in_string = False
            return '"', place + 1
        return match[0].translate(_CONTROLS), match.end()

    def _between(self, text: str, place: int) -> _Read:
        match = _BETWEEN.match(text, place)
        if match is not None:
            return match[0], match.end()
        char = text[place]
        if char == '"':
            self._in_string = True
            is_key = not self._is_value
            if self._depth == 1 and (is_key or self._tools.may_read(self._name, self._key)):
                self._string = []
        elif char in ":,":
            if self._depth == 1:
                self._is_value = char == ":"
        else:
            self._depth += 1 if char in "{[" else -1
            self.is_over = self._depth == 0
        return char, place + 1

    def _json_of(self, piece: str) -> str:
        if self._string is None:
            return piece
        self._string.append(piece)
        if self._in_string:
            return "" if self._is_value else piece
        string, self._string = "".join(self._string), None
        if self._is_value:
            return self._tools.typed_text(self._name, self._key, string)
        try:
            self._key = json.loads(string)
        except ValueError:
            self._key = ""
        return piece

    def copy(self) -> GrowingArguments:
        clone = GrowingArguments(self._tools, self._name)
        clone.__dict__ |= self.__dict__ | {"_string": None if self._string is None else [*self._string]}
        return clone


def _escape(text: str, place: int) -> _Read | None:
    r"""The escape that begins here; None: it is incomplete. Half of a surrogate pair is not a character."""
    end = place + 2
    if len(text) < end:
        return None
    digits = _HEX.match(text, end, end + 4)
    if text[place + 1] != "u" or digits is None:
        return text[place:end], end
    code, end = digits[0], digits.end()
    if len(code) < 4:
        return None if end == len(text) else (text[place:end], end)
    if code[0] not in "dD" or code[1] not in "89abcdefABCDEF":
        return text[place:end], end
    low = _LOW.match(text, end) if code[1] in "89abAB" else None
    if low is not None and low.end() == end + _ESCAPE_CHARS:
        return text[place : low.end()], low.end()
    if code[1] in "89abAB" and len(text) == (end if low is None else low.end()):
        return None
    return _NO_CHARACTER, end


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
    keys = [re.fullmatch(rf"\{{{re.escape(content)}(\w+)\}}", template) for template in (name, arguments)]
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
        self._tail: list[str] = []  # what is behind all calls
        self._arguments: GrowingArguments | None = None  # of the call that grows
        self.num_begun = self.num_whole = 0

    def copy(self) -> GrowingCalls:
        clone = copy(self)
        clone._tail = [*self._tail]
        clone._arguments = None if self._arguments is None else self._arguments.copy()
        return clone

    def feed(self, text: str) -> list[Call]:
        """What the text adds to calls: the name of a new one, and what follows of its arguments."""
        return [*self._added(text)]

    def finish(self) -> tuple[list[Call], str]:
        """What is left of the last call's arguments, and the text after the calls."""
        tail = "".join([*self._tail, self._text]).lstrip(_ENDS)
        if self._arguments is None:
            return [], tail
        text = self._arguments.finish()
        return [Call(self._number, "", text)] if text else [], tail

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
            arguments, self._text = self._arguments.feed(self._text)
            if arguments:
                yield Call(self._number, "", arguments)
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
            self._tail.append(self._text)
            self._text = ""
            return None
        assert match is not None
        self._text = self._text[match.end() :]
        return name
