"""Tool calls out of the text that a model has written for them, in time linear in its length."""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, NamedTuple, cast

# Of a region whose format has patterns that are not known to be linear.
MAX_CHARS_OF_OTHERS: Final = 16_384
# Of a region: what it has of them outside of strings is values, which take time, each of them, on the event loop.
MAX_MARKS: Final = 16_384
_MAX_MARKS_OF_PYTHON: Final = 2_048  # its parser is written in Python
_MARKS: Final = ",;[{("
# A region that has ended without a mark can be distinguished from half of one.
SELF_DELIMITING: Final = frozenset({"json", "python-call-list"})
_QUOTED: Final = re.compile(r'"(?:[^"\\]|\\.)*+"', re.DOTALL)
_QUOTED_IN_PYTHON: Final = re.compile(rf"{_QUOTED.pattern}|'(?:[^'\\]|\\.)*+'", re.DOTALL)
_HALF: Final = re.compile("[\ud800-\udfff]")  # of a surrogate pair: no character
_SPACES: Final = re.compile(r"\s*")
_BARE_KEY: Final = re.compile(r"(?<=[{,])(\s*+)(\w++)(\s*+):")
_LITERAL_END: Final = re.compile(r"\(\?P<value>\.\*\?\)(\\s\*|\\n\?)?([<\w/|>\]\[]+)\Z")
_PLACEHOLDER: Final = re.compile(r"\{(\w+(?:\.\w+)*)\}")
_TRUTHS: Final[Mapping[str, bool]] = MappingProxyType({"true": True, "1": True, "false": False, "0": False})
_READ_TYPES: Final = frozenset({"boolean", "null", "integer", "number", "object", "array"})
# Before a number that floats do not hold, which stays as it was written. Random, so that no model writes it.
_BIG: Final = f"big-{secrets.token_hex(8)}-"
_BIG_IN_JSON: Final = re.compile(rf'"{_BIG}([^"]*)"')


class Call(NamedTuple):
    """A call, or a piece of one. The pieces of a call follow one another, and only the first has its name."""

    number: int  # among those of the answer, from 0
    name: str
    arguments: str  # of all pieces together JSON of an object, if it is whole


