"""Pieces of a grammar in llguidance's Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import msgspec
from llguidance import regex_to_lark

MAX_SPACES: Final = 64  # behind a newline: the indentation of a deep level
MAX_SPACES_IN_LINE: Final = 4  # a small model goes on with blanks for as long as it may
SPACES: Final = rf"\x0D?\x0A[\x20\x09]{{0,{MAX_SPACES}}}|[\x20\x09]{{1,{MAX_SPACES_IN_LINE}}}"
ANY_TEXT: Final = "/(?s:.*)/"
_LARK_TOKEN: Final = re.compile(
    r"""(?://|\#)[^\n]*
    |"(?:\\.|[^"\\])*"
    |/(?:\\.|[^/\\])+/
    |(?P<option>%llguidance\b(?=\s*\{\s*[^\s}])|\b(?:max_tokens|temperature|stop|stop_capture)(?=\s*=))
    |(?P<token><[^<>\s\[\]]+>)""",
    re.VERBOSE,
)
_VALUES: Final = ("enum", "const")
_NUMERIC: Final = (*_VALUES, "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_SCHEMAS_BY_NAME: Final = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
_NOTES: Final = ("default", "examples")
_OPTIONS: Final = "x-guidance"  # llguidance's own keyword: separators, white space, which keywords it may ignore


def quoted(text: str) -> str:
    """A text that stands for itself."""
    return msgspec.json.encode(text).decode().replace("\x7f", "\\u007f") if text else '""'


def any_of(texts: list[str]) -> str:
    """A whole grammar: one of the texts. They are one terminal, as one rule for each would take quadratic time.

    >>> print(any_of(["yes", "no"]))
    start: CHOICE
    CHOICE: "yes" | "no"
    """
    return "start: CHOICE\nCHOICE: " + " | ".join(map(quoted, texts))


def regular_expression(pattern: str) -> str:
    """What matches all of it.

    >>> print(regular_expression("[a-z]+/[0-9]{2}"))
    /[a-z]+\\/[0-9]{2}/
    """
    return f"/{regex_to_lark(pattern)}/" if pattern else '""'


def json_value(schema: dict[str, Any] | bool, spaces: str | None) -> str:
    """JSON that fits the schema. Raises ValueError for a schema that sets llguidance's own options.

    `spaces`: one run of white space, as a regular expression; None: there is none.

    >>> print(json_value({"type": "integer"}, None))
    %json {"type":"integer","x-guidance":{"whitespace_flexible":false}}
    """
    if schema is False:
        raise ValueError("no value fits the schema false.")
    if schema is True:
        schema = {}
    _refuse_inexact(schema)
    if _OPTIONS in schema:
        raise ValueError(f"the keyword {_OPTIONS!r} is not supported.")
    options: dict[str, Any] = {"whitespace_flexible": False}
    if spaces is not None:
        options = {"whitespace_pattern": spaces}
    return "%json " + msgspec.json.encode({**schema, _OPTIONS: options}).decode()


def _refuse_inexact(schema: Any) -> None:
    """llguidance reads numbers as doubles: a neighbour of this integer would be answered. Raises ValueError."""
    stack: list[tuple[Any, bool, str]] = [(schema, True, "")]  # the value, whether its keys are keywords, of which one
    while stack:
        value, has_keywords, keyword = stack.pop()
        if isinstance(value, list):
            stack += [(child, has_keywords, keyword) for child in value]
        elif isinstance(value, dict) and has_keywords:
            stack += [
                (child, name not in _VALUES and name not in _SCHEMAS_BY_NAME, name)
                for name, child in value.items()
                if name not in _NOTES
            ]
        elif isinstance(value, dict):
            stack += [(child, keyword in _SCHEMAS_BY_NAME, keyword) for child in value.values()]
        elif isinstance(value, int) and keyword in _NUMERIC and int(float(value)) != value:
            raise ValueError(
                f"{keyword!r} has {value}, which a double does not hold: whole numbers from {-(2**53)} to {2**53} and "
                "strings are supported there."
            )


def clients_lark(grammar: str, special_ids: Mapping[str, int]) -> str:
    """A client's own Lark, with the ids of special tokens for their names.

    Raises ValueError for options that only some of llguidance's users obey: they would be ignored here.
    """

    def replaced(match: re.Match[str]) -> str:
        if match["option"]:
            raise ValueError(f"the option {match['option']!r} is not supported.")
        name = match["token"]
        if name is None:
            return match[0]
        if name not in special_ids:
            raise ValueError(f"the model has no special token {name[:40]!r}.")
        return f"<[{special_ids[name]}]>"

    return _LARK_TOKEN.sub(replaced, grammar)


def text_with_tokens(text: str, special_ids: Mapping[str, int]) -> str:
    """A text in which the names of special tokens stand for these tokens.

    >>> print(text_with_tokens("<think>so", {"<think>": 7}))
    <[7]> "so"
    """
    names = sorted(filter(text.__contains__, special_ids), key=len, reverse=True)
    if not names:
        return quoted(text)
    parts = re.split("(" + "|".join(map(re.escape, names)) + ")", text)
    return " ".join(f"<[{special_ids[part]}]>" if part in special_ids else quoted(part) for part in parts if part)


# Lark of a text as Lark of the same text between the quotation marks of JSON.
#
# Each character that JSON escapes stands for its shortest escape. All others are as they are. Escapes begin alike, so
# a lexer could not tell the end of one terminal by the next character: all rules together become one regular
# expression.

_RULE: Final = "RULE_"
_CONTROLS: Final = r"\x00-\x1F"
_ESCAPES: Final[Mapping[str, str]] = MappingProxyType(
    {chr(code): json.dumps(chr(code))[1:-1] for code in (*range(32), ord('"'), ord("\\"))}
)
_TOKEN: Final = re.compile(
    r"""(?P<comment>(?://|\#)[^\n]*)
    |(?P<import>%import\s+common\.(?P<terminal>\w+)(?:[ ]*->[ ]*(?P<alias>\w+))?)
    |(?P<refused>%\w+|<[^<>\s]+>)
    |(?P<shown>->\s*\w+)
    |[?!]?(?P<rule>\b[a-z_][a-z0-9_]*\b)
    |[A-Z]\w*
    |"(?P<low>\\[xu][0-9a-fA-F]+|\\.|[^"\\])"\s*\.\.\s*"(?P<high>\\[xu][0-9a-fA-F]+|\\.|[^"\\])"
    |"(?P<text>(?:\\.|[^"\\])*)"(?P<case>i?)
    |/(?P<pattern>(?:\\.|[^/\\])+)/(?P<flags>[a-z]*)""",
    re.VERBOSE,
)
# Of Lark's library, as far as its terminals are regular expressions of one line.
_COMMON: Final[Mapping[str, str]] = MappingProxyType(
    {
        "CNAME": "[a-zA-Z_][a-zA-Z0-9_]*",
        "CR": r"\r",
        "DIGIT": "[0-9]",
        "HEXDIGIT": "[0-9a-fA-F]",
        "INT": "[0-9]+",
        "LCASE_LETTER": "[a-z]",
        "LETTER": "[a-zA-Z]",
        "LF": r"\n",
        "NEWLINE": r"(?:\r?\n)+",
        "SIGNED_INT": "[+-]?[0-9]+",
        "UCASE_LETTER": "[A-Z]",
        "WORD": "[a-zA-Z]+",
        "WS": r"[ \t\f\r\n]+",
        "WS_INLINE": r"[ \t]+",
    }
)
_ATOM: Final = re.compile(
    r"""(?P<group>\(\?(?:P?<[A-Za-z_]\w*>|[a-zA-Z-]*:|<?[=!]))
    |(?P<count>\{\d*,?\d*\})
    |\[(?P<class>\^?\]?(?:\\.|[^\]\\])*)\]
    |\\(?P<escape>x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.)
    |(?P<syntax>[()|*+?^$])
    |(?P<char>.)""",
    re.VERBOSE | re.DOTALL,
)
_NAMED: Final = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "0": "\0", "a": "\a"}
_SPACES: Final = " \t-\r\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"  # as a class of characters
_ESCAPED: Final = re.compile(r"\\.", re.DOTALL)
_RANGE: Final = re.compile(
    r"(\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.)|[^\\])(?:-(\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.)|[^\\]))?", re.DOTALL
)


def quoted_lark(grammar: str) -> str:
    """Raises ValueError for what has no such form: options, references to tokens, and rare expressions.

    The grammar may not be recursive: llguidance refuses the result then.
    """

    def replaced(match: re.Match[str]) -> str:
        if match["refused"]:
            raise ValueError(f"{match[0][:40]!r} is not supported in the grammar of a custom tool.")
        if match["shown"]:
            return ""
        if match["rule"]:
            return f"{_RULE}{match['rule'].upper()}"
        if match["import"]:
            if match["terminal"] not in _COMMON:
                raise ValueError(f"the terminal common.{match['terminal'][:40]} is not known.")
            name = match["alias"] or match["terminal"]
            return f"{name}: /{quoted_pattern(_COMMON[match['terminal']])}/"
        if match["pattern"] is not None:
            flags = match["flags"]
            if flags not in ("", "s"):
                raise ValueError(f"the flags {flags!r} of a regular expression are not supported.")
            return f"/{quoted_pattern(match['pattern'], dot_is_all=flags == 's')}/"
        if match["low"]:
            low, high = (_unescaped(match[name]) for name in ("low", "high"))
            return f"/{_quoted_range(low, high)}/"
        if match["text"] is not None:
            return _quoted_text(match)
        return match[0]

    return f"start: {_RULE}START\n{_TOKEN.sub(replaced, grammar)}"


def _quoted_text(match: re.Match[str]) -> str:
    text = _unescaped(match["text"])
    inner = json.dumps(text, ensure_ascii=False)[1:-1]
    if inner != text and match["case"]:
        raise ValueError(f"{match[0][:40]!r} is not supported in the grammar of a custom tool.")
    return json.dumps(inner, ensure_ascii=False) + match["case"]


def quoted_pattern(pattern: str, *, dot_is_all: bool = False) -> str:
    """A regular expression for what the pattern matches, as it stands in a JSON string."""
    out: list[str] = []
    outer: list[bool] = []  # whether a dot is all outside of the groups that are open
    for match in _ATOM.finditer(pattern):
        if match["group"] or match["syntax"] == "(":
            outer.append(dot_is_all)
        elif match["syntax"] == ")" and outer:
            dot_is_all = outer.pop()
        if match["syntax"] or match["count"]:
            out.append(match[0])
        elif group := match["group"]:
            flags = group[2:-1] if group.endswith(":") else ""
            if flags.strip("s"):
                raise ValueError(f"the flags {flags[:20]!r} of a regular expression are not supported.")
            dot_is_all |= bool(flags)
            out.append("(?:" if group.endswith((":", ">")) else group)
        elif match["class"] is not None:
            out.append(_quoted_class(match["class"]))
        elif match["escape"] is not None:
            out.append(_quoted_escape(match["escape"]))
        elif match["char"] == ".":
            out.append(
                _either(
                    "[^" + _avoided("" if dot_is_all else "\n"),
                    [*_ESCAPES] if dot_is_all else [char for char in _ESCAPES if char != "\n"],
                )
            )
        else:
            out.append(_quoted_char(match["char"]))
    return "".join(out)


def _quoted_escape(escape: str) -> str:
    if escape in "dw":
        return f"\\{escape}"
    if escape in "DW":
        return _either(f"[^\\{escape.lower()}" + _avoided(""), [*_ESCAPES])
    if escape == "s":
        return _quoted_class(_SPACES)
    if escape == "S":
        return _quoted_class("^" + _SPACES)
    if escape in "bBAzZ":
        raise ValueError(f"\\{escape} is not supported in a regular expression of a custom tool.")
    return _quoted_char(_char(escape))


def _quoted_class(inner: str) -> str:
    """A class of characters, given what is between its brackets."""
    is_negative = inner.startswith("^")
    plain: list[str] = []
    specials = set[str]()
    inner = _ESCAPED.sub(lambda match: _SPACES if match[0] == "\\s" else match[0], inner)
    for match in _RANGE.finditer(inner[1:] if is_negative else inner):
        first, last = match[1], match[2]
        if last is None and first in ("\\d", "\\w"):
            plain.append(first)
            continue
        low, high = (char[1:] if char.startswith("\\") else char for char in (first, last or first))
        if first[0] == "\\" and low in "DWS":
            raise ValueError(f"{first} is not supported within a class of characters.")
        begin, end = (
            _char(char) if source.startswith("\\") else char for char, source in ((low, first), (high, last or first))
        )
        specials |= {char for char in _ESCAPES if begin <= char <= end}
        plain.append(_in_class(begin) if begin == end else f"{_in_class(begin)}-{_in_class(end)}")
    if is_negative:
        return _either(f"[^{''.join(plain)}" + _avoided(""), [char for char in _ESCAPES if char not in specials])
    # A range may hold some that JSON escapes.
    branches = [f"[{''.join(plain)}--[{_avoided('')[:-1]}]]"] if plain else []
    return "(?:" + "|".join([*branches, *(_literal(_ESCAPES[char]) for char in sorted(specials))]) + ")"


def _quoted_range(low: str, high: str) -> str:
    bounds = (char if ord(char) > 0xFFFF else f"\\u{ord(char):04x}" for char in (low, high))
    return _quoted_class("-".join(bounds))


def _avoided(more: str) -> str:
    """The end of a negative class without the characters that JSON escapes."""
    return "".join(map(_in_class, more)) + f'"\\\\{_CONTROLS}]'


def _either(plain: str, specials: list[str]) -> str:
    return "(?:" + "|".join([plain, *(_literal(_ESCAPES[char]) for char in specials)]) + ")"


def _quoted_char(char: str) -> str:
    return f"(?:{_literal(_ESCAPES[char])})" if char in _ESCAPES else _literal(char)


def _literal(text: str) -> str:
    return "".join(f"\\{char}" if char in r"\.+*?()|[]{}^$/-&~#" else char for char in text)


def _in_class(char: str) -> str:
    return f"\\x{{{ord(char):X}}}"


def _char(escape: str) -> str:
    """The character that an escape stands for, without its backslash."""
    if escape[0] in "xu" and len(escape) > 1:
        return chr(int(escape[1:], 16))
    return _NAMED.get(escape, escape)


def _unescaped(text: str) -> str:
    return re.sub(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.)", lambda match: _char(match[1]), text, flags=re.DOTALL)
