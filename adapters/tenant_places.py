"""A bounded number of places, shared out to tenants by how long they have held some."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

HALF_LIFE_S: Final = 60.0  # of what was held
_NOTHING_S: Final = 0.001


class TenantPlaces:
    """Of `num_places` a tenant has at most `most_each`, and what else it wants to do waits behind that.

    A free place goes to the waiting tenant that has held places for the shortest time of late, so that one whose work
    takes long has no more of them than others. It keeps only tenants that are here or were lately. Belongs to one event
    loop.
    """

    def __init__(self, num_places: int, most_each: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        self._num_free, self._most_each, self._clock = num_places, most_each, clock
        self._waiting: dict[str, deque[tuple[int, asyncio.Future[None]]]] = {}  # with the number of its arrival
        self._holders: Counter[str] = Counter()  # places of each tenant that has any
        self._held: dict[str, tuple[float, float]] = {}  # seconds, as of that moment
        self._arrivals = itertools.count()
        self._tidied_at = clock()

    def num_here(self, tenant: str) -> int:
        """How many have a place or wait for one."""
        return self._holders[tenant] + len(self._waiting.get(tenant, ()))

    @asynccontextmanager
    async def of(self, tenant: str) -> AsyncIterator[None]:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append((next(self._arrivals), turn))
        self._give()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._end(tenant, 0.0)
            else:
                self._leave(tenant, turn)
            raise
        began_at = self._clock()
        try:
            yield
        finally:
            self._end(tenant, self._clock() - began_at)

    def held_s(self, tenant: str) -> float:
        """How long the tenant has held places, where what is a minute old counts half."""
        seconds, moment = self._held.get(tenant, (0.0, 0.0))
        return float(seconds * 0.5 ** ((self._clock() - moment) / HALF_LIFE_S))

    def _give(self) -> None:
        while self._num_free and (tenants := self._with_a_turn()):
            tenant = min(tenants, key=lambda one: (self.held_s(one), self._waiting[one][0][0]))
            _, turn = self._waiting[tenant].popleft()
            if not self._waiting[tenant]:
                del self._waiting[tenant]
            if not turn.done():
                turn.set_result(None)
                self._holders[tenant] += 1
                self._num_free -= 1

    def _with_a_turn(self) -> list[str]:
        return [tenant for tenant in self._waiting if self._holders[tenant] < self._most_each]

    def _end(self, tenant: str, seconds: float) -> None:
        self._held[tenant] = self.held_s(tenant) + seconds, self._clock()
        self._holders[tenant] -= 1
        if not self._holders[tenant]:
            del self._holders[tenant]
        self._num_free += 1
        if self._clock() - self._tidied_at > HALF_LIFE_S:
            self._tidied_at = self._clock()
            self._held = {one: held for one, held in self._held.items() if self.held_s(one) > _NOTHING_S}
        self._give()

    def _leave(self, tenant: str, turn: asyncio.Future[None]) -> None:
        turns = self._waiting.get(tenant, deque())
        left = deque(one for one in turns if one[1] is not turn)
        if left:
            self._waiting[tenant] = left
        else:
            self._waiting.pop(tenant, None)

    def check_integrity(self) -> None:
        """Raises AssertionError if a place could be given and is not, or a tenant is kept that waits for none."""
        assert self._num_free >= 0
        assert all(self._waiting.values())
        assert all(0 < number <= self._most_each for number in self._holders.values())
        assert not self._num_free or not self._with_a_turn()
