"""The sequences that wait for their turn, by arrival, and what those wait for that cannot start."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from operator import attrgetter

from ..wire.page_keys import PageKey
from .sequence import Sequence

_arrival = attrgetter("arrival")


class WaitingQueue:
    """Oldest first. Sequences that cannot start are told when they can, so that nobody asks them in every step.

    A sequence lacks its adapter, or it is equipped; an equipped one may await a page that somebody computes or copies.
    Adding and removing a sequence takes little longer in a queue of thousands than in a short one.
    """

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []
        self._by_id: dict[int, Sequence] = {}
        self._equipped: list[Sequence] = []  # oldest first, as all are
        self._by_adapter: defaultdict[str, dict[int, Sequence]] = defaultdict(dict)  # by digest, then by id
        self._lacking: set[str] = set()  # digests of adapters that are not there, and that somebody waits for
        self._awaiting: defaultdict[PageKey, list[Sequence]] = defaultdict(list)  # some may have left the queue
        self._oldest_lacking: list[tuple[int, int]] = []  # a heap of arrival and id; outdated entries too
        self.num_lacking = 0  # sequences that lack their adapter
        self.num_awaiting = 0  # sequences that await a page
        self.num_tokens = 0  # of all sequences, that are neither computed nor were found in the pool

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def first(self, num_sequences: int) -> list[Sequence]:
        """The oldest `num_sequences`, or all if there are fewer."""
        return self._sequences[:num_sequences]

    @property
    def equipped(self) -> list[Sequence]:
        """Sequences whose adapter is there, oldest first."""
        return self._equipped

    @property
    def num_ready(self) -> int:
        """Sequences that lack nothing, as far as is known."""
        return len(self._equipped) - self.num_awaiting

    def get(self, sequence_id: int) -> Sequence | None:
        return self._by_id.get(sequence_id)

    def add(self, sequence: Sequence, has_adapter: bool = True) -> None:
        """No other sequence here may have its id or its arrival."""
        assert sequence.sequence_id not in self._by_id, f"sequence {sequence.sequence_id} waits already"
        insort(self._sequences, sequence, key=_arrival)
        self._by_id[sequence.sequence_id] = sequence
        self.num_tokens += sequence.num_uncomputed - sequence.num_found
        digest = sequence.adapter_digest
        if digest is not None:
            assert has_adapter == (digest not in self._lacking) or not self._by_adapter[digest]
            self._by_adapter[digest][sequence.sequence_id] = sequence
        if has_adapter:
            insort(self._equipped, sequence, key=_arrival)
        else:
            assert digest is not None
            self._lacking.add(digest)
            self._lack(sequence)

    def remove(self, sequence: Sequence) -> None:
        """The sequence must be here."""
        _take_out(self._sequences, sequence)
        del self._by_id[sequence.sequence_id]
        self.num_tokens -= sequence.num_uncomputed - sequence.num_found
        digest = sequence.adapter_digest
        if digest in self._lacking:
            self.num_lacking -= 1
        else:
            _take_out(self._equipped, sequence)
            self._stop_awaiting(sequence)
        if digest is not None:
            del self._by_adapter[digest][sequence.sequence_id]
            if not self._by_adapter[digest]:
                del self._by_adapter[digest]
                self._lacking.discard(digest)

    def of_adapter(self, digest: str) -> list[Sequence]:
        """Sequences that will use the adapter."""
        return [*self._by_adapter.get(digest, {}).values()]

    def adapter_came(self, digest: str) -> None:
        """The adapter is in the pool."""
        if digest in self._lacking:
            self._lacking.remove(digest)
            came = self._by_adapter[digest].values()
            self.num_lacking -= len(came)
            self._equipped = sorted([*self._equipped, *came], key=_arrival)

    def adapter_went(self, digest: str) -> None:
        """The adapter is not in the pool any more."""
        if digest in self._by_adapter:
            self._lacking.add(digest)
            self._equipped = [sequence for sequence in self._equipped if sequence.adapter_digest != digest]
            for sequence in self._by_adapter[digest].values():
                self._stop_awaiting(sequence)
                self._lack(sequence)

    def oldest_lacking(self, is_absent: Callable[[str], bool]) -> Sequence | None:
        """The oldest sequence whose adapter is not there and not coming either."""
        while self._oldest_lacking:
            sequence = self._by_id.get(self._oldest_lacking[0][1])
            if sequence is not None and sequence.arrival == self._oldest_lacking[0][0]:
                digest = sequence.adapter_digest
                if digest in self._lacking and is_absent(digest):
                    return sequence
            heappop(self._oldest_lacking)  # it left, or its adapter comes; if that goes again, it is added again
        return None

    def await_page(self, sequence: Sequence, key: PageKey, num_reserved_pages: int) -> None:
        """An equipped sequence cannot start before `page_came(key)`. It will take so many pages then."""
        assert sequence.awaits_page is None
        sequence.awaits_page, sequence.num_reserved_pages = key, num_reserved_pages
        self.num_awaiting += 1
        self._awaiting[key].append(sequence)

    def page_came(self, key: PageKey) -> None:
        """Nobody computes or copies a page with this key any more: it is there, or will not come."""
        for sequence in self._awaiting.pop(key, ()):
            if sequence.awaits_page == key:  # else it has left, or awaits another one
                self._stop_awaiting(sequence)

    def awaited_keys(self) -> set[PageKey]:
        """For integrity checks."""
        return {sequence.awaits_page for sequence in self._sequences if sequence.awaits_page is not None}

    def tell_found(self, sequence: Sequence, num_tokens: int) -> None:
        """So many of its tokens were found in the pool."""
        self.num_tokens -= num_tokens - sequence.num_found
        sequence.num_found = num_tokens

    def check_integrity(self, is_here: Callable[[str], bool] | None = None) -> None:
        """Raises AssertionError if sequences are out of order, not known by their ids, or miscounted.

        `is_here`: whether an adapter is in the pool.
        """
        for sequences in (self._sequences, self._equipped):
            arrivals = [sequence.arrival for sequence in sequences]
            assert arrivals == sorted(set(arrivals)), "the queue is out of order"
        assert {sequence.sequence_id: sequence for sequence in self._sequences} == self._by_id, "ids and queue differ"
        lacking = [s for s in self._sequences if s.adapter_digest in self._lacking]
        assert {*lacking, *self._equipped} == {*self._sequences} and self.num_lacking == len(lacking)
        assert len(lacking) + len(self._equipped) == len(self._sequences), "a sequence lacks its adapter and has it"
        awaiting = [sequence for sequence in self._sequences if sequence.awaits_page is not None]
        assert self.num_awaiting == len(awaiting)
        assert all(sequence in self._awaiting[sequence.awaits_page or b""] for sequence in awaiting), "nobody wakes it"
        assert self.num_tokens == sum(s.num_uncomputed - s.num_found for s in self._sequences), "tokens are miscounted"
        if is_here is not None:
            digests = {s.adapter_digest for s in self._sequences if s.adapter_digest is not None}
            assert {digest for digest in digests if not is_here(digest)} == self._lacking, "an adapter came or went"

    def _lack(self, sequence: Sequence) -> None:
        self.num_lacking += 1
        heappush(self._oldest_lacking, (sequence.arrival, sequence.sequence_id))
        if len(self._oldest_lacking) > 2 * self.num_lacking + 64:
            lacking = (each for digest in self._lacking for each in self._by_adapter[digest].values())
            self._oldest_lacking = [(each.arrival, each.sequence_id) for each in lacking]
            heapify(self._oldest_lacking)

    def _stop_awaiting(self, sequence: Sequence) -> None:
        if sequence.awaits_page is not None:
            sequence.awaits_page, sequence.num_reserved_pages = None, 0
            self.num_awaiting -= 1


def _take_out(sequences: list[Sequence], sequence: Sequence) -> None:
    index = bisect_left(sequences, sequence.arrival, key=_arrival)
    assert sequences[index] is sequence
    del sequences[index]
