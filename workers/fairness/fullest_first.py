"""Which tenant has most of something, without a look at all of them."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush, heapreplace
from typing import Final

_SPARE_ENTRIES: Final = 64


class FullestFirst:
    """A heap with outdated entries: who gets fuller is entered anew, who gets less full sinks once it is at the top.

    So a change costs the logarithm of the tenants, and a look no more than a step for each change before it.
    """

    def __init__(self, filled_of: Callable[[str], float]) -> None:
        """`filled_of`: how much a tenant has now; 0: it does not count."""
        self._filled_of = filled_of
        self._entered: dict[str, float] = {}  # never less than what a tenant has
        self._heap: list[tuple[float, str]] = []

    def __len__(self) -> int:
        """Entries, outdated ones too: at most two a tenant, and a few."""
        return len(self._heap)

    def rose(self, tenant: str) -> None:
        """It may have more than before. To be said of each change that is no decrease."""
        filled = self._filled_of(tenant)
        if filled <= self._entered.get(tenant, 0.0):
            return
        self._entered[tenant] = filled
        heappush(self._heap, (-filled, tenant))
        self._shrink()

    def forget(self, tenant: str) -> None:
        """It has nothing any more."""
        if self._entered.pop(tenant, None) is not None:
            self._shrink()

    def most(self) -> float:
        """What the fullest has; 0: nobody has anything."""
        while self._heap:
            key, tenant = self._heap[0]
            if self._entered.get(tenant) != -key:
                heappop(self._heap)
            elif (filled := self._filled_of(tenant)) == -key:
                return filled
            elif filled:
                self._entered[tenant] = filled
                heapreplace(self._heap, (-filled, tenant))
            else:
                self.pop()
        return 0.0

    def pop(self) -> str:
        """Takes out the fullest that `most` told of, until `rose` is said of it."""
        _, tenant = heappop(self._heap)
        del self._entered[tenant]
        return tenant

    def _shrink(self) -> None:
        if len(self._heap) > 2 * len(self._entered) + _SPARE_ENTRIES:
            self._heap = [(-filled, tenant) for tenant, filled in self._entered.items()]
            heapify(self._heap)
