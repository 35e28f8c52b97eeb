"""The OpenAPI document of a router's routes, made of their specs and of the types that they name."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from .. import __version__
from .bodies.request_decoder import NEUTRAL, refused_fields
from .http.errors import ErrorBody
from .http.route import RouteSpec, route, routes_of
from .openai.request_schema import GenerationFields

# Every error that motet answers, by its code: its status, what it means, and which of them every route may give.

ERRORS: Final[Mapping[str, tuple[int, str]]] = MappingProxyType(
    {
        "invalid_value": (400, "a field has a value that is not accepted; the message names both"),
        "missing_required_parameter": (400, "a field, or a part of a form, is missing"),
        "unsupported_parameter": (400, "a field that would change the answer is not supported"),
        "invalid_json": (400, "the body is not JSON"),
        "invalid_messages": (400, "the model's chat template does not take these messages"),
        "invalid_header": (
            400,
            "bytes other than printable ASCII in a header that is read as text, or such a header twice",
        ),
        "context_length_exceeded": (400, "it is too long for the model"),
        "invalid_request": (400, "it could not fit into the pool even alone"),
        "answer_too_large": (400, "a line of a batch whose answer grew beyond 32 MiB; the other lines go on"),
        "invalid_adapter": (
            400,
            "it cannot be served; the message says what is wrong and what is accepted; nothing is stored",
        ),
        "invalid_form": (400, "the body is not such a form; the message says what is wrong with it"),
        "base_is_fixed": (400, "the weights of the base cannot be changed; adapters can"),
        "bad_http": (400, "it is not valid HTTP, or its headers have more than 31 KiB"),
        "invalid_api_key": (401, "there is no such key, or the route is the operators' and the key is not"),
        "missing_scope": (403, "the key is good, and may not do this; the message says why"),
        "tenant_suspended": (403, "the key is good, and the operators have suspended its tenant"),
        "model_not_found": (404, "there is no such model, or it is another tenant's"),
        "adapter_not_found": (404, "there is no such adapter, or it is another tenant's"),
        "version_not_found": (404, "the adapter has no such version or alias"),
        "tenant_not_found": (404, "there is no such tenant"),
        "user_not_found": (404, "there is no such user, or none who has a key or a private adapter"),
        "key_not_found": (404, "there is no such key, or it is another tenant's"),
        "file_not_found": (404, "there is no such file, or it is another tenant's or user's"),
        "batch_not_found": (404, "there is no such batch, or it is another tenant's or user's"),
        "response_not_found": (404, "no such response is stored, or it is another tenant's or user's"),
        "not_found": (404, "there is no such route"),
        "method_not_allowed": (405, "the route is not for this method"),
        "request_timeout": (408, "the headers, or the first 30 KiB of the body, took longer than 10 s"),
        "body_timeout": (
            408,
            "the body came too slowly: 10 s, and after that at least 32 KiB a second, at most 120 s",
        ),
        "upload_timeout": (
            408,
            "nothing of the upload came for a minute, or it came too slowly (64 KiB a second, and an hour in all)",
        ),
        "timeout": (408, "the request's `timeout` has passed before a token was sent"),
        "taken_over": (409, "the stream was resumed on another connection"),
        "version_refused": (409, "the adapter's versions are not so that this could be done; the message says why"),
        "tenant_exists": (409, "the name is taken"),
        "tenant_ending": (409, "the tenant's deletion was cut off and has to be repeated"),
        "file_in_use": (409, "a batch that has not ended reads the file: cancel it first"),
        "batch_ended": (409, "the batch has ended, and cannot be cancelled"),
        "too_many_keys": (409, "a tenant has at most 1,000 keys"),
        "request_too_large": (413, "the body is over the limit, or takes too long to decode"),
        "too_large": (413, "a part of the form is over its limit (`--max-upload-bytes`, 200 MiB of a file)"),
        "unsupported_encoding": (415, "the body is compressed"),
        "adapter_overflow": (422, "the adapter's weights are so large that the next token has no finite number"),
        "overloaded": (429, "the answer would come too late, or the queue is full; with `Retry-After`"),
        "bodies_full": (
            429,
            "your requests that are arriving, or everybody's, take the memory that is for them (128 MiB)",
        ),
        "rate_limit_exceeded": (429, "a quota of the tenant or of the key is used up; with `Retry-After`"),
        "insufficient_quota": (429, "more would be stored or pinned than the tenant or the key may have"),
        "uploads_full": (
            429,
            "64 uploads of yours are under way or wait for a turn, of which you have two",
        ),
        "too_many_requests": (429, "more requests of the key, or of the address, are under way than one may have"),
        "headers_too_large": (431, "the headers have more than 16 KiB together"),
        "adapter_failed": (500, "the adapter's files are damaged; upload it again"),
        "internal_error": (500, "motet's own fault; the cause is in its log"),
        "router_lost": (502, "the router that had the request is gone"),
        "no_router": (503, "no router could take the request"),
        "not_ready": (503, "no token can be served now; the message says why"),
        "gang_lost": (503, "no gang came in time, or gangs died of the request; with `Retry-After`"),
        "store_unavailable": (
            503,
            "the adapter could not be read from the data folder, at no gang and several times; with `Retry-After`",
        ),
        "registry_unavailable": (
            503,
            "Redis is away, and the router does not keep what it says of this; with `Retry-After`",
        ),
        "upload_unchecked": (
            503,
            "the upload could not be checked, because the machine is too busy; with `Retry-After`",
        ),
        "issuer_unavailable": (
            503,
            "a token of an identity provider whose keys this router has never had; with `Retry-After`",
        ),
        "ledger_full": (503, "there is no room to write down what the answer costs; with `Retry-After`"),
        "router_timeout": (504, "the router that had the request did not answer"),
        "insufficient_storage": (
            507,
            "the server's disk is too full for it; nothing is registered, and it may be sent again once there is room",
        ),
        "registry_full": (
            507,
            "the memory of Redis is full; nothing was changed, and it may be sent again once there is room",
        ),
    }
)
EVERYWHERE: Final = (
    "invalid_header",
    "bad_http",
    "request_timeout",
    "too_many_requests",
    "headers_too_large",
    "internal_error",
    "router_lost",
    "no_router",
    "router_timeout",
)
OF_NO_ROUTE: Final = ("not_found", "method_not_allowed")  # for paths and methods without a route
_WITH_OPERATORS_KEY: Final = ("invalid_api_key",)
_WITH_KEY: Final = ("invalid_api_key", "missing_scope", "tenant_suspended", "issuer_unavailable")
_WITH_QUERY: Final = ("invalid_value",)
_WITH_BODY: Final = ("invalid_json", "invalid_value", "missing_required_parameter", "body_timeout", "request_too_large")
_WITH_FORM: Final = ("invalid_form", "missing_required_parameter", "too_large", "upload_timeout")


def codes_of(route: RouteSpec) -> tuple[str, ...]:
    """The codes of all errors that the route can give, in the order of `ERRORS`. Raises KeyError for an unknown one."""
    codes = {*EVERYWHERE, *route.errors}
    if route.scope != "public":
        codes.update(_WITH_KEY if route.needs_tenant else _WITH_OPERATORS_KEY)
    for has, more in ((route.query, _WITH_QUERY), (route.body, _WITH_BODY), (route.form, _WITH_FORM)):
        codes.update(more if has else ())
    if "registry_unavailable" in route.errors and route.method != "GET" and not route.reads_body:
        codes.add("registry_full")
    if "{" in route.path:
        codes.add("not_found")  # where a name has a slash that was not sent as %2F
    if unknown := codes - ERRORS.keys():
        raise KeyError(f"{route.method} {route.path}: {sorted(unknown)} must be explained in openapi/document.py")
    return tuple(code for code in ERRORS if code in codes)


def by_status(codes: tuple[str, ...]) -> dict[int, tuple[str, ...]]:
    """Codes by status, in ascending order.

    >>> by_status(("not_found", "invalid_api_key", "adapter_not_found"))
    {401: ('invalid_api_key',), 404: ('not_found', 'adapter_not_found')}
    """
    statuses = sorted({ERRORS[code][0] for code in codes})
    return {status: tuple(code for code in codes if ERRORS[code][0] == status) for status in statuses}


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
    for spec in routes:
        operations = paths.setdefault(_PARAMETER.sub(r"{\1}", spec.path), {})
        operations[spec.method.lower()] = _operation(spec, described, shared)
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
        return next(schema for schema_type, schema in self._schemas if schema_type is kind)


def _forget_written(schema: Any) -> None:
    """Takes `msgspec.Raw` out of all unions: it stands for JSON of the other types that is written already."""
    if isinstance(schema, dict):
        if {} in schema.get("anyOf", ()):
            schema["anyOf"] = [branch for branch in schema["anyOf"] if branch]
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
    for spec in routes:
        of_route = (spec.body, spec.form, spec.events, *spec.answers.values())
        for kind in (*of_route, *spec.query.values(), *spec.headers.values()):
            if kind is not None and not any(kind is member for member in types):
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
        for media_type, description in route.texts.items():
            whole["description"] += f" As `{media_type}`: {description}"
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


# /openapi.json: what this router serves, for machines.


class OpenApi:
    """Describes all routes, itself included. The document is made once."""

    def __init__(self, routes: Sequence[RouteSpec]) -> None:
        self.all_routes = (*routes, *routes_of(self))
        self._body = msgspec.json.encode(openapi_document(self.all_routes))

    @route(
        "GET",
        "/openapi.json",
        scope="public",
        summary="Describe this API by OpenAPI 3.1.",
        answers={200: dict[str, Any]},
    )
    async def show(self, request: Request) -> Response:
        """This document."""
        return Response(self._body, media_type="application/json", headers={"Cache-Control": "max-age=300"})
