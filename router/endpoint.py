"""The handler of one route as an ASGI app: it sends errors in OpenAI's format, counts requests by status and has each
one's line written in the access log.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .access.access_log import AccessLog
from .access.request_record import RequestRecord, begin_record
from .answers.generation_response import CLIENT_CLOSED_REQUEST
from .metrics import Metrics
from .openai_api.errors import ApiError, internal_error

_log = logging.getLogger(__name__)


class Answer(Protocol):
    """A response of Starlette, or a `GenerationResponse`. `status_code` is final once the call returned."""

    status_code: int
    raw_headers: list[tuple[bytes, bytes]]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...


Handler = Callable[[Request], Awaitable[Answer]]


class Endpoint:
    """An ASGI app for one route. It is one so that no middleware wraps `send`, which is called for every token.

    Errors of a handler other than `ApiError` are answered with 500 and logged here: where the server's own log would
    quote the error, which may quote the request.
    """

    def __init__(self, route: str, handler: Handler, metrics: Metrics, access_log: AccessLog) -> None:
        self._route = route
        self._handler = handler
        self._metrics = metrics
        self._access_log = access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status_code = 500  # of an error that passes through
        record = begin_record(scope, self._route)
        answer: Answer | None = None
        try:
            answer = await self._answer(Request(scope, receive), record)
            answer.raw_headers += record.headers_besides(answer.raw_headers)
            await answer(scope, receive, send)
            status_code = answer.status_code
            if isinstance(answer, Response):
                record.num_sent_bytes = len(answer.body)
        except ClientDisconnect:
            status_code, record.is_cancelled = CLIENT_CLOSED_REQUEST, True
        except asyncio.CancelledError:  # the server cancels the call when the client closes the connection
            status_code, record.is_cancelled = CLIENT_CLOSED_REQUEST, True
            raise
        finally:
            self._metrics.requests[self._route, status_code] += 1
            self._access_log.write(record, status_code)

    async def _answer(self, request: Request, record: RequestRecord) -> Answer:
        try:
            return await self._handler(request)
        except ApiError as error:
            refusal = error
        except ClientDisconnect:
            raise
        except Exception:
            _log.exception("a request failed", extra=record.tags)
            refusal = internal_error()
        self._metrics.count_error(refusal)
        record.error = refusal.detail.code or ""
        return refusal.response()
