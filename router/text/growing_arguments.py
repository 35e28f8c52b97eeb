"""The arguments of a call as they come: the text of a JSON object."""

from __future__ import annotations

import json
import re
from typing import Final

from .call_parsing import KnownTools

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
        shown: list[str] = []
        place = 0
        while place < len(text) and not self.is_over:
            read = self._in_text(text, place) if self._in_string else self._between(text, place)
            if read is None:
                self._half, place = text[place:], len(text)
            else:
                piece, place = read
                shown.append(self._shown(piece))
        return "".join(shown), text[place:]

    def finish(self) -> str:
        """What was held back of arguments that end too early."""
        held = self._string if self._is_value and self._string is not None else []
        return "".join([*held, self._half])

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

    def _shown(self, piece: str) -> str:
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
        found = GrowingArguments(self._tools, self._name)
        found.__dict__ |= self.__dict__ | {"_string": None if self._string is None else [*self._string]}
        return found


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
