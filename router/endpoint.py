"""One route's handler as an ASGI app: its answer, its errors in OpenAI's shape, its count."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from .answers.generation_response import CLIENT_CLOSED_REQUEST
from .metrics import Metrics
from .openai_api.errors import ApiError


class Answer(Protocol):
    """A response of Starlette's, or one of ours."""

    status_code: int

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...


Handler = Callable[[Request], Awaitable[Answer]]


class Endpoint:
    """Handed to a route as it is, so that nothing wraps the `send` that every token passes.

    Errors that are no `ApiError` go on to the app's last handler, which answers 500 and lets the server log them.
    """

    def __init__(self, route: str, handler: Handler, metrics: Metrics) -> None:
        self._route = route
        self._handler = handler
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status_code = 500  # unless something better comes of it
        try:
            try:
                answer = await self._handler(Request(scope, receive))
            except ApiError as error:
                answer = error.response()
            await answer(scope, receive, send)
            status_code = answer.status_code
        except ClientDisconnect:
            status_code = CLIENT_CLOSED_REQUEST
        except asyncio.CancelledError:  # the server's way to say that the client has gone
            status_code = CLIENT_CLOSED_REQUEST
            raise
        finally:
            self._metrics.requests[self._route, status_code] += 1
