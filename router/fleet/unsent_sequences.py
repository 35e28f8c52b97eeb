"""Sequences that a router has not sent, or has to send again, and that wait a bounded time for a gang."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator

from .open_sequence import OpenSequence


class UnsentSequences:
    """A `SequencePlace`. Iterates over its sequences in the order of their coming. Belongs to one event loop."""

    def __init__(self, timeout_s: float, on_timeout: Callable[[OpenSequence], None]) -> None:
        """`on_timeout` gets a sequence that has waited for `timeout_s`; it is nowhere by then."""
        self._timeout_s, self._on_timeout = timeout_s, on_timeout
        self._timers: dict[OpenSequence, asyncio.TimerHandle] = {}
        self._num_of: Counter[str] = Counter()  # by tenant

    def __len__(self) -> int:
        return len(self._timers)

    def __iter__(self) -> Iterator[OpenSequence]:
        return iter([*self._timers])

    def num_of(self, tenant: str) -> int:
        return self._num_of[tenant]

    def add(self, sequence: OpenSequence) -> None:
        """Takes a sequence over that is nowhere."""
        sequence.move(None, self)
        self._num_of[sequence.request.tenant] += 1
        self._timers[sequence] = asyncio.get_running_loop().call_later(self._timeout_s, self._time_out, sequence)

    def remove(self, sequence: OpenSequence) -> None:
        """Lets go of the sequence: it is nowhere now."""
        sequence.move(self, None)
        self.cancel(sequence)

    def cancel(self, sequence: OpenSequence) -> None:
        self._timers.pop(sequence).cancel()
        self._num_of[sequence.request.tenant] -= 1
        if not self._num_of[sequence.request.tenant]:
            del self._num_of[sequence.request.tenant]

    def _time_out(self, sequence: OpenSequence) -> None:
        self.remove(sequence)
        self._on_timeout(sequence)