@dataclass(frozen=True)
class KnownTools:
    """The tools of a request: for each its parameters' schemas by name."""

    properties: Mapping[str, Mapping[str, Any]]

    def typed(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments, with texts read as the types that the tool's schema names."""
        schemas = self.properties[name]
        return {key: _typed(value, _types_of(schemas.get(key))) for key, value in arguments.items()}

    def may_read(self, name: str, key: str) -> bool:
        """Whether a text for this argument may be read as another type."""
        return not _READ_TYPES.isdisjoint(_types_of(self.properties[name].get(key)))

    def typed_text(self, name: str, key: str, string: str) -> str:
        """JSON of this argument, which has come as a JSON string; that string, if it cannot be read."""
        try:
            text = json.loads(string)
            read = _typed(text, _types_of(self.properties[name].get(key)))
            return string if read is text else json_text(read)
        except (ValueError, OverflowError, RecursionError):
            return string


def calls_of(body: str, field: Any, captures: Mapping[str, str], tools: KnownTools) -> list[tuple[str, str]]:
    """Name and arguments, as JSON of an object, of each call in a region of the response template's field.

    Raises ValueError for other text.
    """
    try:
        if field.content != "xml-inline":  # where each value is a text, and is checked when it is read as its type
            _check_size(body, field.content)
        parsed = _parsed(body, field.content, field.content_args)
        items = parsed if field.transform_each else [parsed]
        if not isinstance(items, list):
            raise ValueError("it is not a list")
        return [call for item in items for call in _calls(_transformed(item, field, captures), tools)]
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise ValueError(str(error)) from error


def _check_size(body: str, parser: str) -> None:
    """Raises ValueError for a body of more values than may be read at once."""
    of_python = parser == "python-call-list"
    limit, strings = (_MAX_MARKS_OF_PYTHON, _QUOTED_IN_PYTHON) if of_python else (MAX_MARKS, _QUOTED)
    if _num_marks(body) > limit and _num_marks(strings.sub("", body)) > limit:
        raise ValueError(f"it has more than {limit} values")


def _num_marks(text: str) -> int:
    return sum(map(text.count, _MARKS))


def _calls(value: Any, tools: KnownTools) -> Iterator[tuple[str, str]]:
    for entry in value if isinstance(value, list) else [value]:
        function = entry.get("function", entry) if isinstance(entry, dict) else None
        if not isinstance(function, dict):
            raise ValueError("it is not an object")
        name = function.get("name")
        if not isinstance(name, str) or name not in tools.properties:
            raise ValueError("it names none of the request's tools")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            arguments = json.loads(arguments or "{}")
        if arguments is None:
            arguments = {}
        if not isinstance(arguments, dict):
            raise ValueError("its arguments are not an object")
        yield name, json_text(tools.typed(name, arguments))


def json_text(value: Any) -> str:
    """JSON that strict readers accept, with other letters as they are.

    >>> print(json_text({"city": "Zürich", "half": "\\ud83d"}))
    {"city": "Zürich", "half": "�"}
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    text = _HALF.sub("\ufffd", text)  # which strict readers of JSON refuse, as an escape, too
    return _BIG_IN_JSON.sub(r"\1", text) if _BIG in text else text


def _refuse(name: str) -> Any:
    """Refuses a number of Python's that JSON does not have."""
    raise ValueError(f"{name} is not JSON")


def _number(text: str) -> float | str:
    """A JSON number with a point or an exponent."""
    value = float(text)
    return value if math.isfinite(value) else _BIG + text


def _parsed(body: str, parser: str, args: Mapping[str, Any]) -> Any:
    if parser == "json":
        return _json(body, args)
    if parser == "xml-inline" and (ending := _LITERAL_END.search(args["tag_pattern"])) is not None:
        return _tags(body, args, ending[2])
    from transformers.utils.chat_parsing.content_parsers import parse_content

    if parser != "python-call-list" and len(body) > MAX_CHARS_OF_OTHERS:
        raise ValueError(f"it has more than {MAX_CHARS_OF_OTHERS} characters")
    return parse_content(body.strip(), parser, args)


def _json(body: str, args: Mapping[str, Any]) -> Any:
    if args.get("string_delims") or args.get("unquoted_keys"):
        body = _strict(body, dict(args.get("string_delims", ())), has_bare_keys=bool(args.get("unquoted_keys")))
    separator = args.get("separator")
    if separator is None:
        return json.loads(body, parse_float=_number, parse_constant=_refuse)
    documents, decoder, position = [], json.JSONDecoder(parse_float=_number, parse_constant=_refuse), 0
    while True:
        value, position = decoder.raw_decode(body, _behind_spaces(body, position))
        documents.append(value)
        position = _behind_spaces(body, position)
        if position == len(body):
            return documents
        if not body.startswith(separator, position):
            raise ValueError("something follows its JSON")
        position += len(separator)


def _behind_spaces(text: str, position: int) -> int:
    match = _SPACES.match(text, position)
    assert match is not None
    return match.end()


def _strict(body: str, delimiters: Mapping[str, str], *, has_bare_keys: bool) -> str:
    """JSON of text with keys without quotes, and with strings between other marks."""
    begins = re.compile("|".join(map(re.escape, ['"', *delimiters])))
    parts, position = [], 0
    while True:
        begin = begins.search(body, position)
        between = body[position : None if begin is None else begin.start()]
        if has_bare_keys:  # what stands before decides whether it is a key
            between = _BARE_KEY.sub(r'\1"\2"\3:', between)
        parts.append(between)
        if begin is None:
            return "".join(parts)
        if begin[0] == '"':
            quoted = _QUOTED.match(body, begin.start())
            if quoted is None:
                raise ValueError("a string does not end")
            parts.append(quoted[0])
            position = quoted.end()
        else:
            end = body.find(delimiters[begin[0]], begin.end())
            if end < 0:
                raise ValueError("a string does not end")
            parts.append(json.dumps(body[begin.end() : end]))
            position = end + len(delimiters[begin[0]])


def _tags(body: str, args: Mapping[str, Any], ending: str) -> dict[str, Any]:
    """`xml-inline`, of a pattern that ends with a literal: text without that literal is not searched."""
    pattern = args["tag_pattern"]
    trims_all = r"\s*(?P<value>.*?)\s*" in pattern
    if trims_all:  # the pattern would try every space of a long run
        pattern = pattern.replace(r"\s*(?P<value>.*?)\s*", "(?P<value>.*?)")
    compiled = re.compile(pattern, re.DOTALL)
    parser = args.get("value_parser") or {}
    arguments: dict[str, Any] = {}
    *pieces, _ = body.split(ending)
    for piece in pieces:
        match = compiled.search(piece + ending)
        if match is None:
            continue
        value = match["value"].strip() if trims_all else match["value"]
        if parser.get("name", "text") != "text":
            value = _parsed_value(value, parser)
        elif parser and parser.get("args", {}).get("strip", True):
            value = value.strip()
        key = match["key"]
        if args.get("merge_duplicates") and key in arguments:
            arguments[key] = [*(arguments[key] if isinstance(arguments[key], list) else [arguments[key]]), value]
        else:
            arguments[key] = value
    return arguments


def _parsed_value(value: str, parser: Mapping[str, Any]) -> Any:
    args = parser.get("args", {})
    try:
        return _parsed(value, parser["name"], args)
    except ValueError:
        if args.get("allow_non_json"):
            return value.strip()
        raise


def _transformed(item: Any, field: Any, captures: Mapping[str, str]) -> Any:
    if field.transform is None:
        return item
    scope = {**captures, **item} if field.transform_each else {**captures, "content": item}
    return _filled(field.transform, scope)


def _filled(template: Any, scope: Mapping[str, Any]) -> Any:
    if isinstance(template, dict):
        return {key: _filled(value, scope) for key, value in template.items()}
    if isinstance(template, list):
        return [_filled(value, scope) for value in template]
    place = _PLACEHOLDER.fullmatch(template) if isinstance(template, str) else None
    if place is None:
        return template
    value: Any = scope
    for key in place[1].split("."):
        value = value[key]
    return value


def _types_of(schema: Any) -> tuple[str, ...]:
    """The types that a parameter's schema names, those of its alternatives included."""
    if not isinstance(schema, dict):
        return ()
    named = schema.get("type")
    types = [named] if isinstance(named, str) else named if isinstance(named, list) else []
    names = [alternative for alternative in types if isinstance(alternative, str)]
    for keyword in ("anyOf", "oneOf"):
        alternatives = schema.get(keyword)
        for alternative in alternatives if isinstance(alternatives, list) else []:
            if isinstance(alternative, dict) and isinstance(alternative.get("type"), str):
                names.append(alternative["type"])
    return tuple(names)


def _typed(value: Any, types: tuple[str, ...]) -> Any:
    """The first of the types that the text can be read as, else the text. Raises ValueError for too many values."""
    types = tuple(name for name in dict.fromkeys(types) if name in _READ_TYPES)
    if not isinstance(value, str) or not types:
        return value
    _check_size(value, "json")
    is_json, read = True, cast(Any, None)
    try:
        read = json.loads(value, parse_float=_number, parse_constant=_refuse)
    except (ValueError, RecursionError):
        is_json = False
    for name in types:
        if name == "boolean":
            truth = _TRUTHS.get(value.strip().lower())
            if truth is not None:
                return truth
        elif is_json and _is_of(read, name):
            return int(read) if name == "integer" else read
        elif name == "null" and value.strip() == "None":
            return None
    return value


def _is_of(read: Any, name: str) -> bool:
    """Whether a value of JSON is of the type. 3.0 is a whole number."""
    if name in ("integer", "number"):
        if isinstance(read, str):
            return name == "number" and read.startswith(_BIG)
        is_number = isinstance(read, int | float) and not isinstance(read, bool)
        return is_number and (name == "number" or read == int(read))
    return read is None if name == "null" else isinstance(read, dict if name == "object" else list)
