"""A sequence's stream without a gang."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from motet.workers.wire.messages import SequenceUpdate


class FakeStream:
    """Yields its updates, one in each turn of the loop; without a last update it waits forever, like a hung gang."""

    def __init__(self, updates: Sequence[SequenceUpdate], hangs: bool) -> None:
        self._updates = updates
        self._hangs = hangs
        self.num_read = 0
        self.cancelled = asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[SequenceUpdate]:
        for update in self._updates:
            await asyncio.sleep(0)
            if self.cancelled.is_set():
                return
            self.num_read += 1
            yield update
        if self._hangs:
            await self.cancelled.wait()

    def cancel(self) -> None:
        self.cancelled.set()
