"""Whose question for usage is answered now: each asker's one after the other, and few of them at once.

A question may read a great many sums, and holds its answer in memory until its client has it.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from ..openai_api.errors import RETRY_AFTER_S, ApiError

MAX_ASKED: Final = 8  # of one asker, that which is answered included: a page with several charts asks for all at once
MAX_ANSWERED: Final = 4  # of all, that read at once


class UsageTurns:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self._num_asked: Counter[str] = Counter()
        self._own: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._reading = asyncio.Semaphore(MAX_ANSWERED)

    @asynccontextmanager
    async def turn(self, asker: str) -> AsyncIterator[None]:
        """Waits until no other question of the asker is being answered. Raises a 429 if too many wait already."""
        if self._num_asked[asker] >= MAX_ASKED:
            message = f"{MAX_ASKED} questions of yours for usage wait for their answers: ask again when one has come."
            raise ApiError(429, message, code="too_many_requests", headers={"Retry-After": str(RETRY_AFTER_S)})
        self._num_asked[asker] += 1
        try:
            async with self._own[asker]:
                yield
        finally:
            self._num_asked[asker] -= 1
            if not self._num_asked[asker]:
                del self._num_asked[asker], self._own[asker]

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[None]:
        """Waits until few others read. For a month or a day of a tenant at most: a long question lets others in."""
        async with self._reading:
            yield
