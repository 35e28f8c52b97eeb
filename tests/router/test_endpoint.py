"""An endpoint authenticates before it reads or calls anything, counts and logs each request, and reports our faults."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Message

from motet.adapters.errors import RegistryUnavailable
from motet.router.config import CurrentConfig
from motet.router.endpoint import Cors, Endpoint, RegistryOutages
from motet.router.http.access_log import LOGGER, AccessLog
from motet.router.http.auth import Authenticator
from motet.router.http.errors import unavailable, unknown_key
from motet.router.http.route import Handler, NeededScope, RouteSpec, route, routes_of
from motet.router.metrics import Metrics
from motet.tests.rigs.part_configs import router_config

SCOPE = {"type": "http", "method": "GET", "path": "/", "headers": []}


async def receive() -> Message:
    await asyncio.Event().wait()
    raise AssertionError


async def send(message: Message) -> None:
    pass


async def hang(request: Request) -> Response:
    await asyncio.Event().wait()
    raise AssertionError


async def answer(request: Request) -> Response:
    return PlainTextResponse("ok")


async def refuse(request: Request) -> Response:
    raise unavailable("Not now.", "not_ready")


async def fail(request: Request) -> Response:
    raise RuntimeError("boom")


class StrictAuthenticator:
    """Refuses every request, and records the scopes that were required."""

    def __init__(self) -> None:
        self.requested: list[str] = []

    def identify(self, request: Request, scope: str) -> None:
        self.requested.append(scope)
        raise unknown_key()

    def check_operator(self, request: Request) -> None:
        self.identify(request, "operator")


class Body(msgspec.Struct, frozen=True):
    size: int


async def takes_body(request: Request, body: Body) -> Body:
    return Body(body.size + 1)


CONFIG = CurrentConfig(router_config("base", Path()))
LOG = AccessLog(CONFIG)


def endpoint(
    handler: Handler,
    metrics: Metrics,
    *,
    scope: NeededScope = "public",
    authenticator: StrictAuthenticator | None = None,
    **row: Any,
) -> Endpoint:
    spec = RouteSpec(method="GET", path="/", handler=handler, scope=scope, **row)
    return Endpoint(
        spec,
        cast(Authenticator, authenticator or StrictAuthenticator()),
        metrics,
        LOG,
        Cors(CONFIG),
        RegistryOutages(lambda: False),
    )


async def test_answers_errors_and_failures_are_counted_by_status() -> None:
    metrics = Metrics()
    for handler in (answer, refuse, fail):
        await endpoint(handler, metrics)(dict(SCOPE), receive, send)
    assert metrics.requests == {("GET /", 200): 1, ("GET /", 503): 1, ("GET /", 500): 1}


async def test_a_fault_of_ours_is_answered_and_logged_with_the_request(caplog: pytest.LogCaptureFixture) -> None:
    sent: list[Message] = []

    async def keep(message: Message) -> None:
        sent.append(message)

    scope = {**SCOPE, "headers": [(b"x-request-id", b"mine-17")]}
    with caplog.at_level(logging.INFO):
        await endpoint(fail, Metrics())(scope, receive, keep)
    assert sent[0]["status"] == 500 and (b"x-request-id", b"mine-17") in sent[0]["headers"]
    fault, access = caplog.records
    assert fault.exc_info is not None and fault.exc_info[0] is RuntimeError
    assert fault.__dict__["fields"] == {"request_id": "mine-17"}
    assert access.name == LOGGER and access.__dict__["fields"]["error"] == "internal_error"


async def test_a_client_that_leaves_is_not_a_failure_of_the_server() -> None:
    """When a client disconnects, the server cancels the request."""
    metrics = Metrics()
    task = asyncio.create_task(endpoint(hang, metrics)(dict(SCOPE), receive, send))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert metrics.requests == {("GET /", 499): 1}


@pytest.mark.parametrize("scope", ["infer", "upload", "metrics", "admin", "operator"])
async def test_no_handler_runs_and_no_byte_is_read_without_the_rows_scope(scope: NeededScope) -> None:
    async def handler(*arguments: object) -> Response:
        raise AssertionError

    async def no_receive() -> Message:
        raise AssertionError

    metrics, authenticator = Metrics(), StrictAuthenticator()
    app = endpoint(handler, metrics, scope=scope, authenticator=authenticator, body=Body)
    await app(dict(SCOPE), no_receive, send)
    assert authenticator.requested == [scope]
    assert metrics.requests == {("GET /", 401): 1}


def test_a_row_without_a_scope_is_no_route() -> None:
    with pytest.raises(TypeError, match="scope"):
        RouteSpec(method="GET", path="/", handler=answer)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="scope"):
        route("GET", "/")  # type: ignore[call-arg]


async def test_a_handler_gets_the_decoded_body_and_its_struct_is_sent_with_the_rows_status() -> None:
    sent: list[Message] = []

    async def body() -> Message:
        return {"type": "http.request", "body": b'{"size": 2}', "more_body": False}

    async def keep(message: Message) -> None:
        sent.append(message)

    app = endpoint(takes_body, Metrics(), body=Body, answers={201: Body}, no_store=True)
    await app(dict(SCOPE), body, keep)
    assert sent[0]["status"] == 201
    assert {(b"cache-control", b"no-store"), (b"content-type", b"application/json")} <= {*sent[0]["headers"]}
    assert sent[1]["body"] == b'{"size":3}'


async def test_errors_of_the_registry_are_the_clients_to_know_and_others_are_ours() -> None:
    async def away(request: Request) -> Response:
        raise RegistryUnavailable("the registry cannot be reached: try again")

    metrics = Metrics()
    await endpoint(away, metrics)(dict(SCOPE), receive, send)
    assert metrics.requests == {("GET /", 503): 1}


def test_routes_are_found_in_order_and_bound() -> None:
    class Api:
        @route("GET", "/b", scope="public")
        @route("GET", "/b/", scope="infer")
        async def second(self, request: Request) -> Response:
            raise AssertionError

        @route("POST", "/a", scope="operator")
        async def first(self, request: Request) -> Response:
            raise AssertionError

    api = Api()
    assert [(spec.method, spec.path, spec.scope, spec.handler) for spec in routes_of(api)] == [
        ("GET", "/b", "public", api.second),
        ("GET", "/b/", "infer", api.second),
        ("POST", "/a", "operator", api.first),
    ]
