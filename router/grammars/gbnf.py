"""Converts GBNF, the grammars of llama.cpp, vLLM and SGLang, to llguidance's Lark.

GBNF is a grammar of characters, and Lark one of terminals, of which the lexer takes the longest. So each part without
recursion becomes a single terminal, a regular expression with the same meaning. Terminals are adjacent only around
recursive rules.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from .lark_pieces import quoted

ROOT: Final = "root"
MAX_NESTING: Final = 24  # of parentheses

_TOKEN: Final = re.compile(
    r"""(?P<space>\s+|\#[^\r\n]*)
    |(?P<define>(?P<defined>[A-Za-z0-9_-]+)\s*::=)
    |(?P<name>[A-Za-z0-9_-]+)
    |(?P<text>"(?:[^"\\\r\n]|\\[^\r\n])*")
    |(?P<chars>\[(?:[^\]\\\r\n]|\\[^\r\n])+\])
    |(?P<times>[*+?]|\{\s*[0-9]{1,9}\s*(?:,\s*[0-9]{0,9}\s*)?\})
    |(?P<mark>[()|.])""",
    re.VERBOSE,
)
_RULE: Final = re.compile(r"^[ \t]*[A-Za-z0-9_-]+[ \t]*::=", re.MULTILINE)
_ESCAPE: Final = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_IS_TERMINAL: Final = re.compile(r'R[0-9]+|""')
_PLAIN: Final = {"n": "\n", "r": "\r", "t": "\t"} | {char: char for char in "\\\"'[]-^/"}


class _Token(NamedTuple):
    kind: str
    text: str
    position: int


class _Piece(NamedTuple):
    lark: str
    is_regular: bool


def is_gbnf(grammar: str) -> bool:
    return _RULE.search(grammar) is not None


def lark_of_gbnf(grammar: str) -> str:
    """The grammar in Lark. Raises ValueError with the problem and its line."""
    return _Converter(grammar).lark()


class _Converter:
    def __init__(self, grammar: str) -> None:
        self._grammar = grammar
        self._bodies: dict[str, list[_Token]] = {}
        for token in self._tokens():
            if token.kind == "define":
                if token.text in self._bodies:
                    raise self._error(token.position, f"the rule {token.text!r} is defined twice")
                body = self._bodies[token.text] = []
            elif not self._bodies:
                raise self._error(token.position, "a rule must begin with 'name ::='")
            else:
                body.append(token)
        if ROOT not in self._bodies:
            raise ValueError(f"it has no rule {ROOT!r}.")
        self._numbers = {name: number for number, name in enumerate(self._bodies)}
        self._regular = self._regular_rules()
        self._lines: list[str] = []

    def lark(self) -> str:
        self._lines = [f"start: {self._reference(ROOT)}"]
        for name, body in self._bodies.items():
            piece, rest = self._alternatives(body, 0, 0)
            if rest < len(body):
                raise self._error(body[rest].position, "a ')' has no '('")
            self._lines.append(f"{self._reference(name)}: {piece.lark}")
        return "\n".join(self._lines)

    def _tokens(self) -> Iterator[_Token]:
        position = 0
        while position < len(self._grammar):
            match = _TOKEN.match(self._grammar, position)
            if match is None:
                raise self._error(position, f"{self._grammar[position : position + 20]!r} is not GBNF")
            position, kind = match.end(), match.lastgroup or ""
            if kind != "space":
                yield _Token(kind, match["defined"] or match[kind], match.start())

    def _regular_rules(self) -> set[str]:
        """Rules that do not refer to themselves, directly or through others."""
        references = {
            name: {token.text for token in body if token.kind == "name"} for name, body in self._bodies.items()
        }
        users: dict[str, list[str]] = {name: [] for name in references}
        for name, used in references.items():
            for one in used:
                if one not in users:
                    raise ValueError(f"its rule {name!r} uses {one!r}, which is not defined.")
                users[one].append(name)
        num_open = {name: len(used) for name, used in references.items()}
        ready = [name for name, number in num_open.items() if not number]
        for name in ready:  # grows during the loop
            for user in users[name]:
                num_open[user] -= 1
                if not num_open[user]:
                    ready.append(user)
        return set(ready)

    def _reference(self, name: str) -> str:
        return f"{'R' if name in self._regular else 'r'}{self._numbers[name]}"

    def _alternatives(self, body: list[_Token], at: int, depth: int) -> tuple[_Piece, int]:
        """The alternatives from `at` up to the next ')' or the end, and the position of that."""
        if depth > MAX_NESTING:
            raise self._error(body[at - 1].position, f"more than {MAX_NESTING} parentheses are nested")
        pieces = []
        while True:
            piece, at = self._sequence(body, at, depth)
            pieces.append(piece)
            if at == len(body) or body[at].text != "|" or body[at].kind != "mark":
                break
            at += 1
        if not all(piece.is_regular for piece in pieces):
            ways = [self._terminal([piece.lark]) if piece.is_regular else piece.lark for piece in pieces]
            return _Piece(" | ".join(ways), is_regular=False), at
        return _Piece(" | ".join(piece.lark for piece in pieces), is_regular=True), at

    def _sequence(self, body: list[_Token], at: int, depth: int) -> tuple[_Piece, int]:
        pieces: list[_Piece] = []
        while at < len(body) and not (body[at].kind == "mark" and body[at].text in "|)"):
            token = body[at]
            at += 1
            match token.kind:
                case "times":
                    if not pieces or pieces[-1].lark.endswith(("*", "+", "?", "}")):
                        raise self._error(token.position, f"{token.text!r} follows nothing that can be repeated")
                    pieces[-1] = _Piece(pieces[-1].lark + re.sub(r"\s", "", token.text), pieces[-1].is_regular)
                case "name":
                    pieces.append(_Piece(self._reference(token.text), token.text in self._regular))
                case "text":
                    pieces.append(_Piece(quoted(self._plain(token)), is_regular=True))
                case "chars":
                    pieces.append(_Piece(self._class(token), is_regular=True))
                case _ if token.text == ".":
                    pieces.append(_Piece("/(?s:.)/", is_regular=True))
                case _:
                    inner, at = self._alternatives(body, at, depth + 1)
                    if at == len(body):
                        raise self._error(token.position, "a '(' has no ')'")
                    pieces.append(_Piece(f"({inner.lark})", inner.is_regular))
                    at += 1
        return self._joined(pieces), at

    def _joined(self, pieces: list[_Piece]) -> _Piece:
        """The sequence. If not all of it is regular, adjacent regular pieces become one terminal."""
        if not pieces:
            return _Piece('""', is_regular=True)
        if all(piece.is_regular for piece in pieces):
            return _Piece(" ".join(piece.lark for piece in pieces), is_regular=True)
        joined: list[str] = []
        run: list[str] = []
        for piece in (*pieces, None):
            if piece is not None and piece.is_regular:
                run.append(piece.lark)
                continue
            if run:
                joined.append(self._terminal(run))
                run = []
            if piece is not None:
                joined.append(piece.lark)
        return _Piece(" ".join(joined), is_regular=False)

    def _terminal(self, run: list[str]) -> str:
        if len(run) == 1 and _IS_TERMINAL.fullmatch(run[0]):
            return run[0]
        name = f"T{len(self._lines)}"
        self._lines.append(f"{name}: {' '.join(run)}")
        return name

    def _plain(self, token: _Token) -> str:
        return _ESCAPE.sub(lambda match: self._escaped(match, token), token.text[1:-1])

    def _class(self, token: _Token) -> str:
        """A class of characters, with members as code points, so that none has a special meaning in Lark."""
        inner = token.text[1:-1]
        start = "[^" if inner.startswith("^") and len(inner) > 1 else "["
        members = re.findall(r"\\(?:x..|u....|U........|.)|.", inner[len(start) - 1 :], re.DOTALL)
        written = [
            "-"
            if member == "-" and 0 < position < len(members) - 1
            else f"\\x{{{ord(_ESCAPE.sub(lambda match: self._escaped(match, token), member)):x}}}"
            for position, member in enumerate(members)
        ]
        return f"/{start}{''.join(written)}]/"

    def _escaped(self, match: re.Match[str], token: _Token) -> str:
        digits = match[1] or match[2] or match[3]
        if digits is None:
            if match[4] not in _PLAIN:
                raise self._error(token.position, f"{match[0]!r} is not an escape of GBNF")
            return _PLAIN[match[4]]
        number = int(digits, 16)
        if number > 0x10FFFF or 0xD800 <= number < 0xE000:
            raise self._error(token.position, f"{match[0]!r} is not a character")
        return chr(number)

    def _error(self, position: int, what: str) -> ValueError:
        return ValueError(f"line {self._grammar.count(chr(10), 0, position) + 1}: {what}.")
