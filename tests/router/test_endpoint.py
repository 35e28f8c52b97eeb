"""The status with which each request of a route is counted and logged, and what a fault of ours tells."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Message

from motet.router.access.access_log import LOGGER, AccessLog
from motet.router.config import CurrentConfig
from motet.router.endpoint import Endpoint
from motet.router.metrics import Metrics
from motet.router.openai_api.errors import unavailable
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


LOG = AccessLog(CurrentConfig(router_config("base", Path())))


async def test_answers_errors_and_failures_are_counted_by_status() -> None:
    metrics = Metrics()
    for handler in (answer, refuse, fail):
        await Endpoint("GET /", handler, metrics, LOG)(dict(SCOPE), receive, send)
    assert metrics.requests == {("GET /", 200): 1, ("GET /", 503): 1, ("GET /", 500): 1}


async def test_a_fault_of_ours_is_answered_and_logged_with_the_request(caplog: pytest.LogCaptureFixture) -> None:
    sent: list[Message] = []

    async def keep(message: Message) -> None:
        sent.append(message)

    scope = {**SCOPE, "headers": [(b"x-request-id", b"mine-17")]}
    with caplog.at_level(logging.INFO):
        await Endpoint("GET /", fail, Metrics(), LOG)(scope, receive, keep)
    assert sent[0]["status"] == 500 and (b"x-request-id", b"mine-17") in sent[0]["headers"]
    fault, access = caplog.records
    assert fault.exc_info is not None and fault.exc_info[0] is RuntimeError
    assert fault.__dict__["fields"] == {"request_id": "mine-17"}
    assert access.name == LOGGER and access.__dict__["fields"]["error"] == "internal_error"


async def test_a_client_that_leaves_is_not_a_failure_of_the_server() -> None:
    """When a client disconnects, the server cancels the request."""
    metrics = Metrics()
    task = asyncio.create_task(Endpoint("GET /", hang, metrics, LOG)(dict(SCOPE), receive, send))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert metrics.requests == {("GET /", 499): 1}
