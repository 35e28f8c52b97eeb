"""Keeps a huge request body out of memory."""

from __future__ import annotations

from typing import Any

from ray.serve._private.direct_ingress_http_util import ASGIDIReceiveProxy
from starlette.types import ASGIApp, Receive, Scope, Send

MAX_MESSAGES = 4  # of a body, read and not yet consumed; each holds some 64 KiB to 256 KiB


class BoundedReceive:
    """ASGI middleware: reads a request no faster than the app consumes it.

    To notice a client that leaves, a Serve replica reads every request ahead into a queue without a limit: an upload
    that arrives faster than the disk takes it would fill the memory. This gives the queue a limit; a full queue makes
    the replica stop reading, and TCP then slows the client down.

    A request that comes through Serve's fallback proxy, as some do while routers come and go, has another queue, which
    gets no limit: the code that fills it does not wait, and at a limit would lose the rest of the body.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if isinstance(receive, ASGIDIReceiveProxy):
            queue: Any = receive.queue
            queue._maxsize = MAX_MESSAGES  # asyncio.Queue has no public way to set it after construction
        await self._app(scope, receive, send)
