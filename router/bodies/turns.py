"""A bounded number of turns at once for each tenant."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turns:
    """Lets at most `most` of each tenant inside at once; others wait in the order of their arrival.

    It keeps only tenants that have a turn or wait for one. Belongs to one event loop.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._places: dict[str, asyncio.Semaphore] = {}
        self._num_here: Counter[str] = Counter()

    def num_here(self, tenant: str) -> int:
        """How many have a turn or wait for one."""
        return self._num_here[tenant]

    @asynccontextmanager
    async def of(self, tenant: str) -> AsyncIterator[None]:
        places = self._places.setdefault(tenant, asyncio.Semaphore(self._most))
        self._num_here[tenant] += 1
        try:
            async with places:
                yield
        finally:
            self._num_here[tenant] -= 1
            if not self._num_here[tenant]:
                del self._num_here[tenant], self._places[tenant]

    def check_integrity(self) -> None:
        """Raises AssertionError if a tenant is kept that has no turn and waits for none."""
        assert self._places.keys() == self._num_here.keys()
        assert all(number > 0 for number in self._num_here.values())
