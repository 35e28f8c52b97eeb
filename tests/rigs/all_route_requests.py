"""Requests to any route of an app: its path filled with names, and the least body that it takes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from motet.adapters.format.peft import CONFIG_FILE, TENSORS_FILE
from motet.adapters.registry.registry import hash_key
from motet.router.batches.schema import FileForm
from motet.router.classification import ClassifyRequest, ScoreRequest
from motet.router.http.route import RouteSpec
from motet.tests.rigs.credentials import Thing
from motet.tests.rigs.real_front import (
    BADGER,
    LION,
    OWNER,
    OWNER_KEY,
    OWNERS_ADAPTER,
    batch_of,
    file_of,
    response_of,
)

_PARAMETER: Final = re.compile(r"{(\w+)(?::\w+)?}")
_ONE_OF: Final[Mapping[Any, Mapping[str, str]]] = {  # fields of a body of which each may be absent, but not all
    ClassifyRequest: {"input": "a"},
    ScoreRequest: {"text_1": "a", "text_2": "a"},
}
_ADAPTER = Thing(OWNERS_ADAPTER, "no-ones-thing")
_ID = hash_key(OWNER_KEY)[:16]


def _work_of(whose: str) -> Mapping[str, Thing]:
    """A file, a batch of it, and a stored response. `whose`: a tenant's or a user's."""
    ids = (file_of(whose), batch_of(whose), response_of(whose))
    file, batch, response = (Thing(one, f"{one[:-16]}{'e' * 16}") for one in ids)
    return {"file_id": file, "input_file_id": file, "batch_id": batch, "response_id": response}


# By the name of a path's parameter, or of a body's field.
THINGS: Final[Mapping[str, Thing]] = {
    "name": _ADAPTER,
    "model": _ADAPTER,
    "adapter": _ADAPTER,
    "tenant": Thing(OWNER, "tenant-unknown"[: len(OWNER)].ljust(len(OWNER), "x")),
    "key_id": Thing(_ID, "0" * len(_ID)),
    "version": Thing("1", "1"),  # of an adapter of the owner's, or of none
    "alias": Thing("live", "live"),
    "user": Thing(LION, "xyz"),
    **_work_of(OWNER),
}


def users_things(name: str) -> Mapping[str, Thing]:
    """The same where the adapter is a user's private one. `name`: what it is called."""
    adapter = Thing(name, f"{name[:-4]}none")
    return {**THINGS, "name": adapter, "model": adapter, "adapter": adapter, **_work_of(BADGER)}


def names_things(route: RouteSpec) -> bool:
    """Whether a request to it names a resource with an owner."""
    fields = getattr(route.body, "__struct_fields__", ())
    return "{" in route.path or any(field in ("model", "adapter", "adapters", "input_file_id") for field in fields)


def path_of(route: RouteSpec, *, owners: bool, things: Mapping[str, Thing] = THINGS) -> str:
    """Raises KeyError for a parameter that nothing stands for in `things`."""

    def fill(match: re.Match[str]) -> str:
        thing = things[match[1]]
        return thing.owners if owners else thing.unowned

    return _PARAMETER.sub(fill, route.path)


def least_body(
    document: Any, route: RouteSpec, *, owners: bool, things: Mapping[str, Thing] = THINGS
) -> dict[str, Any]:
    """For httpx: the fields that must be there, of the simplest values. `document`: what /openapi.json says."""
    if route.form is FileForm:
        return {"data": {"purpose": "batch"}, "files": {"file": ("f", b"")}}
    if route.form is not None:
        files = {CONFIG_FILE: ("c", b"{}"), TENSORS_FILE: ("t", b"")}
        return {"data": {"name": "new-adapter"}, "files": files}
    if route.body is None:
        return {}
    content = document["paths"][_PARAMETER.sub(r"{\1}", route.path)][route.method.lower()]["requestBody"]["content"]
    adapter = things["adapter"].owners if owners else things["adapter"].unowned
    body = _least(document, content["application/json"]["schema"], adapter)
    body |= _ONE_OF.get(route.body, {})
    named = {"model", "adapter"} & {*route.body.__struct_fields__}  # which may be absent
    for field in (body.keys() | named) & things.keys():
        body[field] = things[field].owners if owners else things[field].unowned
    return {"content": msgspec.json.encode(body), "headers": {"Content-Type": "application/json"}}


def _least(document: Any, schema: Any, adapter: str) -> Any:
    """The simplest value that fits, with this adapter where objects in it name one."""
    if "$ref" in schema:
        return _least(document, document["components"]["schemas"][schema["$ref"].rpartition("/")[2]], adapter)
    if "anyOf" in schema:
        return _least(document, schema["anyOf"][0], adapter)
    if "enum" in schema:
        return schema["enum"][-1]
    match schema.get("type"):
        case "object":
            fields = {
                name: _least(document, schema["properties"][name], adapter) for name in schema.get("required", ())
            }
            return fields | ({"adapter": adapter} if "adapter" in fields else {})
        case "array":
            return [_least(document, schema["items"], adapter)] * schema.get("minItems", 0)
        case "string":
            return "a" * max(1, schema.get("minLength", 1))
        case "integer" | "number":
            least = max(1, schema.get("minimum", 1))
            return least if least < schema.get("exclusiveMaximum", least + 1) else schema["exclusiveMaximum"] / 2
        case "boolean":
            return True
        case _:
            return None
