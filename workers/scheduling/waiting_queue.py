"""The sequences that wait, by arrival."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

from .sequence import Sequence

_arrival = attrgetter("arrival")


class WaitingQueue:
    """Oldest first. With thousands in it, one leaves in little more time than from a short line."""

    def __init__(self) -> None:
        self._line: list[Sequence] = []
        self._by_id: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._line)

    def first(self, num_sequences: int) -> list[Sequence]:
        """The oldest, so many at most."""
        return self._line[:num_sequences]

    def get(self, sequence_id: int) -> Sequence | None:
        return self._by_id.get(sequence_id)

    def add(self, sequence: Sequence) -> None:
        """No other may have its id or its arrival."""
        assert sequence.sequence_id not in self._by_id, f"sequence {sequence.sequence_id} waits already"
        insort(self._line, sequence, key=_arrival)
        self._by_id[sequence.sequence_id] = sequence

    def remove(self, sequence: Sequence) -> None:
        """It waits, and does so no longer."""
        index = bisect_left(self._line, sequence.arrival, key=_arrival)
        assert self._line[index] is sequence
        del self._line[index], self._by_id[sequence.sequence_id]

    def check_integrity(self) -> None:
        """Raises AssertionError if they are out of order or not known by their ids."""
        arrivals = [sequence.arrival for sequence in self._line]
        assert arrivals == sorted(set(arrivals)), "the line is out of order"
        assert {sequence.sequence_id: sequence for sequence in self._line} == self._by_id, "ids and line differ"
