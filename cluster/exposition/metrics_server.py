"""One process's own page of metrics, on a port of its own.

It is served by the process's event loop, so a scrape also proves that the loop turns; the text is made in
a thread. Prometheus asks every few seconds, so there is a connection for each scrape and nothing is kept between them.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from prometheus_client import CONTENT_TYPE_LATEST

from ...router.operator_key import OperatorKey

NUM_PORTS: Final = 64  # that are tried: processes of one machine that share a first port
MAX_CONNECTIONS: Final = 16  # at once; more are closed
DEADLINE_S: Final = 10.0  # for a whole scrape, as long as Prometheus waits
MAX_HEAD_BYTES: Final = 16 << 10
_HEAD_END: Final = b"\r\n\r\n"

_log = logging.getLogger(__name__)


class MetricsServer:
    """Answers `GET /metrics`. Belongs to one event loop."""

    def __init__(self, page: Callable[[], Awaitable[bytes]], key: str | OperatorKey | None) -> None:
        """`page` makes the text. `key`: what a scrape must present as a bearer token; None: nothing."""
        self._page = page
        self._key = None if key is None else OperatorKey.of(key)
        self._server: asyncio.Server | None = None
        self._num_open = 0

    async def start(self, host: str, first_port: int) -> int | None:
        """Listens at the first of `NUM_PORTS` that is free, and returns it.

        None, and a line in the log, if there is none: a process without a page serves as well as others.
        """
        last_port = min(first_port + NUM_PORTS, 1 << 16)
        for port in range(first_port, last_port):
            try:
                self._server = await asyncio.start_server(self._serve, host, port, limit=MAX_HEAD_BYTES)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    continue
                _log.warning("no metrics at %s:%d: %s", host, port, error)
                return None
            return port
        _log.warning("no metrics: all ports of %s from %d to %d are in use", host, first_port, last_port - 1)
        return None

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._num_open += 1
        try:
            if self._num_open <= MAX_CONNECTIONS:
                async with asyncio.timeout(DEADLINE_S):
                    head = await reader.readuntil(_HEAD_END)
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
        if target.partition(b" ")[0].partition(b"?")[0] != b"/metrics":
            return _response("404 Not Found", b"only /metrics is here\n")
        if method != b"GET":
            return _response("405 Method Not Allowed", b"only GET is answered\n", "Allow: GET")
        if self._key is not None and not _has_key(headers, self._key.now):
            text = b"the operators' key is needed: Authorization: Bearer KEY\n"
            return _response("401 Unauthorized", text, "WWW-Authenticate: Bearer")
        try:
            return _response("200 OK", await self._page(), content_type=CONTENT_TYPE_LATEST)
        except Exception:
            _log.exception("the page of metrics could not be made")
            return _response("500 Internal Server Error", b"the cause is in the log\n")


def _has_key(headers: list[bytes], key: str) -> bool:
    return hmac.compare_digest(_authorization(headers), f"Bearer {key}".encode())


def _authorization(headers: list[bytes]) -> bytes:
    """The header's value, its scheme in the usual case; empty if there is none."""
    for header in headers:
        name, _, value = header.partition(b":")
        if name.strip().lower() == b"authorization":
            scheme, _, key = value.strip().partition(b" ")
            return scheme.capitalize() + b" " + key.strip()
    return b""


def _response(status: str, body: bytes, *headers: str, content_type: str = "text/plain; charset=utf-8") -> bytes:
    lines = (
        f"HTTP/1.1 {status}",
        f"Content-Type: {content_type}",
        f"Content-Length: {len(body)}",
        "Connection: close",
        *headers,
    )
    return "\r\n".join(lines).encode() + _HEAD_END + body
