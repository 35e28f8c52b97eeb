"""Decodes JSON bodies of requests, and names the field in every error."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
from msgspec import Raw, inspect

from .access_log import MOST_NAMES
from .errors import ApiError, invalid_value

T = TypeVar("T")

_AT_PATH: Final = re.compile(r"^(?P<what>.*?)(?: - at `\$\.?(?P<path>.*)`)?$", re.DOTALL)
_MISSING: Final = re.compile(r"^Object missing required field `(?P<field>.*)`$")


def decode(body: bytes | bytearray, decoder: msgspec.json.Decoder[T]) -> T:
    """The decoded body. Raises 400 for a body that does not fit the schema."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise explained(error) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"The request's body is not JSON: {error}", code="invalid_json") from error
    except RecursionError as error:
        raise ApiError(400, "The request's body is nested too deeply.", code="invalid_json") from error


def explained(error: msgspec.ValidationError) -> ApiError:
    """A 400 for an error of msgspec's, such as "Expected `int`, got `str` - at `$.messages[0].role`"."""
    match = _AT_PATH.match(str(error))
    assert match is not None  # every part of the pattern is optional
    problem, path = match["what"], (match["path"] or "").removesuffix("[...]")
    missing = _MISSING.match(problem)
    if missing is not None:
        param = f"{path}.{missing['field']}" if path else missing["field"]
        message = f"Missing required parameter: '{param}'."
        return ApiError(400, message, param=param, code="missing_required_parameter")
    if not path:
        return ApiError(400, f"The request's body does not fit: {problem}.", code="invalid_value")
    return invalid_value(path, f"{problem[:1].lower()}{problem[1:]}.")


# Names in a request's body that its schema does not have, and the header that says that they were ignored.
#
# Objects within others are looked into as well, but those that are passed on as they are, such as JSON schemas. A
# struct's `harmless_names` are what clients send back of an answer, or to spare cost: no answer differs for them.

_OBJECT: Final = msgspec.json.Decoder(dict[str, Raw])
_LIST: Final = msgspec.json.Decoder(list[Raw])


class _Names(NamedTuple):
    """The names that an object may have, and those of the objects in it, by the names of their fields."""

    keys: frozenset[str]
    parts: Mapping[str, _Names]


class _Known(NamedTuple):
    names: _Names
    strict: Any  # a type that skims what fits, and takes no other names


def _of_struct(kind: inspect.StructType, outer: tuple[type, ...]) -> _Known:
    """`outer`: the structs that it is a part of. One that is a part of itself is looked into twice."""
    parts, fields, encoded = dict[str, _Names](), list[tuple[str, Any, Any]](), dict[str, str]()
    for number, field in enumerate(kind.fields):
        names = _of_type(field.type, (*outer, kind.cls))
        if names is not None:
            parts[field.encode_name] = names.names
        fields.append((f"f{number}", Raw if names is None else names.strict | None, None))
        encoded[f"f{number}"] = field.encode_name
    for name in getattr(kind.cls, "harmless_names", ()):
        fields.append((f"f{len(fields)}", Raw, None))
        encoded[fields[-1][0]] = name
    strict = msgspec.defstruct(f"Skimmed{kind.cls.__name__}", fields, rename=encoded, forbid_unknown_fields=True)
    return _Known(_Names(frozenset(encoded.values()), parts), strict)


def _of_type(kind: inspect.Type, outer: tuple[type, ...]) -> _Known | None:
    """None: no object of this type is looked into."""
    match kind:
        case inspect.Metadata():
            return _of_type(kind.type, outer)
        case inspect.StructType() if kind.tag is None and outer.count(kind.cls) < 2:
            return _of_struct(kind, outer)
        case inspect.ListType():
            member_names = _of_type(kind.item_type, outer)
            return None if member_names is None else _Known(member_names.names, list[member_names.strict])  # type: ignore[name-defined]
        case inspect.UnionType():
            members = [member for member in kind.types if not isinstance(member, inspect.NoneType)]
            has_objects = any(isinstance(member, inspect.DictType) for member in members)
            candidates = [member_names for member in members if (member_names := _of_type(member, outer)) is not None]
            if len(candidates) != 1 or len(members) > (3 if has_objects else 2):
                return None
            beside = str | dict[str, Raw] if has_objects else str
            return candidates[0] if len(members) == 1 else _Known(candidates[0].names, candidates[0].strict | beside)
    return None


@functools.cache
def _schema_of(kind: type[msgspec.Struct]) -> tuple[_Names, msgspec.json.Decoder[Any]]:
    """The decoder takes bodies that have no other names. That is quick: names are looked for only where it fails."""
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    names, strict = _of_struct(info, ())
    return names, msgspec.json.Decoder(strict)


def unknown_fields(body: bytes | bytearray, kind: type[msgspec.Struct]) -> list[str]:
    """The unknown names in a body that fits the schema; a few of them if there are many. Values are not decoded."""
    names, decoder = _schema_of(kind)
    try:
        decoder.decode(body)
    except msgspec.ValidationError:
        fields = dict[str, None]()
        for name in _unknown(Raw(body.lstrip()), names, ""):
            fields[name] = None
            if len(fields) > MOST_NAMES:
                break
        return [*fields]
    return []


def _unknown(value: Raw, names: _Names, where: str) -> Iterator[str]:
    match bytes(memoryview(value)[:1]):
        case b"{":
            fields = _OBJECT.decode(value)
            yield from (where + name for name in fields if name not in names.keys)
            for name, part in names.parts.items():
                if name in fields:
                    yield from _unknown(fields[name], part, f"{where}{name}.")
        case b"[":
            for entry in _LIST.decode(value):
                yield from _unknown(entry, names, f"{where.removesuffix('.')}[].")
