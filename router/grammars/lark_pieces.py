"""Pieces of a grammar in llguidance's Lark."""

from __future__ import annotations

import re
from collections.abc import Mapping
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
    """A whole grammar: one of the texts. They are one terminal, as one rule for each would take quadratic time."""
    return "start: CHOICE\nCHOICE: " + " | ".join(map(quoted, texts))


def regular_expression(pattern: str) -> str:
    """What matches all of it."""
    return f"/{regex_to_lark(pattern)}/" if pattern else '""'


def json_value(schema: dict[str, Any] | bool, spaces: str | None) -> str:
    """JSON that fits the schema. Raises ValueError for a schema that sets llguidance's own options.

    `spaces`: one run of white space, as a regular expression; None: there is none.
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
    rest: list[tuple[Any, bool, str]] = [(schema, True, "")]  # the value, whether its keys are keywords, of which one
    while rest:
        value, has_keywords, keyword = rest.pop()
        if isinstance(value, list):
            rest += [(one, has_keywords, keyword) for one in value]
        elif isinstance(value, dict) and has_keywords:
            rest += [
                (one, name not in _VALUES and name not in _SCHEMAS_BY_NAME, name)
                for name, one in value.items()
                if name not in _NOTES
            ]
        elif isinstance(value, dict):
            rest += [(one, keyword in _SCHEMAS_BY_NAME, keyword) for one in value.values()]
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
    """A text in which the names of special tokens stand for these tokens."""
    names = sorted(filter(text.__contains__, special_ids), key=len, reverse=True)
    if not names:
        return quoted(text)
    parts = re.split("(" + "|".join(map(re.escape, names)) + ")", text)
    return " ".join(f"<[{special_ids[part]}]>" if part in special_ids else quoted(part) for part in parts if part)
