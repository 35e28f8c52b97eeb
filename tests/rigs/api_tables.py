"""The tables of docs/api.md, made of the OpenAPI document; the prose between them is written by hand.

A table stands between the lines `<!-- made: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from motet.router.bodies.request_decoder import refused_fields
from motet.router.openai.request_schema import ChatRequest, CompletionRequest, GenerationFields
from motet.router.openapi_document import ERRORS, EVERYWHERE, OF_NO_ROUTE, Schema
from motet.tests.rigs.schema_words import name_of, shown_name, words_of

_BLOCK: Final = re.compile(r"(<!-- made: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
_FEW: Final = 2
_REFERENCE: Final = re.compile(r"#/components/schemas/([^\"]+)")
_CODE: Final = re.compile(r"^- `(\w+)`:", re.MULTILINE)
_GENERATION: Final[Mapping[str, type[GenerationFields]]] = MappingProxyType(
    {"chat": ChatRequest, "completions": CompletionRequest}
)


def with_tables(page: str, document: Schema) -> str:
    """The page with its tables made anew. Raises ValueError for a missing or an unknown table."""
    requested = [name for _, name, _ in _BLOCK.findall(page)]
    if sorted(requested) != sorted(_TABLES):
        raise ValueError(f"the page has the tables {sorted(requested)}: each of {sorted(_TABLES)} must be there once")
    return _BLOCK.sub(lambda block: f"{block[1]}\n{_TABLES[block[2]](document)}\n{block[3]}", page)


def _operations(document: Schema) -> Iterator[tuple[str, Schema]]:
    """Each call, as `GET /v1/models`, and what is said of it."""
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield f"{method.upper()} {path}", operation


def _endpoints(document: Schema) -> str:
    rows = [
        (f"`{call}`", _needed(operation), operation["summary"], _taken(operation), _given(operation))
        for call, operation in _operations(document)
    ]
    return _table(("call", "key", "what it is for", "takes", "gives"), rows)


def _needed(operation: Schema) -> str:
    """The scope that a key needs."""
    needed = operation.get("security")
    return f"`{needed[0]['bearer'][0]}`" if needed else "none"


def _taken(operation: Schema) -> str:
    parts = [
        f"`{parameter['name']}`" + (" (a header)" if parameter["in"] == "header" else "")
        for parameter in operation.get("parameters", ())
        if parameter["in"] != "path"
    ]
    for media_type, content in operation.get("requestBody", {"content": {}})["content"].items():
        shown = "" if media_type == "application/json" else " (form)"
        parts.insert(0, words_of(content["schema"]) + shown)
    return ", ".join(parts)


def _given(operation: Schema) -> str:
    """A status is named if it is not 200."""
    parts = []
    for status, response in operation["responses"].items():
        if not status.startswith("2"):
            continue
        kinds = [
            words_of(content["schema"]) if media_type == "application/json" else f"`{media_type}`"
            for media_type, content in response.get("content", {}).items()
        ]
        parts.append(("" if status == "200" else f"{status} ") + " or ".join(kinds))
    return "; ".join(part.strip() for part in parts)


def _fields(document: Schema) -> str:
    """Of generation, without those that are refused."""
    chat, text = (document["components"]["schemas"][kind.__name__]["properties"] for kind in _GENERATION.values())
    rows = []
    for name in dict.fromkeys((*chat, *text)):
        places = {"both": chat} if chat.get(name) == text.get(name) else {"chat": chat, "completions": text}
        rows += [
            (f"`{name}`", where, *_meaning(fields[name]))
            for where, fields in places.items()
            if name in fields and not _is_refused(where, name)
        ]
    order = ("both", *_GENERATION)
    return _table(("field", "where", "accepted", ""), sorted(rows, key=lambda row: order.index(row[1])))


def _is_refused(where: str, name: str) -> bool:
    kinds = _GENERATION.values() if where == "both" else (_GENERATION[where],)
    return all(name in refused_fields(kind) for kind in kinds) or (where, name) == ("chat", "echo")


def _meaning(schema: Schema) -> tuple[str, str]:
    """What is accepted, and what it means if that is said."""
    descriptions = [one.get("description", "") for one in (schema, *schema.get("anyOf", ()))]
    return words_of(schema, with_null=False), next(filter(None, descriptions), "")


def _refused(document: Schema) -> str:
    chat, text = (
        {f"`{name}`": words_of(document["components"]["schemas"][kind.__name__]["properties"][name], with_null=False)
         for name in refused_fields(kind)}
        for kind in _GENERATION.values()
    )  # fmt: skip
    both = [(name, accepted) for name, accepted in chat.items() if text.get(name) == accepted]
    only = [(f"{name} in a chat", accepted) for name, accepted in chat.items() if text.get(name) != accepted]
    only += [(f"{name} in completions", accepted) for name, accepted in text.items() if chat.get(name) != accepted]
    return _table(("field", "accepted"), [*both, *only, ("`echo` in a chat", "")])


def _types(document: Schema) -> str:
    """Of all other bodies, and of errors: a line for each."""
    of_chats = document["components"]["schemas"][ChatRequest.__name__]["properties"]
    lines = []
    sent = _sent(document)
    for name, schema in document["components"]["schemas"].items():
        if name in {kind.__name__ for kind in _GENERATION.values()} or name not in sent:
            continue
        fields, required = schema.get("properties", {}), schema.get("required", ())
        same = [field for field, one in fields.items() if one == of_chats.get(field)]
        same = same if len(same) > _FEW else []
        parts = [_as_in_a_chat(same, [field for field in of_chats if field not in same])] if same else []
        groups: dict[tuple[str, str], list[str]] = {}
        for field, one in fields.items():
            if field not in same:
                marks = ("" if field in required else "?") + ("*" if _has_null(one) else "")
                groups.setdefault((words_of(one, with_null=False), _meaning(one)[1]), []).append(f"{field}{marks}")
        for (accepted, meaning), names in groups.items():
            shown = f"{_listed(names)}: {accepted or '`null`'}"
            parts.append(f"{shown} ({meaning.removesuffix('.')})" if meaning else shown)
        lines.append(f"- **`{shown_name(name)}`** {'; '.join(parts) or 'empty'}")
    return "\n".join(lines)


def _sent(document: Schema) -> set[str]:
    """Names of the types that requests hold, and of those that errors do."""
    bodies = [operation["requestBody"] for _, operation in _operations(document) if "requestBody" in operation]
    waiting = [*_REFERENCE.findall(json.dumps(bodies)), "ErrorBody"]
    sent: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name not in sent:
            sent.add(name)
            waiting += _REFERENCE.findall(json.dumps(document["components"]["schemas"][name]))
    return sent


def _as_in_a_chat(same: Sequence[str], others: Sequence[str]) -> str:
    """`others`: fields of a chat that are absent, or otherwise than there."""
    return f"as in a chat: {_listed(same)}" if len(same) < len(others) else f"as in a chat, but not {_listed(others)}"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _has_null(schema: Schema) -> bool:
    """Whether null is accepted beside something else."""
    beside = [one != {"type": "null"} for one in schema.get("anyOf", ())]
    beside += [value is not None for value in schema.get("enum", ())]
    return any(beside) and not all(beside)


def _errors(document: Schema) -> str:
    """By status."""
    errors = sorted(ERRORS.items(), key=lambda error: error[1][0])
    return _table(
        ("status", "`code`", "means"), [(str(status), f"`{code}`", meaning) for code, (status, meaning) in errors]
    )


def given_errors(document: Schema) -> set[str]:
    """Codes of the errors that some call gives."""
    given = {*EVERYWHERE, *OF_NO_ROUTE}
    for _, operation in _operations(document):
        for response in operation["responses"].values():
            given.update(_CODE.findall(_resolved(document, response)["description"]))
    return given


def _resolved(document: Schema, response: Schema) -> Any:
    return document["components"]["responses"][name_of(response)] if "$ref" in response else response


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown."""
    head = [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
    return "\n".join([*head, *map(_row, rows)])


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


_TABLES: Final[Mapping[str, Callable[[Schema], str]]] = MappingProxyType(
    {"endpoints": _endpoints, "fields": _fields, "refused": _refused, "errors": _errors, "types": _types}
)
