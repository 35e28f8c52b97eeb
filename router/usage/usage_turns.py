"""Which queries for usage run now: those of one caller one after the other, and few of all callers at once.

A query may read a great many sums, and holds its answer in memory until its client has it.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from typing import Final

from ..bodies.turns import Turns
from ..openai_api.errors import RETRY_AFTER_S, ApiError

MAX_OF_CALLER: Final = 8  # that run or wait; a page with several charts sends one for each
MAX_READING: Final = 4  # of all callers, that read at once


class UsageTurns:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self._queries = Turns(1)
        # Held for one month or day of a tenant, so that long queries do not block others.
        self.reading = asyncio.Semaphore(MAX_READING)

    def turn(self, caller: str) -> AbstractAsyncContextManager[None]:
        """Waits until no other query of the caller runs. Raises a 429 if too many wait already."""
        if self._queries.num_here(caller) >= MAX_OF_CALLER:
            message = f"{MAX_OF_CALLER} of your queries for usage are under way: try again when one has been answered."
            raise ApiError(429, message, code="too_many_requests", headers={"Retry-After": str(RETRY_AFTER_S)})
        return self._queries.of(caller)
