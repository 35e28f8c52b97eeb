"""Answers `GET /metrics` on a listening socket.

Prometheus scrapes every few seconds, so each scrape has its own connection, and no state is kept between them.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Final

from prometheus_client import CONTENT_TYPE_LATEST

MAX_CONNECTIONS: Final = 16
DEADLINE_S: Final = 10.0  # for a whole scrape, as long as Prometheus waits
MAX_HEAD_BYTES: Final = 16 << 10
METRICS: Final = b"/metrics"
HEAD_END: Final = b"\r\n\r\n"

_log = logging.getLogger(__name__)


class MetricsServer:
    """Belongs to one event loop."""

    def __init__(
        self, page: Callable[[bytes], Awaitable[bytes | None]], *, max_connections: int = MAX_CONNECTIONS
    ) -> None:
        """`page` returns the text for a bearer token (empty: none was sent); None: the token is not accepted.

        Connections beyond `max_connections` at once are closed.
        """
        self._page, self._max_connections = page, max_connections
        self._server: asyncio.Server | None = None
        self._num_open = 0

    async def start(self, listener: socket.socket) -> None:
        """`listener` is closed with the server."""
        if listener.family == socket.AF_UNIX:
            self._server = await asyncio.start_unix_server(self._serve, sock=listener, limit=MAX_HEAD_BYTES)
        else:
            self._server = await asyncio.start_server(self._serve, sock=listener, limit=MAX_HEAD_BYTES)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._num_open += 1
        try:
            if self._num_open <= self._max_connections:
                async with asyncio.timeout(DEADLINE_S):
                    head = await reader.readuntil(HEAD_END)
                    writer.write(await self._answer(head))
                    await writer.drain()
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError):
            pass  # the client is gone
        finally:
            self._num_open -= 1
            writer.close()

    async def _answer(self, head: bytes) -> bytes:
        request, *headers = head.split(b"\r\n")
        method, _, target = request.partition(b" ")
        if target.partition(b" ")[0].partition(b"?")[0] != METRICS:
            return _response("404 Not Found", b"only /metrics is here\n")
        if method != b"GET":
            return _response("405 Method Not Allowed", b"only GET is answered\n", "Allow: GET")
        try:
            text = await self._page(_bearer(headers))
        except Exception:
            _log.exception("the page of metrics could not be rendered")
            return _response("500 Internal Server Error", b"the cause is in the log\n")
        if text is None:
            refusal = b"the operators' key is needed: Authorization: Bearer KEY\n"
            return _response("401 Unauthorized", refusal, "WWW-Authenticate: Bearer")
        return _response("200 OK", text, content_type=CONTENT_TYPE_LATEST)


def _bearer(headers: list[bytes]) -> bytes:
    """The token in the header; empty if there is none."""
    for header in headers:
        name, _, value = header.partition(b":")
        if name.strip().lower() == b"authorization":
            scheme, _, key = value.strip().partition(b" ")
            return key.strip() if scheme.lower() == b"bearer" else b""
    return b""


def _response(status: str, body: bytes, *headers: str, content_type: str = "text/plain; charset=utf-8") -> bytes:
    lines = (
        f"HTTP/1.1 {status}",
        f"Content-Type: {content_type}",
        f"Content-Length: {len(body)}",
        "Connection: close",
        *headers,
    )
    return "\r\n".join(lines).encode() + HEAD_END + body
