"""Sequences that no gang computes at present, since their readers have too much unread."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from .open_sequence import OpenSequence


class UnreadSequences:
    """A `SequencePlace`. Belongs to one event loop."""

    def __init__(self, on_read: Callable[[OpenSequence], None]) -> None:
        """`on_read` gets a sequence when its reader has taken all updates; it has no place then."""
        self._on_read = on_read
        self._sequences: dict[OpenSequence, None] = {}
        self._num_of: Counter[str] = Counter()  # by tenant

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[OpenSequence]:
        return iter([*self._sequences])

    def num_of(self, tenant: str) -> int:
        return self._num_of[tenant]

    def add(self, sequence: OpenSequence) -> None:
        """Adds a sequence that has no place."""
        sequence.move(None, self)
        self._sequences[sequence] = None
        self._num_of[sequence.request.tenant] += 1
        sequence.when_read(self._resume)

    def remove(self, sequence: OpenSequence) -> None:
        """Removes the sequence, which has no place then."""
        sequence.move(self, None)
        self.cancel(sequence)

    def cancel(self, sequence: OpenSequence) -> None:
        del self._sequences[sequence]
        self._num_of[sequence.request.tenant] -= 1
        if not self._num_of[sequence.request.tenant]:
            del self._num_of[sequence.request.tenant]

    def _resume(self, sequence: OpenSequence) -> None:
        self.remove(sequence)
        self._on_read(sequence)
