"""Sequences that a router has not sent, or must send again, and that wait a bounded time for a gang."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

from ..fairness.queue_use import QueueUse, is_in_share, tenant_to_preempt
from .open_sequence import OpenSequence


class UnsentSequences:
    """A `SequencePlace`. Iterates over its sequences in the order of their arrival. Belongs to one event loop."""

    def __init__(self, timeout_s: float, on_timeout: Callable[[OpenSequence], None]) -> None:
        """`on_timeout` gets a sequence that has waited for `timeout_s`, and has no place any more."""
        self._timeout_s, self._on_timeout = timeout_s, on_timeout
        self._timers: dict[OpenSequence, asyncio.TimerHandle] = {}
        self._uses: dict[str, QueueUse] = {}  # by tenant

    def __len__(self) -> int:
        return len(self._timers)

    def __iter__(self) -> Iterator[OpenSequence]:
        return iter([*self._timers])

    def num_of(self, tenant: str) -> int:
        return self._uses[tenant].num if tenant in self._uses else 0

    def has_room(self, sequence: OpenSequence, num_places: int) -> tuple[bool, OpenSequence | None]:
        """Whether the sequence may be added, and which other one is given up for it, if any.

        `num_places`: for all tenants. A tenant that is within its share of them is admitted in any case.
        """
        if len(self) < num_places:
            return True, None
        tenant, weight = sequence.request.tenant, sequence.request.weight
        preempted = tenant_to_preempt(tenant, weight, self._uses)
        if preempted is None:
            return is_in_share(tenant, weight, self._uses, num_places), None
        return True, next(one for one in reversed(self._timers) if one.request.tenant == preempted and one.may_move)

    def add(self, sequence: OpenSequence) -> None:
        """Adds a sequence that has no place."""
        sequence.move(None, self)
        use = self._uses.setdefault(sequence.request.tenant, QueueUse())
        use.num += 1
        use.num_committed += not sequence.may_move
        use.weight = sequence.request.weight
        self._timers[sequence] = asyncio.get_running_loop().call_later(self._timeout_s, self._time_out, sequence)

    def remove(self, sequence: OpenSequence) -> None:
        """Removes the sequence, which has no place then."""
        sequence.move(self, None)
        self.cancel(sequence)

    def cancel(self, sequence: OpenSequence) -> None:
        self._timers.pop(sequence).cancel()
        use = self._uses[sequence.request.tenant]
        use.num -= 1
        use.num_committed -= not sequence.may_move
        if not use.num:
            del self._uses[sequence.request.tenant]

    def _time_out(self, sequence: OpenSequence) -> None:
        self.remove(sequence)
        self._on_timeout(sequence)
