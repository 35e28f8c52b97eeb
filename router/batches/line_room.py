"""Room for the answers of batches' lines in a router's memory: a line begins when its whole answer has room.

An answer is held whole until it is written, so what it may take at most is reserved before it is generated, and given
back when its result is on the disk. Nothing that has room waits for more, so lines always end.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Final

from starlette.types import Scope

TOTAL_BYTES: Final = 64 << 20  # of all lines of a router, as text that is sent; in memory about twice as much
MAX_LINE_BYTES: Final = TOTAL_BYTES // 2  # of one answer: a longer one fails
_ROOM: Final = "motet.line_room"  # in a line's scope, which no client makes


class LineRoom:
    """Belongs to one event loop."""

    def __init__(self, total_bytes: int = TOTAL_BYTES, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        self.total_bytes, self.max_line_bytes = total_bytes, max_line_bytes
        self._num_bytes: Counter[str] = Counter()  # reserved, by tenant
        self._waiting: dict[asyncio.Future[None], tuple[str, int]] = {}  # tenant and bytes; in the order of arrival

    @property
    def num_bytes(self) -> int:
        """Bytes that are reserved."""
        return self._num_bytes.total()

    async def reserve(self, tenant: str, num_bytes: int) -> int:
        """Waits for room. Returns what is reserved: no more than an answer may have."""
        num_bytes = min(num_bytes, self.max_line_bytes)
        turn = asyncio.get_running_loop().create_future()
        self._waiting[turn] = tenant, num_bytes
        self._let_in()
        try:
            await turn
        except asyncio.CancelledError:
            self._waiting.pop(turn, None)
            if turn.done() and not turn.cancelled():
                self.give_back(tenant, num_bytes)
            raise
        return num_bytes

    def give_back(self, tenant: str, num_bytes: int) -> None:
        self._num_bytes[tenant] -= num_bytes
        if not self._num_bytes[tenant]:
            del self._num_bytes[tenant]
        self._let_in()

    def _let_in(self) -> None:
        """The tenant that has least goes first."""
        while self._waiting:
            turn = min(self._waiting, key=lambda turn: self._num_bytes[self._waiting[turn][0]])
            tenant, num_bytes = self._waiting[turn]
            if self.num_bytes + num_bytes > self.total_bytes:
                return
            del self._waiting[turn]
            if not turn.done():
                self._num_bytes[tenant] += num_bytes
                turn.set_result(None)


class ReservedRoom:
    """What one line has of a router's room."""

    def __init__(self, room: LineRoom, tenant: str) -> None:
        self._room, self._tenant, self._num_bytes = room, tenant, 0

    @property
    def max_answer_bytes(self) -> int:
        return self._room.max_line_bytes

    async def reserve(self, num_bytes: int) -> None:
        """Waits for room for an answer of at most so many bytes."""
        self._num_bytes += await self._room.reserve(self._tenant, num_bytes)

    def give_back(self) -> None:
        """The answer is written, or is not needed. No-op when it was called before."""
        num_bytes, self._num_bytes = self._num_bytes, 0
        if num_bytes:
            self._room.give_back(self._tenant, num_bytes)


def with_room(room: ReservedRoom) -> Scope:
    """What a line's scope has for `room_of`."""
    return {_ROOM: room}


def room_of(scope: Scope) -> ReservedRoom | None:
    """The room of a batch's line; None: the request is none."""
    room: ReservedRoom | None = scope.get(_ROOM)
    return room
