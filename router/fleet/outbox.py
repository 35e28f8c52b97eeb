"""What a router has to tell one leader: messages that wait to be written, encoded together."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

import msgspec

from ...workers.wire.messages import Cancel, Submit
from ...workers.wire.stream_options import MAX_MESSAGE_BYTES

MAX_REQUEST_BYTES = 32 << 20  # encoded; a longer one would break the stream that all others share
FULL_MESSAGE_BYTES = 1 << 20  # a message that has grown to this size takes no more: to encode it holds the loop
assert FULL_MESSAGE_BYTES + MAX_REQUEST_BYTES < MAX_MESSAGE_BYTES


class _EncodedToLeader(msgspec.Struct, frozen=True):
    """A `ToLeader` whose messages are encoded already."""

    messages: list[msgspec.Raw]


class Outbox:
    """Messages in the order in which they were put. Belongs to one event loop."""

    def __init__(self, on_too_large: Callable[[Submit, str], None]) -> None:
        """`on_too_large` gets a request that is left out, and why."""
        self._on_too_large = on_too_large
        self._messages: deque[Submit | Cancel] = deque()
        self._is_filled = asyncio.Event()
        self._encoder = msgspec.msgpack.Encoder()

    def put(self, message: Submit | Cancel) -> None:
        self._messages.append(message)
        self._is_filled.set()

    def clear(self) -> None:
        self._messages.clear()
        self._is_filled.clear()

    async def take(self) -> bytes:
        """The messages as an encoded `ToLeader`, or as many of them as fit, as soon as there are any."""
        while True:
            await self._is_filled.wait()
            data = self._encoded()
            if data is not None:
                return data

    def _encoded(self) -> bytes | None:
        """None: no message was left that may be sent."""
        entries: list[msgspec.Raw] = []
        num_bytes = 0
        while self._messages and num_bytes < FULL_MESSAGE_BYTES:
            message = self._messages.popleft()
            entry = self._encoder.encode(message)
            if len(entry) > MAX_REQUEST_BYTES:
                assert isinstance(message, Submit)  # the others are a few bytes
                problem = f"the request takes {len(entry)} bytes on its way to the workers"
                self._on_too_large(message, f"{problem}: at most {MAX_REQUEST_BYTES} are accepted")
                continue
            entries.append(msgspec.Raw(entry))
            num_bytes += len(entry)
        if not self._messages:
            self._is_filled.clear()
        return self._encoder.encode(_EncodedToLeader(entries)) if entries else None
