"""Names in a request's body that its schema does not have, and the header that says that they were ignored."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import msgspec
from msgspec import Raw

from .chat_messages import ChatMessage, FunctionDefinition, Tool
from .request_schema import ChatRequest
from .response_request import ReasoningConfig, ResponsesRequest, ResponseTool, TextConfig

WARNING_HEADER: Final = b"x-motet-warning"
MOST_NAMES: Final = 8  # in a header
_MOST_CHARS: Final = 64  # of a name
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9_.\[\]-]")
_LISTS: Final = frozenset({"messages", "tools"})
# The fields whose objects are looked into, and what these may have.
_NESTED: Final[Mapping[type, Mapping[str, type[msgspec.Struct]]]] = MappingProxyType(
    {
        ChatRequest: {"messages": ChatMessage, "tools": Tool},
        ResponsesRequest: {"reasoning": ReasoningConfig, "text": TextConfig, "tools": ResponseTool},
    }
)


def _strict(kind: type[msgspec.Struct]) -> Any:
    """A struct that skims what fits the kind, and takes no other names."""
    fields, nested = msgspec.structs.fields(kind), dict[str, Any]()
    for name, part in _NESTED.get(kind, {}).items():
        nested[name] = (list[_strict(part)] if name in _LISTS else _strict(part)) | None  # type: ignore[misc]
    if kind is Tool:
        nested["function"] = _strict(FunctionDefinition)
    return msgspec.defstruct(
        f"Skimmed{kind.__name__}",
        [(field.name, nested.get(field.name, Raw), None) for field in fields],
        rename={field.name: field.encode_name for field in fields},
        forbid_unknown_fields=True,
    )


class _ToolNames(msgspec.Struct, frozen=True):
    function: dict[str, Raw]


_OBJECT: Final = msgspec.json.Decoder(dict[str, Raw])
_OBJECTS: Final = msgspec.json.Decoder(list[dict[str, Raw]])
_FUNCTIONS: Final = msgspec.json.Decoder(list[_ToolNames])


@functools.cache
def _known(kind: type[msgspec.Struct]) -> msgspec.json.Decoder[Any]:
    """Decodes bodies that have no other names. That is quick: names are looked for only where it fails."""
    return msgspec.json.Decoder(_strict(kind))


def unknown_fields(body: bytes | bytearray, kind: type[msgspec.Struct]) -> list[str]:
    """The unknown names in a body that fits the schema; a few of them if there are many. Values are not decoded."""
    try:
        _known(kind).decode(body)
    except msgspec.ValidationError:
        return [*dict.fromkeys(_unknown(_OBJECT.decode(body), kind))][: MOST_NAMES + 1]
    return []


def _unknown(fields: dict[str, Raw], kind: type[msgspec.Struct]) -> Iterator[str]:
    yield from _others([fields], kind)
    for field, part in _NESTED.get(kind, {}).items():
        value = fields.get(field)
        if value is None or bytes(value) == b"null":
            continue
        where, objects = (f"{field}[]", _OBJECTS.decode(value)) if field in _LISTS else (field, [_OBJECT.decode(value)])
        yield from (f"{where}.{name}" for name in _others(objects, part))
        if part is Tool:
            functions = [tool.function for tool in _FUNCTIONS.decode(value)]
            yield from (f"{where}.function.{name}" for name in _others(functions, FunctionDefinition))


def _others(objects: Iterable[dict[str, Raw]], kind: type[msgspec.Struct]) -> Iterator[str]:
    known = {field.encode_name for field in msgspec.structs.fields(kind)}
    for one in objects:
        if not one.keys() <= known:
            yield from (name for name in one if name not in known)


def warning_header(names: Sequence[str]) -> tuple[bytes, bytes]:
    """The warning header for these ignored fields; it lists some of very many."""
    shown = [_UNSAFE.sub("?", name[:_MOST_CHARS]) for name in names[:MOST_NAMES]]
    more = ", ..." if len(names) > MOST_NAMES else ""
    return WARNING_HEADER, f"ignored fields: {', '.join(shown)}{more}".encode("ascii")
