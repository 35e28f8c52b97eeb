"""A bound on the sequences of a gang that have no token yet, and for how long they have waited.

A leader that took all that comes would hold it in memory, and serve it when its clients have long gone. If one tenant
could fill the queue, everybody else would be refused, so each may have a share of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..wire.messages import RefusalReason, SequenceError
from .leader_config import LeaderConfig


class _Waiting(NamedTuple):
    tenant: str
    num_tokens: int
    arrived_at: float


@dataclass(slots=True)
class _Count:
    num_sequences: int = 0
    num_tokens: int = 0


class QueueLimit:
    """Counts the sequences, by the engine's id. `now`: seconds of any clock that never goes back."""

    def __init__(self, config: LeaderConfig) -> None:
        self._waiting: dict[int, _Waiting] = {}  # the oldest first
        self._num_tokens = 0
        self._tenants: dict[str, _Count] = {}  # of whom something waits
        self.change(config)

    def change(self, config: LeaderConfig) -> None:
        """Sequences that come from now on may wait as this config says; those that wait stay."""
        self._config, share = config, config.tenant_queue_share
        self._tenant_sequences = max(1, int(share * config.max_waiting_sequences))
        self._tenant_tokens = int(share * config.max_waiting_tokens)

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    def oldest_s(self, now: float) -> float:
        """For how long the oldest sequence has waited; 0: none waits."""
        return now - next(iter(self._waiting.values())).arrived_at if self._waiting else 0.0

    def refusal(self, tenant: str, num_tokens: int, now: float, times: int = 1) -> SequenceError | None:
        """Why a tenant's sequence of so many tokens may not wait here; None: it may.

        `times`: the bounds are so many times as high. The error says to come back after as long as the oldest sequence
        has waited so far: as long as this one would.
        """
        config, num_waiting, own = self._config, len(self._waiting), self._tenants.get(tenant, _Count())
        reason: RefusalReason = "full"
        if num_waiting >= times * config.max_waiting_sequences:
            problem = f"{num_waiting} sequences wait for their first token, and no more may"
        elif num_waiting and self._num_tokens + num_tokens > times * config.max_waiting_tokens:
            problem = (
                f"sequences of {self._num_tokens} tokens wait for their first token: {num_tokens} more would be over "
                f"{times * config.max_waiting_tokens}"
            )
        elif own.num_sequences >= times * self._tenant_sequences:
            reason = "tenant_full"
            problem = f"{own.num_sequences} sequences of this tenant wait for their first token, and no more may"
        elif own.num_sequences and own.num_tokens + num_tokens > times * self._tenant_tokens:
            reason = "tenant_full"
            problem = (
                f"sequences of {own.num_tokens} tokens of this tenant wait for their first token: {num_tokens} more "
                f"would be over {times * self._tenant_tokens}"
            )
        else:
            return None
        whose = "the gang's queue" if reason == "full" else "the tenant's share of the gang's queue"
        return SequenceError(
            "overloaded",
            f"{whose} is full: {problem}; try again later",
            retry_after_s=self.oldest_s(now),
            reason=reason,
        )

    def enter(self, engine_id: int, tenant: str, num_tokens: int, now: float) -> None:
        assert engine_id not in self._waiting
        self._waiting[engine_id] = _Waiting(tenant, num_tokens, now)
        self._num_tokens += num_tokens
        own = self._tenants.setdefault(tenant, _Count())
        own.num_sequences += 1
        own.num_tokens += num_tokens

    def leave(self, engine_id: int) -> None:
        """The sequence has a token, has ended or was cancelled. Ids that are not here are ignored."""
        left = self._waiting.pop(engine_id, None)
        if left is None:
            return
        self._num_tokens -= left.num_tokens
        own = self._tenants[left.tenant]
        own.num_sequences -= 1
        own.num_tokens -= left.num_tokens
        if not own.num_sequences:
            del self._tenants[left.tenant]

    def check_integrity(self) -> None:
        """Raises AssertionError if sequences or tokens are miscounted."""
        counted: dict[str, _Count] = {}
        for waiting in self._waiting.values():
            own = counted.setdefault(waiting.tenant, _Count())
            own.num_sequences += 1
            own.num_tokens += waiting.num_tokens
        assert counted == self._tenants
        assert self._num_tokens == sum(own.num_tokens for own in counted.values())
