"""A file as an answer: sent from the disk, no faster than its client reads."""

from __future__ import annotations

import asyncio
from typing import BinaryIO, Final

from starlette.types import Receive, Scope, Send

_PIECE_BYTES: Final = 256 << 10


class FileContent:
    """An `Answer` of endpoint.py. It must be called once."""

    status_code = 200

    def __init__(self, file: BinaryIO, num_bytes: int, media_type: bytes = b"application/octet-stream") -> None:
        """`file`: is closed when the answer has ended, however it ends. `num_bytes`: that are left of it."""
        self._file = file
        self.raw_headers: list[tuple[bytes, bytes]] = [
            (b"content-type", media_type),
            (b"content-length", b"%d" % num_bytes),
            (b"cache-control", b"no-store"),
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._file:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            if scope["method"] != "HEAD":
                while piece := await asyncio.to_thread(self._file.read, _PIECE_BYTES):
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
