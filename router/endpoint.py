"""The handler of one route as an ASGI app, which sends errors in OpenAI's format and counts requests by status."""

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
    """A response of Starlette, or a `GenerationResponse`. `status_code` is final once the call returned."""

    status_code: int

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...


Handler = Callable[[Request], Awaitable[Answer]]


class Endpoint:
    """An ASGI app for one route. It is one so that no middleware wraps `send`, which is called for every token.

    Errors other than `ApiError` pass to the app's exception handler, which answers 500; the server logs them.
    """

    def __init__(self, route: str, handler: Handler, metrics: Metrics) -> None:
        self._route = route
        self._handler = handler
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status_code = 500  # of an error that passes through
        try:
            try:
                answer = await self._handler(Request(scope, receive))
            except ApiError as error:
                self._metrics.count_error(error)
                answer = error.response()
            await answer(scope, receive, send)
            status_code = answer.status_code
        except ClientDisconnect:
            status_code = CLIENT_CLOSED_REQUEST
        except asyncio.CancelledError:  # the server cancels the call when the client closes the connection
            status_code = CLIENT_CLOSED_REQUEST
            raise
        finally:
            self._metrics.requests[self._route, status_code] += 1
