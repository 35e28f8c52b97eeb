"""In which order idle adapters and idle prefix pages are evicted."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

Item = str | int  # an adapter's digest, or a page of the prefix cache


@dataclass(frozen=True)
class _Idle:
    worth: float
    depth: int
    number: int  # of the entry: the latest of an item is the one that counts
    num_pages: int


class IdleOrder:
    """GreedyDual-Size-Frequency (Cherkasova, HP Labs 1998-69): each idle item has a worth, and the least goes first.

    The worth of an item is its uses times its cost of return per page, on top of the worth of the item that went last.
    So an item that is used often or costs much to bring back stays longer, and after long enough every idle item goes.
    """

    def __init__(self) -> None:
        self._idle: dict[Item, _Idle] = {}
        self._heap: list[tuple[float, int, int, Item]] = []  # worth, -depth, number, item; outdated entries too
        self._floor = 0.0  # worth of the item that went last
        self._number = 0
        self.num_pages = 0  # of all idle items

    def __contains__(self, item: Item) -> bool:
        return item in self._idle

    def num_pages_of(self, items: AbstractSet[Item]) -> int:
        """Pages of those among the items that are idle."""
        return sum(self._idle[item].num_pages for item in items if item in self._idle)

    def worth(self, num_uses: float, cost_s: float) -> float:
        """The worth of an item that becomes idle now."""
        return self._floor + num_uses * cost_s

    def add(self, item: Item, num_pages: int, num_uses: float, cost_s: float, depth: int = 0) -> None:
        """The item is idle now. `cost_s`: of its return, per page. Of items of equal worth the deepest goes first."""
        assert item not in self._idle
        self._number += 1
        entry = _Idle(self.worth(num_uses, cost_s), depth, self._number, num_pages)
        self._idle[item] = entry
        self.num_pages += num_pages
        heappush(self._heap, (entry.worth, -entry.depth, entry.number, item))
        if len(self._heap) > 2 * len(self._idle) + 64:
            self._heap = [(e.worth, -e.depth, e.number, i) for i, e in self._idle.items()]
            heapify(self._heap)

    def remove(self, item: Item) -> None:
        """The item is used again, or has gone in another way."""
        self.num_pages -= self._idle.pop(item).num_pages

    def take(self, num_pages: int, keep: AbstractSet[Item]) -> list[Item] | None:
        """Removes items of at least so many pages, and returns them in the order in which they should go.

        None, and nothing changed, if all items that are not in `keep` would not be enough.
        """
        if num_pages > self.num_pages - self.num_pages_of(keep):
            return None
        going: list[Item] = []
        passed = []
        while num_pages > 0:
            entry = heappop(self._heap)
            worth, _, number, item = entry
            idle = self._idle.get(item)
            if idle is None or idle.number != number:
                continue
            if item in keep:
                passed.append(entry)
                continue
            self._floor = max(self._floor, worth)
            going.append(item)
            num_pages -= idle.num_pages
            self.remove(item)
        for entry in passed:
            heappush(self._heap, entry)
        return going
