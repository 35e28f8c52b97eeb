"""Sequences that a router has not sent, or has to send again, and that wait a bounded time for a gang."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

from ..fairness.places import Taken, is_in_share, who_gives_way
from .open_sequence import OpenSequence


class UnsentSequences:
    """A `SequencePlace`. Iterates over its sequences in the order of their coming. Belongs to one event loop."""

    def __init__(self, timeout_s: float, on_timeout: Callable[[OpenSequence], None]) -> None:
        """`on_timeout` gets a sequence that has waited for `timeout_s`; it is nowhere by then."""
        self._timeout_s, self._on_timeout = timeout_s, on_timeout
        self._timers: dict[OpenSequence, asyncio.TimerHandle] = {}
        self._taken: dict[str, Taken] = {}  # by tenant

    def __len__(self) -> int:
        return len(self._timers)

    def __iter__(self) -> Iterator[OpenSequence]:
        return iter([*self._timers])

    def num_of(self, tenant: str) -> int:
        return self._taken[tenant].num if tenant in self._taken else 0

    def has_room(self, sequence: OpenSequence, num_places: int) -> tuple[bool, OpenSequence | None]:
        """Whether the sequence may be added, and which other one is to be given up for it, if any.

        `num_places`: for all tenants; what some cannot lose any more takes nobody else's share of them.
        """
        if len(self) < num_places:
            return True, None
        tenant, weight = sequence.request.tenant, sequence.request.weight
        fullest = who_gives_way(tenant, weight, self._taken)
        if fullest is None:
            return is_in_share(tenant, weight, self._taken, num_places), None
        return True, next(one for one in reversed(self._timers) if one.request.tenant == fullest and one.may_move)

    def add(self, sequence: OpenSequence) -> None:
        """Takes a sequence over that is nowhere."""
        sequence.move(None, self)
        taken = self._taken.setdefault(sequence.request.tenant, Taken())
        taken.num += 1
        taken.num_promised += not sequence.may_move
        taken.weight = sequence.request.weight
        self._timers[sequence] = asyncio.get_running_loop().call_later(self._timeout_s, self._time_out, sequence)

    def remove(self, sequence: OpenSequence) -> None:
        """Lets go of the sequence: it is nowhere now."""
        sequence.move(self, None)
        self.cancel(sequence)

    def cancel(self, sequence: OpenSequence) -> None:
        self._timers.pop(sequence).cancel()
        taken = self._taken[sequence.request.tenant]
        taken.num -= 1
        taken.num_promised -= not sequence.may_move
        if not taken.num:
            del self._taken[sequence.request.tenant]

    def _time_out(self, sequence: OpenSequence) -> None:
        self.remove(sequence)
        self._on_timeout(sequence)
