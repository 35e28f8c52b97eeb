"""The OpenAPI document of a router's routes, made of their specs and of the types that they name."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

from ... import __version__
from ..openai_api.errors import ErrorBody
from ..openai_api.request_schema import GenerationFields
from ..openai_api.unsupported_fields import NEUTRAL, refused_fields
from ..route import RouteSpec
from .error_codes import ERRORS, by_status, codes_of

_PARAMETER: Final = re.compile(r"{(\w+)(?::\w+)?}")
_SCHEMAS: Final = "#/components/schemas/{name}"
_REQUEST_ID: Final = {"x-request-id": {"$ref": "#/components/headers/x-request-id"}}
_ABOUT: Final = (
    "Thousands of LoRA adapters of one base model behind OpenAI's API. A null in a request's body is an absent field; "
    "fields that are not described change nothing, and the header `x-motet-warning` names them. Errors have OpenAI's "
    "form."
)
_BEARER: Final = (
    "An API key of a tenant, which is also accepted in the header x-api-key. Each operation says which of the key's "
    "scopes it needs; `operator` stands for the operators' own key."
)
_REFUSED: Final = "Refused with any other value."
Schema = dict[str, Any]


def openapi_document(routes: Sequence[RouteSpec]) -> Schema:
    """The document, of OpenAPI 3.1. Raises KeyError for a route with an error code that has no explanation."""
    described = _Types(_types_of(routes))
    shared = _shared(routes)
    paths: dict[str, Schema] = {}
    for route in routes:
        operations = paths.setdefault(_PARAMETER.sub(r"{\1}", route.path), {})
        operations[route.method.lower()] = _operation(route, described, shared)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "motet",
            "version": __version__,
            "description": _ABOUT,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {
            "schemas": described.components,
            "responses": {name: _refusal(codes, described) for codes, name in shared.items()},
            "headers": {
                "x-request-id": {
                    "description": "The request's own, or a new one. Operators find the request by it.",
                    "schema": {"type": "string"},
                }
            },
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer", "description": _BEARER}},
        },
    }


class _Types:
    """JSON schemas of types, of which structs are components that others refer to."""

    def __init__(self, types: Sequence[Any]) -> None:
        schemas, self.components = msgspec.json.schema_components(types, ref_template=_SCHEMAS)
        self._schemas = [*zip(types, schemas, strict=True)]
        _forget_written(self.components)
        for kind in types:
            if isinstance(kind, type) and issubclass(kind, GenerationFields):
                _restrict(self.components[kind.__name__], kind)

    def schema(self, kind: Any) -> Schema:
        return next(schema for known, schema in self._schemas if known is kind)


def _forget_written(schema: Any) -> None:
    """Takes `msgspec.Raw` out of all unions: it stands for JSON of the other types that is written already."""
    if isinstance(schema, dict):
        if {} in schema.get("anyOf", ()):
            schema["anyOf"] = [one for one in schema["anyOf"] if one]
        for value in schema.values():
            _forget_written(value)
    elif isinstance(schema, list):
        for value in schema:
            _forget_written(value)


def _restrict(schema: Schema, kind: type[GenerationFields]) -> None:
    """Adds which values of unsupported fields are accepted."""
    for field in refused_fields(kind):
        accepted = [None, *NEUTRAL.get(field, ())]
        schema["properties"][field] = {"enum": accepted, "default": None, "description": _REFUSED}


def _types_of(routes: Sequence[RouteSpec]) -> list[Any]:
    """Each one once."""
    types: list[Any] = [ErrorBody]
    for route in routes:
        of_route = (route.body, route.form, route.events, *route.answers.values())
        for kind in (*of_route, *route.query.values(), *route.headers.values()):
            if kind is not None and not any(kind is known for known in types):
                types.append(kind)
    return types


def _shared(routes: Sequence[RouteSpec]) -> dict[tuple[str, ...], str]:
    """Names of the refusals that several routes have, by their codes."""
    times = Counter(codes for route in routes for codes in by_status(codes_of(route)).values())
    return {codes: "Or".join(map(_in_camels, codes)) for codes, count in times.items() if count > 1}


def _in_camels(code: str) -> str:
    return "".join(word.title() for word in code.split("_"))


def _operation(route: RouteSpec, types: _Types, shared: dict[tuple[str, ...], str]) -> Schema:
    operation: Schema = {"operationId": operation_id(route), "summary": route.summary, "tags": [_tag(route.path)]}
    if description := inspect.getdoc(route.handler):
        operation["description"] = description
    if route.scope != "public":
        operation["security"] = [{"bearer": [route.scope]}]
    if parameters := [*_parameters(route, types)]:
        operation["parameters"] = parameters
    if route.body is not None or route.form is not None:
        media_type = "application/json" if route.body is not None else "multipart/form-data"
        kind = route.body if route.body is not None else route.form
        operation["requestBody"] = {"required": True, "content": {media_type: {"schema": types.schema(kind)}}}
    responses = {str(status): response for status, response in sorted(_successes(route, types).items())}
    for status, codes in by_status(codes_of(route)).items():
        is_shared = codes in shared
        responses[str(status)] = (
            {"$ref": f"#/components/responses/{shared[codes]}"} if is_shared else _refusal(codes, types)
        )
    operation["responses"] = responses
    return operation


def operation_id(route: RouteSpec) -> str:
    """As `get_v1_adapters_name`; one for each route."""
    slash = "_" if route.path.endswith("/") else ""
    return "_".join([route.method.lower(), *re.findall(r"\w+", _PARAMETER.sub(r"\1", route.path))]) + slash


def _tag(path: str) -> str:
    """What the route is about: the word behind /v1."""
    words = [word for word in path.split("/") if word and word != "v1"]
    return "operations" if not path.startswith("/v1/") else words[0]


def _parameters(route: RouteSpec, types: _Types) -> Iterable[Schema]:
    for name in _PARAMETER.findall(route.path):
        yield {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    for place, parameters in (("query", route.query), ("header", route.headers)):
        for name, kind in parameters.items():
            schema = types.schema(kind)
            yield {
                "name": name,
                "in": place,
                "required": False,
                **({"description": schema["description"]} if "description" in schema else {}),
                "schema": schema,
            }


def _successes(route: RouteSpec, types: _Types) -> dict[int, Schema]:
    answers: dict[int, Schema] = {
        status: {
            "description": {200: "Done.", 201: "Made.", 202: "Taken.", 204: "Done; no content."}[status],
            "headers": _REQUEST_ID,
            **({} if kind is None else {"content": {"application/json": {"schema": types.schema(kind)}}}),
        }
        for status, kind in route.answers.items()
    }
    if route.texts:
        whole = answers.setdefault(200, {"description": "Done.", "headers": _REQUEST_ID})
        for media_type, what in route.texts.items():
            whole["description"] += f" As `{media_type}`: {what}"
            whole.setdefault("content", {})[media_type] = _text(media_type, route, types)
    return answers


def _text(media_type: str, route: RouteSpec, types: _Types) -> Schema:
    if media_type != "text/event-stream":
        return {"schema": {"type": "string"}}
    # JSON Schema has no words for a stream, and tools disagree what `schema` would be of: the whole, or an event.
    return {} if route.events is None else {"x-event-schema": types.schema(route.events)}


def _refusal(codes: tuple[str, ...], types: _Types) -> Schema:
    """The response with one of these codes, which have one status."""
    with_codes = {"properties": {"error": {"properties": {"code": {"enum": list(codes)}}}}}
    return {
        "description": "\n".join(f"- `{code}`: {ERRORS[code][1]}" for code in codes),
        "headers": _REQUEST_ID | _more_headers(ERRORS[codes[0]][0]),
        "content": {"application/json": {"schema": {"allOf": [types.schema(ErrorBody), with_codes]}}},
    }


def _more_headers(status: int) -> Schema:
    if status == 401:
        return {"WWW-Authenticate": {"description": "Bearer", "schema": {"type": "string"}}}
    if status in (429, 503):
        return {"Retry-After": {"description": "Whole seconds after which to try again.", "schema": {"type": "string"}}}
    return {}
