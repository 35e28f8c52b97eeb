"""Queues of tenants by a number that changes while they are in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush, heapreplace
from typing import Final, Generic, TypeVar

# A priority queue of items whose keys grow while they are in it.

Key = tuple[bool, float, int]
_Item = TypeVar("_Item")

_LEAST_PRUNED = 64


class MinQueue(Generic[_Item]):
    """Items in the order of their keys, which never decrease, but for ties.

    An entry's stored key is a lower bound of its item's key, so it need only be compared when the entry is on top:
    charging a tenant costs nothing here, and the first few items cost no more with ten thousand behind them.
    """

    def __init__(self, key: Callable[[_Item], Key | None]) -> None:
        """`key`: None if the item has left; it is dropped when it reaches the top."""
        self._key = key
        self._heap: list[tuple[Key, int, _Item]] = []
        self._items: set[_Item] = set()
        self._walked: list[_Item] = []  # items that the last walk has yielded
        self._num_puts = self._num_walks = 0
        self._prune_size = _LEAST_PRUNED

    def put(self, item: _Item) -> None:
        """No-op if the item is here."""
        if item not in self._items and (key := self._key(item)) is not None:
            self._items.add(item)
            self._push(key, item)
            if len(self._heap) > self._prune_size:
                self._prune()

    def first(self) -> _Item | None:
        """The item with the least key."""
        return next(self.walk(), None)

    def walk(self) -> Iterator[_Item]:
        """All items, least first. Invalid once another walk begins; items may be put meanwhile, and come later."""
        for item in self._walked:
            if (key := self._key(item)) is None:
                self._items.discard(item)
            else:
                self._push(key, item)
        self._walked.clear()
        self._num_walks = number = self._num_walks + 1
        while self._heap:
            assert number == self._num_walks, "another walk has begun"
            old_key, _, item = heappop(self._heap)
            key = self._key(item)
            if key is None:
                self._items.discard(item)
            elif key > old_key:
                self._push(key, item)
            else:
                self._walked.append(item)
                yield item

    def _push(self, key: Key, item: _Item) -> None:
        self._num_puts += 1
        heappush(self._heap, (key, self._num_puts, item))

    def _prune(self) -> None:
        """Drops items that have left and that no walk has reached."""
        keys = [(self._key(item), number, item) for _, number, item in self._heap]
        self._items -= {item for key, _, item in keys if key is None}
        self._heap = [(key, number, item) for key, number, item in keys if key is not None]
        heapify(self._heap)
        self._prune_size = max(_LEAST_PRUNED, 2 * len(self._heap))


# Finds the tenant with the largest value without scanning all tenants.

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
