"""Directory of one tier behind the pool: which pages of KV it holds, in which slots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from ..wire.page_keys import PageKey

_WRITTEN, _USED = 1.0, 2.0  # what a page is worth then, plus the worth of the page replaced last


@dataclass(slots=True)
class _Entry:
    number: int  # pages that were written before it
    worth: float


class TierSlots:
    """The leader's directory of a tier; slot numbers are the same on every worker.

    A slot is free, being written, or holds a page. The page of least worth that is not being read is replaced first, by
    GreedyDual (Young 1994): a page is worth 1 when it is written and 2 when it is used, plus the worth of the page that
    was replaced last. Of equal worth the newest is replaced first. So prefixes lose their ends before their beginnings,
    and of those that are used in turns as many stay whole as there is room for. The least recently used page would
    always be the one that is needed next.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._slots: dict[PageKey, int] = {}
        self._entries: dict[PageKey, _Entry] = {}  # of the pages that the tier holds
        self._heap: list[tuple[float, int, PageKey]] = []  # worth, -number, key: worths that have grown since, too
        self._floor = 0.0  # worth of the page replaced last
        self._number = 0  # of the page written last
        self._writing: dict[PageKey, int] = {}
        self._readers: Counter[PageKey] = Counter()

    def __contains__(self, key: PageKey | None) -> bool:
        """The tier holds the page, wholly written."""
        return key in self._slots

    @property
    def num_held(self) -> int:
        return len(self._slots)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def reserve(self, key: PageKey) -> int | None:
        """A slot for a page, if need be that of the page of least worth; None: all are in use.

        The page must neither be here nor be being written. `written` or `fail` must follow.
        """
        assert key not in self._slots and key not in self._writing
        if not self._free:
            victims = self.least_worth(1)
            if not victims:
                return None
            self.evict(victims)
        self._writing[key] = self._free.pop()
        return self._writing[key]

    def is_coming(self, key: PageKey) -> bool:
        return key in self._writing

    def written(self, keys: Iterable[PageKey]) -> None:
        for key in keys:
            self._slots[key] = self._writing.pop(key)
            self._number += 1
            self._entries[key] = entry = _Entry(self._number, self._floor + _WRITTEN)
            heappush(self._heap, (entry.worth, -entry.number, key))
        if len(self._heap) > 2 * len(self._slots) + 64:
            self._heap = [(entry.worth, -entry.number, key) for key, entry in self._entries.items()]
            heapify(self._heap)

    def fail(self, keys: Iterable[PageKey]) -> None:
        """Frees the slots of pages that could not be written."""
        self._free += [self._writing.pop(key) for key in keys]

    def begin_read(self, keys: Sequence[PageKey]) -> tuple[int, ...]:
        """Slots of pages, which are not replaced until `end_read`."""
        self._readers.update(keys)
        return tuple(self._slots[key] for key in keys)

    def touch(self, keys: Iterable[PageKey]) -> None:
        """Counts a use of those of the pages that are here."""
        entries, worth = self._entries, self._floor + _USED
        for key in keys:
            if (entry := entries.get(key)) is not None:
                entry.worth = worth

    def end_read(self, keys: Iterable[PageKey]) -> None:
        for key in keys:
            self._readers[key] -= 1
            if not self._readers[key]:
                del self._readers[key]

    def drop(self, key: PageKey) -> None:
        """Forgets a page. No-op if it is not here, or is being read."""
        if key not in self._readers and key in self._slots:
            self._free.append(self._slots.pop(key))
            del self._entries[key]

    def evict(self, keys: Iterable[PageKey]) -> None:
        """Forgets pages of least worth that make room for others. Not those that are being read."""
        for key in keys:
            if key not in self._readers and key in self._slots:
                self._floor = max(self._floor, self._entries[key].worth)
                self.drop(key)

    def least_worth(self, num_pages: int) -> list[PageKey]:
        """Up to `num_pages` pages that may be dropped, in the order in which they would be replaced."""
        keys: list[PageKey] = []
        entries: list[tuple[float, int, PageKey]] = []
        while self._heap and len(keys) < num_pages:
            worth, number, key = heappop(self._heap)
            entry = self._entries.get(key)
            if entry is None or entry.number != -number:
                continue  # it was dropped
            if entry.worth > worth:
                heappush(self._heap, (entry.worth, number, key))
                continue
            entries.append((worth, number, key))
            if key not in self._readers:
                keys.append(key)
        for item in entries:
            heappush(self._heap, item)
        return keys

    def check_integrity(self) -> None:
        """Raises AssertionError if a slot is lost or used twice."""
        used = [*self._free, *self._slots.values(), *self._writing.values()]
        assert sorted(used) == list(range(self.num_slots)), "a slot is lost or used twice"
        assert self._readers.keys() <= self._slots.keys(), "a page is read that is not there"
        assert self._entries.keys() == self._slots.keys(), "a page has no worth, or one that is not there has"
        pairs = {(key, -number) for _, number, key in self._heap}
        assert all((key, entry.number) in pairs for key, entry in self._entries.items()), "a page cannot be replaced"
