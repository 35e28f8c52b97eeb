"""The document of /openapi.json: it is OpenAPI, and has of every route all that its spec must say."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from motet.router.http.auth import Identity
from motet.router.http.route import RouteSpec
from motet.router.openapi_document import ERRORS, codes_of, openapi_document, operation_id
from motet.router.text.text import TextService
from motet.tests.rigs.all_routes import rig_with_all_routes
from motet.tests.rigs.router_rig import BASE, RouterRig, text_service

TAKES_A_BODY = ("POST", "PUT", "PATCH")


@pytest.fixture(scope="module")
def text() -> TextService:
    return text_service()


@pytest.fixture
def rig(tmp_path: Path, text: TextService) -> RouterRig:
    return rig_with_all_routes(tmp_path, text)


@pytest.fixture
def routes(rig: RouterRig) -> tuple[RouteSpec, ...]:
    return tuple(rig.app.state.routes)


def problems(route: RouteSpec) -> list[str]:
    """What its spec does not say."""
    found = []
    if not (route.summary.endswith((".", "?")) and 3 <= len(route.summary) <= 80):
        found.append("summary: a short sentence about what it is for")
    if route.path.startswith("/v1/admin/") != (route.scope == "operator" and route.path.startswith("/v1/")):
        found.append("scope: paths under /v1/admin/, and no others under /v1/, are for the operators")
    if route.path.startswith("/v1/") and route.scope == "public":
        found.append("scope: what a key needs for it")
    if not route.answers and not route.texts:
        found.append("answers (or texts): what it gives")
    if any(not 200 <= status < 300 for status in route.answers):
        found.append("answers: errors are named in `errors`, by their codes")
    if any(kind is None and status != 204 for status, kind in route.answers.items()):
        found.append("answers: the types of all but 204")
    if route.body is not None and (route.method not in TAKES_A_BODY or route.form is not None):
        found.append(f"body: a {route.method} has none, or it has a form")
    return found


def test_every_route_is_described(routes: tuple[RouteSpec, ...]) -> None:
    wrong = {f"{route.method} {route.path}": found for route in routes if (found := problems(route))}
    assert wrong == {}
    ids = [operation_id(route) for route in routes]
    assert sorted(ids) == sorted(set(ids))


def test_every_handler_takes_what_its_row_says(routes: tuple[RouteSpec, ...]) -> None:
    for route in routes:
        hints = get_type_hints(route.handler)
        expected: list[Any] = [Request]
        if route.needs_tenant:
            expected.append(Identity)
        if route.body is not None and not route.reads_body:
            expected.append(route.body)
        assert [hints[name] for name in inspect.signature(route.handler).parameters] == expected, route.path
        if issubclass(hints["return"], msgspec.Struct):
            assert hints["return"] == next(iter(route.answers.values())), route.path


def test_a_route_that_is_not_described_is_found() -> None:
    async def handler(request: Request) -> Response:
        return PlainTextResponse("")

    bare = RouteSpec(method="GET", path="/v1/admin/x", handler=handler, scope="admin")
    assert [problem.split(":")[0] for problem in problems(bare)] == ["summary", "scope", "answers (or texts)"]
    unseen = RouteSpec(method="GET", path="/v1/admin/x", handler=handler, scope="public", errors=("unheard_of",))
    with pytest.raises(KeyError, match=r"GET /v1/admin/x: .*'unheard_of'.*document.py"):
        openapi_document([unseen])


def test_the_app_serves_what_is_described_and_nothing_else(rig: RouterRig, routes: tuple[RouteSpec, ...]) -> None:
    served = [(sorted(route.methods - {"HEAD"}), route.path) for route in rig.app.router.routes]  # type: ignore[attr-defined]
    assert served == [([route.method], route.path) for route in routes]


async def test_it_is_public_and_valid(rig: RouterRig, routes: tuple[RouteSpec, ...]) -> None:
    async with rig.client() as client:
        answer = await client.get("/openapi.json", headers={"Authorization": ""})
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    document = answer.json()
    OpenAPIV31SpecValidator(document).validate()
    reported = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert reported == {(route.method, route.path.replace(":path", "")) for route in routes}


def test_each_operation_has_scope_errors_and_bodies(routes: tuple[RouteSpec, ...]) -> None:
    document = json.loads(json.dumps(openapi_document(routes)))
    for route in routes:
        operation = document["paths"][route.path.replace(":path", "")][route.method.lower()]
        assert ("requestBody" in operation) == (route.body is not None or route.form is not None)
        assert operation.get("security", []) == ([] if route.scope == "public" else [{"bearer": [route.scope]}])
        reported = {status: resolved(document, response) for status, response in operation["responses"].items()}
        assert {int(status) for status in reported} == {
            *route.answers,
            *([200] if route.texts else []),
            *(ERRORS[code][0] for code in codes_of(route)),
        }
        for code in codes_of(route):
            response = reported[str(ERRORS[code][0])]
            assert f"- `{code}`: " in response["description"]
            assert "x-request-id" in response["headers"]
    assert {"invalid_api_key", "missing_scope"} <= {*codes_of(route_of(routes, "POST", "/v1/adapters"))}
    chat = document["paths"]["/v1/chat/completions"]["post"]["responses"]["200"]["content"]
    assert {*chat} == {"application/json", "text/event-stream"}
    assert chat["text/event-stream"]["x-event-schema"] == {"$ref": "#/components/schemas/ChatChunk"}


def test_names_of_schemas_are_names_of_one_class_each(routes: tuple[RouteSpec, ...]) -> None:
    """Of classes with the same name the module would be shown, too."""
    names = openapi_document(routes)["components"]["schemas"]
    assert not [name for name in names if "." in name]


async def test_an_upload_is_a_form_with_files(routes: tuple[RouteSpec, ...]) -> None:
    document = openapi_document(routes)
    content = document["paths"]["/v1/adapters"]["post"]["requestBody"]["content"]
    form = resolved(document, content["multipart/form-data"]["schema"])
    assert form["required"] == ["name", "adapter_config.json", "adapter_model.safetensors"]
    assert form["properties"]["adapter_model.safetensors"]["contentMediaType"] == "application/octet-stream"


async def test_what_is_refused_unless_neutral_is_described_so(rig: RouterRig, routes: tuple[RouteSpec, ...]) -> None:
    """Each value that the document has for such a field is accepted, and others are not."""
    fields = openapi_document(routes)["components"]["schemas"]["CompletionRequest"]["properties"]
    rig.dispatcher.answer = rig.ids("hi")
    async with rig.client() as client:
        for field in ("suffix", "early_stopping", "prompt_embeds"):
            for value in fields[field]["enum"]:
                body = {"model": BASE, "prompt": "hi", "max_tokens": 1, field: value}
                assert (await client.post("/v1/completions", json=body)).status_code == 200
        body = {"model": BASE, "prompt": "hi", "early_stopping": True}
        assert (await client.post("/v1/completions", json=body)).status_code == 400
    assert fields["early_stopping"]["enum"] == [None, False, "never"]


def resolved(document: dict[str, Any], node: dict[str, Any]) -> dict[str, Any]:
    if "$ref" not in node:
        return node
    found: Any = document
    for word in node["$ref"].removeprefix("#/").split("/"):
        found = found[word]
    assert isinstance(found, dict)
    return found


def route_of(routes: tuple[RouteSpec, ...], method: str, path: str) -> RouteSpec:
    return next(route for route in routes if (route.method, route.path) == (method, path))
