"""A wanted grammar as llguidance reads it: one text in its Lark."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from .call_grammar import after_thought, with_calls
from .lark_pieces import ANY_TEXT, any_of, clients_lark, json_value, quoted, regular_expression, text_with_tokens
from .response_format import ResponseFormat, WantedGrammar

# Converts GBNF, the grammars of llama.cpp, vLLM and SGLang, to llguidance's Lark.
#
# GBNF is a grammar of characters, and Lark one of terminals, of which the lexer takes the longest. So each part
# without recursion becomes a single terminal, a regular expression with the same meaning. Terminals are adjacent only
# around recursive rules.

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
    """The grammar in Lark. Raises ValueError with the problem and its line.

    >>> print(lark_of_gbnf('root ::= "yes" | "no" num? # a comment\\nnum ::= [0-9]+'))
    start: R0
    R0: "yes" | "no" R1?
    R1: /[\\x{30}-\\x{39}]/+
    """
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
            piece, end = self._alternatives(body, 0, 0)
            if end < len(body):
                raise self._error(body[end].position, "a ')' has no '('")
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
            for rule in used:
                if rule not in users:
                    raise ValueError(f"its rule {name!r} uses {rule!r}, which is not defined.")
                users[rule].append(name)
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

    def _error(self, position: int, problem: str) -> ValueError:
        return ValueError(f"line {self._grammar.count(chr(10), 0, position) + 1}: {problem}.")


# vLLM's structural tags: text in which structures must follow, as xgrammar describes it.


def structural_tags(response_format: ResponseFormat, special_ids: Mapping[str, int], spaces: str | None) -> str:
    """A whole grammar. Raises ValueError.

    `structures` and `triggers`, the older form, say the same as a `format` of the type "triggered_tags".
    """
    form = response_format.format
    if form is None:
        if response_format.structures is None or response_format.triggers is None:
            raise ValueError("a structural tag needs 'format', or 'structures' and 'triggers'.")
        contents = [True if structure.schema is None else structure.schema for structure in response_format.structures]
        tags = [
            {
                "type": "tag",
                "begin": structure.begin,
                "content": {"type": "json_schema", "json_schema": schema},
                "end": structure.end,
            }
            for structure, schema in zip(response_format.structures, contents, strict=True)
        ]
        form = {"type": "triggered_tags", "triggers": response_format.triggers, "tags": tags}
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
                parts = [self.expression(element, ends=ends and at == last) for at, element in enumerate(form.elements)]
                return " ".join(parts) or '""'
            case _Or():
                return self._one_of([self.expression(element, ends=ends) for element in form.elements])
            case _Tag():
                return self._text(form.begin) + " " + self._tail(form, ends)
            case _TriggeredTags():
                return self._triggered(form, ends)
            case _TagsWithSeparator():
                tag = self._one_of(
                    [self._text(element.begin) + " " + self._tail(element, ends=False) for element in form.tags]
                )
                more = "" if form.stop_after_first else f" ({self._text(form.separator)} {tag})*"
                return f"({tag}{more})" + ("" if form.at_least_one else "?")

    def _tail(self, tag: _Tag, ends: bool) -> str:
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
            tail = f"{self._text(tag.begin.removeprefix(trigger))} {self._tail(tag, ends=False)}"
            of_trigger.setdefault(trigger, []).append(tail)
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


_ANY_ANSWER: Final = f"start: {ANY_TEXT}"


def lark_text(grammar: WantedGrammar, special_ids: Mapping[str, int]) -> str:
    """`special_ids`: of the model's special tokens, by name. Raises ValueError for an invalid grammar."""
    text = None if grammar.form == "any" else _answer(grammar, special_ids)
    if grammar.opening and (text is not None or not (grammar.calls is not None and grammar.calls.must_call)):
        opening = text_with_tokens(grammar.opening, special_ids)
        text = f"start: {opening} opened\nopened: %lark {{\n{text or _ANY_ANSWER}\n}}"
    if grammar.calls is not None:
        text = with_calls(grammar.calls, text, special_ids, grammar.spaces)
    assert text is not None
    return text if grammar.thought is None else after_thought(text, *grammar.thought, special_ids)


def _answer(grammar: WantedGrammar, special_ids: Mapping[str, int]) -> str:
    value = grammar.value
    match grammar.form:
        case "json":
            schema = _parsed(value, dict[str, Any] | bool) if isinstance(value, str) else value
            return f"start: {json_value(schema, grammar.spaces)}"
        case "regex":
            return f"start: {regular_expression(value)}"
        case "choice":
            return any_of(value)
        case "grammar":
            return lark_of_gbnf(value) if is_gbnf(value) else clients_lark(value, special_ids)
        case "structural_tag":
            if isinstance(value, str):
                value = _parsed(value, dict[str, Any])
            return structural_tags(msgspec.convert(value, ResponseFormat), special_ids, grammar.spaces)
    raise AssertionError(grammar.form)


def _parsed(text: str, kind: Any) -> Any:
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"it is not valid: {error}.") from error
