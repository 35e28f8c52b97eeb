"""In which order idle adapters and idle prefix pages give their room to others."""

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
    """GreedyDual-Size-Frequency (Cherkasova, HP Labs 1998-69): what is idle has a worth, and the least goes first.

    The worth of an item is its uses times its cost of return per page, on top of the worth of what went last. So what
    is used often or is dear to bring back stays longer, and what was idle long enough goes however dear it is.
    """

    def __init__(self) -> None:
        self._idle: dict[Item, _Idle] = {}
        self._heap: list[tuple[float, int, int, Item]] = []  # worth, -depth, number; entries that are out of date too
        self._floor = 0.0  # worth of what went last
        self._number = 0
        self.num_pages = 0  # of all idle items

    def __contains__(self, item: Item) -> bool:
        return item in self._idle

    def num_pages_of(self, items: AbstractSet[Item]) -> int:
        """Of those among them that are idle."""
        return sum(self._idle[item].num_pages for item in items if item in self._idle)

    def worth(self, num_uses: float, cost_s: float) -> float:
        """What an item is worth that becomes idle now."""
        return self._floor + num_uses * cost_s

    def add(self, item: Item, num_pages: int, num_uses: float, cost_s: float, depth: int = 0) -> None:
        """The item is idle now. `cost_s`: of its return, per page. Among equals the deepest goes first."""
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
        """The item is used again, or gone by another way."""
        self.num_pages -= self._idle.pop(item).num_pages

    def take(self, num_pages: int, keep: AbstractSet[Item]) -> list[Item] | None:
        """Items of so many pages at least, in the order in which they should go; they are no longer idle here.

        None, and nothing changed, if all that are not in `keep` would not be enough.
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
