"""A router's messages to one leader that wait to be written, encoded together."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

import msgspec

from ...workers.wire.messages import Submit, SubmitPart, ToLeaderMessage
from ...workers.wire.stream_options import MAX_MESSAGE_BYTES, MAX_REQUEST_BYTES

FULL_MESSAGE_BYTES = 1 << 20  # a message that has grown to this size takes no more requests
PART_BYTES = 1 << 20  # of a request that is longer, in a message
assert FULL_MESSAGE_BYTES + 2 * PART_BYTES < MAX_MESSAGE_BYTES


class _EncodedToLeader(msgspec.Struct, frozen=True):
    """A `ToLeader` whose messages are encoded already."""

    messages: list[msgspec.Raw]


class Outbox:
    """Messages in the order in which they were put. Belongs to one event loop."""

    def __init__(self, on_too_large: Callable[[Submit, str], None]) -> None:
        """`on_too_large` gets a request that is not sent, and why."""
        self._on_too_large = on_too_large
        self._messages: deque[ToLeaderMessage] = deque()
        self._encoded_parts: deque[bytes] = deque()  # of the message that was the first
        self._is_filled = asyncio.Event()
        self._encoder = msgspec.msgpack.Encoder()

    def put(self, message: ToLeaderMessage) -> None:
        self._messages.append(message)
        self._is_filled.set()

    def clear(self) -> None:
        self._messages.clear()
        self._encoded_parts.clear()
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
        while num_bytes < FULL_MESSAGE_BYTES and (self._encoded_parts or self._messages):
            if not self._encoded_parts:
                self._encode(self._messages.popleft())
                continue
            entry = self._encoded_parts.popleft()
            entries.append(msgspec.Raw(entry))
            num_bytes += len(entry)
        if not self._messages and not self._encoded_parts:
            self._is_filled.clear()
        return self._encoder.encode(_EncodedToLeader(entries)) if entries else None

    def _encode(self, message: ToLeaderMessage) -> None:
        """Fills the parts, unless the message may not be sent."""
        entry = self._encoder.encode(message)
        if len(entry) <= PART_BYTES or not isinstance(message, Submit):
            self._encoded_parts.append(entry)
            return
        if len(entry) > MAX_REQUEST_BYTES:
            problem = f"the request takes {len(entry)} bytes on its way to the workers"
            self._on_too_large(message, f"{problem}: at most {MAX_REQUEST_BYTES} are accepted")
            return
        for start in range(0, len(entry), PART_BYTES):
            end = start + PART_BYTES
            part = SubmitPart(message.request.sequence_id, entry[start:end], is_last=end >= len(entry))
            self._encoded_parts.append(self._encoder.encode(part))
