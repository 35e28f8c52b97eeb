"""Directory of one tier behind the pool: which pages of KV it holds, in which slots."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from ..wire.page_keys import PageKey


class TierSlots:
    """The leader's directory of a tier; slot numbers are the same on every worker.

    A slot is free, being written, or holds a page. The least recently used page that is not being read is replaced
    first.
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
        """A slot for a page, if need be the least recently used one's; None: all are in use.

        The page must neither be here nor be being written. `written` or `fail` must follow.
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
        """Frees the slots of pages that could not be written."""
        self._free += [self._writing.pop(key) for key in keys]

    def begin_read(self, keys: Sequence[PageKey]) -> tuple[int, ...]:
        """Slots of pages, which are not replaced until `end_read`."""
        for key in keys:
            self._slots.move_to_end(key)
        self._readers.update(keys)
        return tuple(self._slots[key] for key in keys)

    def touch(self, keys: Iterable[PageKey]) -> None:
        """Counts a use of those of the pages that are here."""
        slots, move_to_end = self._slots, self._slots.move_to_end
        for key in keys:
            if key in slots:
                move_to_end(key)

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
        """Pages that may be dropped, least recently used first."""
        return (key for key in self._slots if key not in self._readers)

    def check_integrity(self) -> None:
        """Raises AssertionError if a slot is lost or used twice."""
        used = [*self._free, *self._slots.values(), *self._writing.values()]
        assert sorted(used) == list(range(self.num_slots)), "a slot is lost or used twice"
        assert self._readers.keys() <= self._slots.keys(), "a page is read that is not there"
