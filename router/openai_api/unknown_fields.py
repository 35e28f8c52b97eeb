"""Names in a request's body that its schema does not have, and the header that says that they were ignored."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import msgspec
from msgspec import Raw

from .chat_messages import ChatMessage, FunctionDefinition, Tool
from .request_schema import ChatRequest

WARNING_HEADER: Final = b"x-motet-warning"
MOST_NAMES: Final = 8  # in a header
_MOST_CHARS: Final = 64  # of a name
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9_.\[\]-]")


def _strict(kind: type[msgspec.Struct], **nested: Any) -> Any:
    """A struct that skims what fits the kind, and takes no other names. `nested`: types of fields."""
    fields = msgspec.structs.fields(kind)
    return msgspec.defstruct(
        f"Skimmed{kind.__name__}",
        [(field.name, nested.get(field.name, Raw), None) for field in fields],
        rename={field.name: field.encode_name for field in fields},
        forbid_unknown_fields=True,
    )


class _ToolNames(msgspec.Struct, frozen=True):
    function: dict[str, Raw]


_MESSAGES: Final = list[_strict(ChatMessage)]  # type: ignore[misc]
_TOOLS: Final = list[_strict(Tool, function=_strict(FunctionDefinition))] | None  # type: ignore[misc]
_OBJECT: Final = msgspec.json.Decoder(dict[str, Raw])
_OBJECTS: Final = msgspec.json.Decoder(list[dict[str, Raw]])
_FUNCTIONS: Final = msgspec.json.Decoder(list[_ToolNames])


@functools.cache
def _known(kind: type[msgspec.Struct]) -> msgspec.json.Decoder[Any]:
    """Decodes bodies that have no other names. That is quick: names are looked for only where it fails."""
    nested = {"messages": _MESSAGES, "tools": _TOOLS} if kind is ChatRequest else {}
    return msgspec.json.Decoder(_strict(kind, **nested))


def unknown_fields(body: bytes | bytearray, kind: type[msgspec.Struct]) -> list[str]:
    """The unknown names in a body that fits the schema; a few of them if there are many. Values are not decoded."""
    try:
        _known(kind).decode(body)
    except msgspec.ValidationError:
        return [*dict.fromkeys(_unknown(_OBJECT.decode(body), kind))][: MOST_NAMES + 1]
    return []


def _unknown(fields: dict[str, Raw], kind: type[msgspec.Struct]) -> Iterator[str]:
    yield from _others([fields], kind)
    if kind is not ChatRequest:
        return
    yield from (f"messages[].{name}" for name in _others(_OBJECTS.decode(fields["messages"]), ChatMessage))
    tools = fields.get("tools")
    if tools is not None and bytes(tools) != b"null":
        yield from (f"tools[].{name}" for name in _others(_OBJECTS.decode(tools), Tool))
        functions = [tool.function for tool in _FUNCTIONS.decode(tools)]
        yield from (f"tools[].function.{name}" for name in _others(functions, FunctionDefinition))


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
