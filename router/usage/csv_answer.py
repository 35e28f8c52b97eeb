"""A long CSV as an answer: streamed, no faster than its client reads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Final

from starlette.types import Receive, Scope, Send

LONGEST_S: Final = 300.0  # after which a client that reads too slowly is cut off: what the answer is made of is held


class CsvAnswer:
    """An `Answer` of endpoint.py. It must be called once."""

    status_code = 200

    def __init__(self, parts: AsyncIterator[bytes], held: AsyncExitStack) -> None:
        """`held`: is closed when the answer has ended, however it ends."""
        self._parts, self._held = parts, held
        self.raw_headers: list[tuple[bytes, bytes]] = [(b"content-type", b"text/csv; charset=utf-8")]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._held:
            try:
                async with asyncio.timeout(LONGEST_S):
                    await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                    async for part in self._parts:
                        await send({"type": "http.response.body", "body": part, "more_body": True})
                    await send({"type": "http.response.body", "body": b""})
            except TimeoutError:
                pass  # the server closes the connection of an answer that has not ended: no client takes it for whole
