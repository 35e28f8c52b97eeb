"""A bounded number of places, shared out to tenants by how long they hold them."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass


@dataclass
class Place:
    rest_s: float = 0.0  # for which its tenant gets no other place afterwards: set by the holder


class TenantPlaces:
    """Gives a tenant at most `most_each` of `num_places`; its further requests wait.

    A free place goes to the waiting tenant that has held places for the shortest time, so a tenant with long work gets
    no more time than others (start-time fair queueing, Goyal et al., 1996). Places held while no other tenant waited do
    not count. Only tenants that are here, or were lately, are kept. Belongs to one event loop.
    """

    def __init__(self, num_places: int, most_each: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        self._num_free, self._most_each, self._clock = num_places, most_each, clock
        self._waiting: dict[str, deque[tuple[int, asyncio.Future[float]]]] = {}  # with the number of its arrival
        self._holders: Counter[str] = Counter()  # places of each tenant that has any, or rests after them
        self._arrivals = itertools.count()
        self._begun_s = 0.0  # virtual time: of the newest place that was given
        self._ended_s: dict[str, float] = {}  # until when a tenant has held places, where that is later

    def num_here(self, tenant: str) -> int:
        """How many have a place, rest after it, or wait for one."""
        return self._holders[tenant] + len(self._waiting.get(tenant, ()))

    @asynccontextmanager
    async def of(self, tenant: str) -> AsyncIterator[Place]:
        turn: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append((next(self._arrivals), turn))
        self._give()
        try:
            begun_s = await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._end(tenant, turn.result(), 0.0, 0.0)
            else:
                self._leave(tenant, turn)
            raise
        began_at, place = self._clock(), Place()
        try:
            yield place
        finally:
            self._end(tenant, begun_s, self._clock() - began_at, place.rest_s)

    def _begins_s(self, tenant: str) -> float:
        """When the tenant's next place begins, in virtual time."""
        return max(self._begun_s, self._ended_s.get(tenant, 0.0))

    def _give(self) -> None:
        while self._num_free and (tenants := self._with_a_turn()):
            tenant = min(tenants, key=lambda candidate: (self._begins_s(candidate), self._waiting[candidate][0][0]))
            _, turn = self._waiting[tenant].popleft()
            if not self._waiting[tenant]:
                del self._waiting[tenant]
            if not turn.done():
                self._begun_s = self._begins_s(tenant)
                turn.set_result(self._begun_s)
                self._holders[tenant] += 1
                self._num_free -= 1

    def _with_a_turn(self) -> list[str]:
        return [tenant for tenant in self._waiting if self._holders[tenant] < self._most_each]

    def _end(self, tenant: str, begun_s: float, held_s: float, rest_s: float) -> None:
        # What it held at the same time adds up.
        self._ended_s[tenant] = max(begun_s, self._ended_s.get(tenant, 0.0)) + held_s
        self._ended_s = {name: ended_s for name, ended_s in self._ended_s.items() if ended_s > self._begun_s}
        self._num_free += 1
        if rest_s > 0:
            asyncio.get_running_loop().call_later(rest_s, self._end_rest, tenant)
            self._give()
        else:
            self._end_rest(tenant)

    def _end_rest(self, tenant: str) -> None:
        """It may have one more place from now on."""
        self._holders[tenant] -= 1
        if not self._holders[tenant]:
            del self._holders[tenant]
        self._give()

    def _leave(self, tenant: str, turn: asyncio.Future[float]) -> None:
        turns = self._waiting.get(tenant, deque())
        remaining_turns = deque(entry for entry in turns if entry[1] is not turn)
        if remaining_turns:
            self._waiting[tenant] = remaining_turns
        else:
            self._waiting.pop(tenant, None)

    def check_integrity(self) -> None:
        """Raises AssertionError if a place could be given and is not, or a tenant is kept without a need."""
        assert self._num_free >= 0
        assert all(self._waiting.values())
        assert all(0 < number <= self._most_each for number in self._holders.values())
        assert not self._num_free or not self._with_a_turn()
