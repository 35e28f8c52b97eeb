"""Sequences that no gang computes for now, since their readers have not read what has come."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from .open_sequence import OpenSequence


class UnreadSequences:
    """A `SequencePlace`. Belongs to one event loop."""

    def __init__(self, on_read: Callable[[OpenSequence], None]) -> None:
        """`on_read` gets a sequence when its reader has taken all that had come; it is nowhere by then."""
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
        """Takes a sequence over that is nowhere."""
        sequence.move(None, self)
        self._sequences[sequence] = None
        self._num_of[sequence.request.tenant] += 1
        sequence.when_read(self._go_on)

    def remove(self, sequence: OpenSequence) -> None:
        """Lets go of the sequence: it is nowhere now."""
        sequence.move(self, None)
        self.cancel(sequence)

    def cancel(self, sequence: OpenSequence) -> None:
        del self._sequences[sequence]
        self._num_of[sequence.request.tenant] -= 1
        if not self._num_of[sequence.request.tenant]:
            del self._num_of[sequence.request.tenant]

    def _go_on(self, sequence: OpenSequence) -> None:
        self.remove(sequence)
        self._on_read(sequence)
