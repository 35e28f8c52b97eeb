"""The sequences that wait for their turn, by arrival."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

from .sequence import Sequence

_arrival = attrgetter("arrival")


class WaitingQueue:
    """Oldest first. Removing a sequence takes little longer in a queue of thousands than in a short one."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []
        self._by_id: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def first(self, num_sequences: int) -> list[Sequence]:
        """The oldest `num_sequences`, or all if there are fewer."""
        return self._sequences[:num_sequences]

    def get(self, sequence_id: int) -> Sequence | None:
        return self._by_id.get(sequence_id)

    def add(self, sequence: Sequence) -> None:
        """No other sequence here may have its id or its arrival."""
        assert sequence.sequence_id not in self._by_id, f"sequence {sequence.sequence_id} waits already"
        insort(self._sequences, sequence, key=_arrival)
        self._by_id[sequence.sequence_id] = sequence

    def remove(self, sequence: Sequence) -> None:
        """The sequence must be here."""
        index = bisect_left(self._sequences, sequence.arrival, key=_arrival)
        assert self._sequences[index] is sequence
        del self._sequences[index], self._by_id[sequence.sequence_id]

    def check_integrity(self) -> None:
        """Raises AssertionError if sequences are out of order or not known by their ids."""
        arrivals = [sequence.arrival for sequence in self._sequences]
        assert arrivals == sorted(set(arrivals)), "the queue is out of order"
        assert {sequence.sequence_id: sequence for sequence in self._sequences} == self._by_id, "ids and queue differ"
