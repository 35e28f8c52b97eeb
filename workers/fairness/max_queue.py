"""Finds the tenant with the largest value without scanning all tenants."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush, heapreplace
from typing import Final

_SPARE_ENTRIES: Final = 64


class MaxQueue:
    """A priority queue whose values change: a heap with outdated entries.

    A tenant whose value increases gets a new entry; one whose value decreased is corrected when it reaches the top. So
    a change takes logarithmic time, and `largest` at most one step for each earlier change.
    """

    def __init__(self, value_of: Callable[[str], float]) -> None:
        """`value_of`: a tenant's value now; 0: it is not in the queue."""
        self._value_of = value_of
        self._entered: dict[str, float] = {}  # never less than a tenant's value
        self._heap: list[tuple[float, str]] = []

    def __len__(self) -> int:
        """Entries, outdated ones included: at most two for each tenant, and a few more."""
        return len(self._heap)

    def increased(self, tenant: str) -> None:
        """The tenant's value may have increased. Must be called after every change except a decrease."""
        value = self._value_of(tenant)
        if value <= self._entered.get(tenant, 0.0):
            return
        self._entered[tenant] = value
        heappush(self._heap, (-value, tenant))
        self._compact()

    def remove(self, tenant: str) -> None:
        """The tenant's value is 0."""
        if self._entered.pop(tenant, None) is not None:
            self._compact()

    def largest(self) -> float:
        """The largest value; 0: the queue is empty."""
        while self._heap:
            key, tenant = self._heap[0]
            if self._entered.get(tenant) != -key:
                heappop(self._heap)
            elif (value := self._value_of(tenant)) == -key:
                return value
            elif value:
                self._entered[tenant] = value
                heapreplace(self._heap, (-value, tenant))
            else:
                self.pop()
        return 0.0

    def pop(self) -> str:
        """Removes and returns the tenant whose value `largest` just returned; `increased` adds it again."""
        _, tenant = heappop(self._heap)
        del self._entered[tenant]
        return tenant

    def _compact(self) -> None:
        if len(self._heap) > 2 * len(self._entered) + _SPARE_ENTRIES:
            self._heap = [(-value, tenant) for tenant, value in self._entered.items()]
            heapify(self._heap)
