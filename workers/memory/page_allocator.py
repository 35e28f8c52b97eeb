"""Which pages of the pool are free, who holds the others, and the order in which idle ones are evicted."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from heapq import heapify, heappop, heappush
from itertools import count

import msgspec


class PageAllocator:
    """Hands out page ids. Lives with the gang's leader; ids are the same on every worker."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))  # a stack: pages freed last are warm in cache
        self._num_holders = [0] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, num_pages: int) -> tuple[int, ...] | None:
        """That many pages, each with one holder, or None (and nothing taken) if fewer are free."""
        if num_pages > len(self._free):
            return None
        if not num_pages:
            return ()
        pages = tuple(self._free[: -num_pages - 1 : -1])
        del self._free[-num_pages:]
        num_holders = self._num_holders
        for page in pages:
            num_holders[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Adds a holder to pages that are held already."""
        num_holders = self._num_holders
        for page in pages:
            assert num_holders[page], f"page {page} is shared, and was not held"
            num_holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Removes a holder; pages without a holder are free."""
        num_holders, free = self._num_holders, self._free
        for page in pages:
            assert num_holders[page], f"page {page} is released, and was not held"
            num_holders[page] -= 1
            if not num_holders[page]:
                free.append(page)

    def held_once(self, pages: Iterable[int]) -> list[int]:
        """Those of the pages that have one holder."""
        num_holders = self._num_holders
        return [page for page in pages if num_holders[page] == 1]

    def num_holders(self, page: int) -> int:
        return self._num_holders[page]

    def check_integrity(self, holders: Iterable[Iterable[int]]) -> None:
        """Raises AssertionError unless every page is free, or is held by as many holders as were counted."""
        refs: Counter[int] = Counter()
        for pages in map(list, holders):
            assert len(pages) == len(set(pages)), "a holder has a page twice"
            refs.update(pages)
        assert len(self._free) == len(set(self._free)), "a page is free twice"
        assert not refs.keys() & set(self._free), "a page is both held and free"
        assert len(refs) + len(self._free) == self.num_pages, "a page is neither held nor free"
        assert all(self._num_holders[page] == count for page, count in refs.items()), "a page's holders are miscounted"
        assert not any(self._num_holders[page] for page in self._free), "a free page has holders"


# A decaying count of uses.

HALF_LIFE = 32.0  # in rounds of the idle order
MOST = 32.0  # so an unused item is evicted after this many rounds at the latest


class UseCount(msgspec.Struct, gc=False):
    """Ageing after Robinson and Devarakonda (SIGMETRICS 1990): without it, once popular items would stay."""

    _sum: float = 0.0
    _since: float = 0.0  # round as of which the uses are summed

    def add(self, now: float) -> None:
        """One more use. `now`: rounds so far."""
        if now - self._since > 1.0:
            self._sum *= 0.5 ** ((now - self._since) / HALF_LIFE)
            self._since = now
        self._sum += 1.0

    @property
    def value(self) -> float:
        """As of the last use; at least 1."""
        return min(max(self._sum, 1.0), MOST)


# The order in which idle adapters and idle prefix pages are evicted.

Item = str | int  # an adapter's digest, or a page of the prefix cache

_FIRST_PAGE_RANK = 1 << 32
_ANY_RANK = 1 << 40  # above all ranks


class _Idle(msgspec.Struct, frozen=True, gc=False):
    worth: float
    depth: int
    number: int  # of the entry: the latest of an item is the one that counts
    num_pages: int


class IdleOrder:
    """GreedyDual-Size-Frequency (Cherkasova, HP Labs 1998-69): the item with the least worth is evicted first.

    An item's worth is its uses times its cost of return per page, plus the worth of the item that was evicted last. So
    an item that is used often or is expensive to restore stays longer, and every idle item is evicted in the end.

    Items that are wanted soon are evicted last. Those that `take` skips for this are kept out of the heap while they
    are wanted, so a call costs time linear in what it evicts, however many are wanted.
    """

    def __init__(self) -> None:
        self._idle: dict[Item, _Idle] = {}
        # Ranks of items wanted soon, idle or not; 0: the most urgent. All adapters come before the pages.
        self._soon: dict[Item, int] = {}
        self._soon_adapters: tuple[Item, ...] = ()  # by rank
        self._soon_pages: tuple[Item, ...] = ()  # by rank, from _FIRST_PAGE_RANK on
        self._soon_ranks: list[int] = []  # of those that are idle, in order
        self._num_soon_pages = 0  # of these
        self._aside: dict[Item, tuple[float, int, int, Item]] = {}  # of items wanted soon: entries not in the heap
        self._heap: list[tuple[float, int, int, Item]] = []  # worth, -depth, number, item; outdated entries too
        self._floor = 0.0  # worth of the item evicted last
        self._number = 0
        self.num_pages = 0  # of all idle items
        self.num_rounds = 0.0  # grows by one when as many pages are evicted as are idle

    def __contains__(self, item: Item) -> bool:
        return item in self._idle

    @property
    def items(self) -> Mapping[Item, _Idle]:
        """All idle items; faster than this object where thousands are looked up."""
        return self._idle

    @property
    def soon_adapters(self) -> AbstractSet[Item]:
        """Adapters that will be used soon, idle or not."""
        return {*self._soon_adapters}

    def num_pages_of(self, items: AbstractSet[Item]) -> int:
        """Pages of those among the items that are idle."""
        return sum(self._idle[item].num_pages for item in items if item in self._idle)

    def worth(self, num_uses: float, cost_s: float) -> float:
        """The worth of an item that becomes idle now."""
        return self._floor + num_uses * cost_s

    def add(self, item: Item, num_pages: int, num_uses: float, cost_s: float, depth: int = 0) -> None:
        """The item is idle now. `cost_s`: of its return, per page. Of equal worth the deepest is evicted first."""
        assert item not in self._idle
        self._number += 1
        entry = _Idle(self.worth(num_uses, cost_s), depth, self._number, num_pages)
        self._idle[item] = entry
        self.num_pages += num_pages
        if item in self._soon:
            self._num_soon_pages += num_pages
            insort(self._soon_ranks, self._soon[item])
        heappush(self._heap, (entry.worth, -entry.depth, entry.number, item))
        if len(self._heap) > 2 * len(self._idle) + 64:
            self._heap = [(e.worth, -e.depth, e.number, i) for i, e in self._idle.items() if i not in self._aside]
            heapify(self._heap)

    def remove(self, item: Item) -> None:
        """The item is in use again, or was dropped."""
        num_pages = self._idle.pop(item).num_pages
        self.num_pages -= num_pages
        if item in self._soon:
            self._num_soon_pages -= num_pages
            del self._soon_ranks[bisect_left(self._soon_ranks, self._soon[item])]
        self._aside.pop(item, None)

    def want_soon(self, digests: Iterable[str]) -> None:
        """Sets the adapters that will be used soon, the most urgent first."""
        before, self._soon_adapters = self._soon_adapters, tuple(dict.fromkeys(digests))
        if before != self._soon_adapters:
            num_before = bisect_left(self._soon_ranks, _FIRST_PAGE_RANK)
            self._soon_ranks[:num_before] = self._rank_again(before, self._soon_adapters, 0)

    def want_pages_soon(self, pages: Iterable[int]) -> None:
        """Sets the pages that will be used soon, the most urgent first; all are less urgent than adapters."""
        before, self._soon_pages = self._soon_pages, tuple(dict.fromkeys(pages))
        num_before = bisect_left(self._soon_ranks, _FIRST_PAGE_RANK)
        self._soon_ranks[num_before:] = self._rank_again(before, self._soon_pages, _FIRST_PAGE_RANK)

    def take(self, num_pages: int, keep: AbstractSet[Item]) -> list[Item] | None:
        """Removes items of at least `num_pages` pages, and returns them in the order of eviction.

        Items that are wanted soon are taken only if all others are not enough, the least urgent first. None, and
        nothing changed, if all items that are not in `keep` are not enough.
        """
        first_taken = self._first_taken_soon(num_pages, keep)
        if first_taken is None:
            return None
        going: list[Item] = []
        keep_entries = []
        num_idle = self.num_pages
        while num_pages > 0:
            entry = heappop(self._heap)
            worth, _, number, item = entry
            idle = self._idle.get(item)
            if idle is None or idle.number != number:
                continue
            if item in keep:
                keep_entries.append(entry)
                continue
            if self._soon.get(item, first_taken) < first_taken:
                self._aside[item] = entry
                continue
            self._floor = max(self._floor, worth)
            going.append(item)
            num_pages -= idle.num_pages
            self.remove(item)
        for entry in keep_entries:
            heappush(self._heap, entry)
        if going:
            self.num_rounds += (num_idle - self.num_pages) / num_idle
        return going

    def check_integrity(self) -> None:
        """Raises AssertionError if pages are miscounted, or an idle item could not be found."""
        assert self.num_pages == sum(idle.num_pages for idle in self._idle.values()), "idle pages are miscounted"
        assert self._num_soon_pages == self.num_pages_of(self._soon.keys()), "pages wanted soon are miscounted"
        ranks = {item: rank for rank, item in enumerate(self._soon_adapters)}
        ranks |= {page: rank for rank, page in enumerate(self._soon_pages, _FIRST_PAGE_RANK)}
        assert self._soon == ranks and self._soon_ranks == sorted(ranks[item] for item in ranks if item in self._idle)
        assert self._aside.keys() <= self._soon.keys() & self._idle.keys(), "an item is aside for no reason"
        items = {(item, number) for _, _, number, item in (*self._heap, *self._aside.values())}
        assert all((item, idle.number) in items for item, idle in self._idle.items()), "an idle item cannot be found"

    def _rank_again(self, before: tuple[Item, ...], now: tuple[Item, ...], first_rank: int) -> list[int]:
        """Ranks the items that are wanted now instead of those before; returns the ranks of those that are idle."""
        for item in before:
            del self._soon[item]
            self._num_soon_pages -= self._idle[item].num_pages if item in self._idle else 0
        self._soon.update(zip(now, count(first_rank), strict=False))
        idle = [item for item in now if item in self._idle]
        self._num_soon_pages += sum([self._idle[item].num_pages for item in idle])
        if self._aside:
            for item in before:
                if item in self._aside and item not in self._soon:
                    heappush(self._heap, self._aside.pop(item))
        return [self._soon[item] for item in idle]

    def _first_taken_soon(self, num_pages: int, keep: AbstractSet[Item]) -> int | None:
        """The rank from which on items are taken if `num_pages` are evicted; None: too few can be evicted."""
        num_kept = self.num_pages_of(keep)
        if num_pages > self.num_pages - num_kept:
            return None
        kept_soon = sum(self._idle[item].num_pages for item in keep if item in self._soon and item in self._idle)
        short = num_pages - (self.num_pages - self._num_soon_pages - (num_kept - kept_soon))
        first_taken = _ANY_RANK
        for rank in reversed(self._soon_ranks):
            if short <= 0:
                break
            is_page = rank >= _FIRST_PAGE_RANK
            item = self._soon_pages[rank - _FIRST_PAGE_RANK] if is_page else self._soon_adapters[rank]
            first_taken = rank
            short -= 0 if item in keep else self._idle[item].num_pages
            if item in self._aside:
                heappush(self._heap, self._aside.pop(item))
        return first_taken
