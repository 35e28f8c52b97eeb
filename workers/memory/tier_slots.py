"""Which pages of KV one tier behind the pool holds, and in which of its slots."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from ..wire.page_keys import PageKey


class TierSlots:
    """The leader's directory of a tier; slot numbers are the same on every worker.

    A slot is free, being written, or holds a page. A page makes room for another, the least recently used one first,
    unless it is being read.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._slots: OrderedDict[PageKey, int] = OrderedDict()  # least recently used first
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
        """A slot to write a page into, if need be that of the least recently used page; None: all are in use.

        The page must neither be here nor be coming. `written` or `fail` must follow.
        """
        assert key not in self._slots and key not in self._writing
        if not self._free:
            victim = next(self.oldest(), None)
            if victim is None:
                return None
            self.drop(victim)
        self._writing[key] = self._free.pop()
        return self._writing[key]

    def is_coming(self, key: PageKey) -> bool:
        return key in self._writing

    def written(self, keys: Iterable[PageKey]) -> None:
        for key in keys:
            self._slots[key] = self._writing.pop(key)

    def fail(self, keys: Iterable[PageKey]) -> None:
        """The pages could not be written: their slots are free again."""
        self._free += [self._writing.pop(key) for key in keys]

    def begin_read(self, keys: Sequence[PageKey]) -> tuple[int, ...]:
        """Slots of pages that are here, which stay until `end_read`."""
        for key in keys:
            self._slots.move_to_end(key)
        self._readers.update(keys)
        return tuple(self._slots[key] for key in keys)

    def touch(self, keys: Iterable[PageKey]) -> None:
        """Those of the pages that are here were used just now."""
        for key in keys:
            if key in self._slots:
                self._slots.move_to_end(key)

    def end_read(self, keys: Iterable[PageKey]) -> None:
        for key in keys:
            self._readers[key] -= 1
            if not self._readers[key]:
                del self._readers[key]

    def drop(self, key: PageKey) -> None:
        """Forgets a page. No-op if it is not here, or is being read."""
        if key not in self._readers and key in self._slots:
            self._free.append(self._slots.pop(key))

    def oldest(self) -> Iterator[PageKey]:
        """Pages that may go, least recently used first."""
        return (key for key in self._slots if key not in self._readers)

    def check_integrity(self) -> None:
        """Raises AssertionError if a slot is lost or used twice."""
        used = [*self._free, *self._slots.values(), *self._writing.values()]
        assert sorted(used) == list(range(self.num_slots)), "a slot is lost or used twice"
        assert self._readers.keys() <= self._slots.keys(), "a page is read that is not there"
