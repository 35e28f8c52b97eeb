"""The status with which each request of a route is counted."""

from __future__ import annotations

import asyncio

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Message

from motet.router.endpoint import Endpoint
from motet.router.metrics import Metrics
from motet.router.openai_api.errors import unavailable

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


async def test_answers_errors_and_failures_are_counted_by_status() -> None:
    metrics = Metrics()
    for handler in (answer, refuse):
        await Endpoint("GET /", handler, metrics)(SCOPE, receive, send)
    with pytest.raises(RuntimeError, match="boom"):
        await Endpoint("GET /", fail, metrics)(SCOPE, receive, send)
    assert metrics.requests == {("GET /", 200): 1, ("GET /", 503): 1, ("GET /", 500): 1}


async def test_a_client_that_leaves_is_not_a_failure_of_the_server() -> None:
    """When a client disconnects, the server cancels the request."""
    metrics = Metrics()
    task = asyncio.create_task(Endpoint("GET /", hang, metrics)(SCOPE, receive, send))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert metrics.requests == {("GET /", 499): 1}
