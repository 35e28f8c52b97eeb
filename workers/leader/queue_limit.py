"""A bound on the sequences of a gang that have no token yet, and for how long they have waited.

A leader that took all that comes would hold it in memory, and serve it when its clients have long gone. If one tenant
could fill the queue, everybody else would be refused, so each may have a share of it. And where several fill it
together, the tenant with the longest queue gives up its newest for one with a shorter one: longest queue drop (Suter et
al., INFOCOM 1998). So no tenant is refused because of another's longer queue.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import heappush, heapreplace
from typing import NamedTuple

from ..fairness.tenant_counters import MaxQueue
from ..wire.messages import RefusalReason, SequenceError, SequenceRequest
from .served_engine import LeaderConfig

# Limits the sequences of one tenant in an engine; further ones wait before they enter the engine.
#
# A beam search takes a place for each of its beams, or all places if it has more beams.


class RunningLimit:
    """Holds sequences whose tenants have no place left in the engine, by the engine's ids."""

    def __init__(self, num_places: int | None) -> None:
        """`num_places`: of each tenant; None: no limit."""
        assert num_places is None or num_places > 0
        self._num_places = num_places
        self._inside: dict[int, SequenceRequest] = {}  # in the engine
        self._num_used: defaultdict[str, int] = defaultdict(int)
        self._pending: dict[int, SequenceRequest] = {}
        self._queues: defaultdict[str, deque[int]] = defaultdict(deque)  # the oldest first; some may have left
        self.num_held_tokens = 0  # of prompts

    @property
    def num_held(self) -> int:
        return len(self._pending)

    def is_placed(self, engine_id: int) -> bool:
        """Whether the sequence is in the engine."""
        return engine_id in self._inside

    def is_held(self, engine_id: int) -> bool:
        return engine_id in self._pending

    def enter(self, request: SequenceRequest) -> bool:
        """Whether the sequence may go to the engine now. Else it is held until `leave` or `change` returns it."""
        if request.tenant not in self._queues and self._has_place(request):
            self._take_place(request)
            return True
        self._pending[request.sequence_id] = request
        self._queues[request.tenant].append(request.sequence_id)
        self.num_held_tokens += len(request.prompt_token_ids)
        return False

    def leave(self, engine_id: int) -> list[SequenceRequest]:
        """The sequence has ended, here or in the engine. Returns those that get its places and must go to the engine.

        Unknown ids are ignored.
        """
        request = self._pending.pop(engine_id, None)
        if request is not None:
            self.num_held_tokens -= len(request.prompt_token_ids)
            return self._take_places(request.tenant)  # a search may have waited for several places
        ended = self._inside.pop(engine_id, None)
        if ended is None:
            return []
        self._num_used[ended.tenant] -= _num_beams(ended)
        if not self._num_used[ended.tenant]:
            del self._num_used[ended.tenant]
        return self._take_places(ended.tenant)

    def change(self, num_places: int | None) -> list[SequenceRequest]:
        """Sets the number of each tenant's places. Returns the sequences that must go to the engine, the oldest first.

        Sequences beyond a lower limit stay in the engine, and no others follow until they have ended.
        """
        assert num_places is None or num_places > 0
        self._num_places = num_places
        tenants = dict.fromkeys([request.tenant for request in self._pending.values()])
        freed = [request for tenant in tenants for request in self._take_places(tenant)]
        return sorted(freed, key=lambda request: request.sequence_id)

    def check_integrity(self) -> None:
        """Raises AssertionError if a place is miscounted, or a sequence waits while there is one."""
        counted: dict[str, int] = {}
        for request in self._inside.values():
            counted[request.tenant] = counted.get(request.tenant, 0) + _num_beams(request)
        assert counted == self._num_used, "places are miscounted"
        for queue in self._queues.values():
            oldest = next((self._pending[engine_id] for engine_id in queue if engine_id in self._pending), None)
            assert oldest is not None and not self._has_place(oldest), "a place is free"
        assert self._pending.keys() <= {engine_id for queue in self._queues.values() for engine_id in queue}
        assert self.num_held_tokens == sum(len(pending.prompt_token_ids) for pending in self._pending.values())

    def _has_place(self, request: SequenceRequest) -> bool:
        if self._num_places is None:
            return True
        num_used = self._num_used.get(request.tenant, 0)
        return num_used < self._num_places and num_used + min(_num_beams(request), self._num_places) <= self._num_places

    def _take_place(self, request: SequenceRequest) -> None:
        self._inside[request.sequence_id] = request
        self._num_used[request.tenant] += _num_beams(request)

    def _take_places(self, tenant: str) -> list[SequenceRequest]:
        """Gives the tenant's free places to its waiting sequences, the oldest first. Returns these."""
        placed = list[SequenceRequest]()
        while (following := self._next_of(tenant)) is not None and self._has_place(following):
            self._queues[tenant].popleft()
            del self._pending[following.sequence_id]
            self.num_held_tokens -= len(following.prompt_token_ids)
            self._take_place(following)
            placed.append(following)
        self._next_of(tenant)
        return placed

    def _next_of(self, tenant: str) -> SequenceRequest | None:
        """The tenant's oldest held sequence; None: there is none."""
        queue = self._queues.get(tenant)
        while queue:
            request = self._pending.get(queue[0])
            if request is not None:
                return request
            queue.popleft()
        self._queues.pop(tenant, None)
        return None


def _num_beams(request: SequenceRequest) -> int:
    return 1 if request.beams is None else request.beams.width


class _Waiting(NamedTuple):
    tenant: str
    num_tokens: int
    arrived_at: float


_MAX_GIVEN_UP = 64  # sequences, for one that comes


@dataclass(slots=True)
class _Count:
    num_sequences: int = 0
    num_tokens: int = 0
    weight: float = 1.0
    waiting: dict[int, None] = field(default_factory=dict)  # ids, the oldest first
    may_go: dict[int, None] = field(default_factory=dict)  # ids of those that may be given up, the newest last


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
        self._fullest = MaxQueue(self._filled_of)  # by how much of the queue they have, by weight
        for tenant in self._tenants:
            self._fullest.increased(tenant)

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    def oldest_s(self, now: float) -> float:
        """For how long the oldest sequence has waited; 0: none waits."""
        return now - next(iter(self._waiting.values())).arrived_at if self._waiting else 0.0

    def waited_s(self, engine_id: int, now: float) -> float:
        """For how long this sequence has waited; 0: it does not wait."""
        waiting = self._waiting.get(engine_id)
        return 0.0 if waiting is None else now - waiting.arrived_at

    def refusal(self, tenant: str, num_tokens: int, now: float, times: int = 1) -> SequenceError | None:
        """Why a tenant's sequence of `num_tokens` may not wait here; None: it may.

        `times`: by which the bounds are raised. The error says to come back after as long as the tenant's own
        oldest sequence has waited so far, 0 if none does: how long those of others have is their affair.
        """
        config, num_waiting, count = self._config, len(self._waiting), self._tenants.get(tenant, _Count())
        reason: RefusalReason = "full"
        if num_waiting >= times * config.max_waiting_sequences:
            # Without a number, which would show other tenants' load.
            problem = "the limit of sequences that wait for their first token is reached"
        elif num_waiting and self._num_tokens + num_tokens > times * config.max_waiting_tokens:
            problem = f"with {num_tokens} tokens more, more would wait for their first token than may"
        elif (tenant_problem := self._tenant_problem(count, num_tokens, times)) is not None:
            reason, problem = "tenant_full", tenant_problem
        else:
            return None
        whose = "the gang's queue" if reason == "full" else "the tenant's share of the gang's queue"
        return SequenceError(
            "overloaded",
            f"{whose} is full: {problem}; try again later",
            retry_after_s=self.waited_s(next(iter(count.waiting)), now) if count.waiting else 0.0,
            reason=reason,
        )

    def make_room(self, tenant: str, num_tokens: int, weight: float) -> list[int]:
        """Sequences of others to give up, so that a tenant's sequence of `num_tokens` may wait here.

        They are the newest of the tenant with most waiting by its weight, as long as that is more than this tenant will
        have. They are not counted here any more. Empty, and nothing changed, if that is not enough.

        No more than a few are given up at once. If others still have more, this sequence may wait above the bound:
        more sequences leave than come then, so only a few are ever above it.
        """
        count, config = self._tenants.get(tenant, _Count()), self._config
        if self._tenant_problem(count, num_tokens, 1) is not None:
            return []
        filled = self.filled(count.num_sequences + 1, count.num_tokens + num_tokens, weight)
        queues: list[_Queue] = []  # of those that were fullest
        looked_at: list[str] = []
        given_up: list[int] = []
        left_sequences, left_tokens = len(self._waiting), self._num_tokens
        while left_sequences >= config.max_waiting_sequences or (
            left_sequences and left_tokens + num_tokens > config.max_waiting_tokens
        ):
            while self._fullest.largest() > max(filled, queues[0].filled if queues else 0.0):
                looked_at.append(self._fullest.pop())
                if looked_at[-1] != tenant:
                    heappush(queues, _Queue(self, self._tenants[looked_at[-1]]))
            if not queues or queues[0].filled <= filled:
                given_up = []
                break
            if len(given_up) == _MAX_GIVEN_UP:
                break
            newest = queues[0].take(self._waiting)
            given_up.append(newest)
            left_sequences, left_tokens = left_sequences - 1, left_tokens - self._waiting[newest].num_tokens
            heapreplace(queues, queues[0])
        for whose in looked_at:
            self._fullest.increased(whose)
        for engine_id in given_up:
            self.leave(engine_id)
        return given_up

    def enter(
        self, engine_id: int, tenant: str, num_tokens: int, now: float, weight: float = 1.0, may_go: bool = True
    ) -> None:
        """`may_go`: it may be given up for another tenant's: no client was promised more of it."""
        assert engine_id not in self._waiting
        self._waiting[engine_id] = _Waiting(tenant, num_tokens, now)
        self._num_tokens += num_tokens
        count = self._tenants.setdefault(tenant, _Count())
        count.num_sequences += 1
        count.num_tokens += num_tokens
        count.weight = weight
        count.waiting[engine_id] = None
        if may_go:
            count.may_go[engine_id] = None
        self._fullest.increased(tenant)

    def leave(self, engine_id: int) -> None:
        """The sequence has a token, has ended or was cancelled. Ids that are not here are ignored."""
        entry = self._waiting.pop(engine_id, None)
        if entry is None:
            return
        self._num_tokens -= entry.num_tokens
        count = self._tenants[entry.tenant]
        count.num_sequences -= 1
        count.num_tokens -= entry.num_tokens
        count.may_go.pop(engine_id, None)
        del count.waiting[engine_id]
        if not count.num_sequences:
            del self._tenants[entry.tenant]
            self._fullest.remove(entry.tenant)

    def check_integrity(self) -> None:
        """Raises AssertionError if sequences or tokens are miscounted."""
        counted: dict[str, list[_Waiting]] = {}
        for waiting in self._waiting.values():
            counted.setdefault(waiting.tenant, []).append(waiting)
        assert counted.keys() == self._tenants.keys()
        for tenant, count in self._tenants.items():
            assert count.num_sequences == len(counted[tenant])
            assert count.num_tokens == sum(waiting.num_tokens for waiting in counted[tenant])
            assert [*count.waiting] == [each for each, waiting in self._waiting.items() if waiting.tenant == tenant]
            assert all(self._waiting[engine_id].tenant == tenant for engine_id in count.may_go)
        assert self._num_tokens == sum(count.num_tokens for count in self._tenants.values())

    def filled(self, num_sequences: int, num_tokens: int, weight: float) -> float:
        """How much of the queue this is, by the bound that it is nearest to, for a tenant of this weight."""
        config = self._config
        return max(num_sequences / config.max_waiting_sequences, num_tokens / config.max_waiting_tokens) / weight

    def _filled_of(self, tenant: str) -> float:
        """How much of the queue it has, if it can give up any of it."""
        use = self._tenants.get(tenant)
        return self.filled(use.num_sequences, use.num_tokens, use.weight) if use is not None and use.may_go else 0.0

    def _tenant_problem(self, count: _Count, num_tokens: int, times: int) -> str | None:
        if count.num_sequences >= times * self._tenant_sequences:
            return f"{count.num_sequences} sequences of this tenant wait for their first token, and no more may"
        if count.num_sequences and count.num_tokens + num_tokens > times * self._tenant_tokens:
            return (
                f"sequences of {count.num_tokens} tokens of this tenant wait for their first token: {num_tokens} more "
                f"would be over {times * self._tenant_tokens}"
            )
        return None


class _Queue:
    """What would be left of a tenant's waiting sequences; the fullest comes first."""

    def __init__(self, limit: QueueLimit, count: _Count) -> None:
        self._limit, self._weight = limit, count.weight
        self._num_sequences, self._num_tokens = count.num_sequences, count.num_tokens
        self._newest = reversed(count.may_go)
        self.filled = limit.filled(self._num_sequences, self._num_tokens, self._weight)
        self._next: int | None = next(self._newest)

    def __lt__(self, other: _Queue) -> bool:
        return self.filled > other.filled

    def take(self, waiting: Mapping[int, _Waiting]) -> int:
        """The newest that is left, without which it is less full. With none left to take it counts as empty."""
        newest = self._next
        assert newest is not None
        self._num_sequences, self._num_tokens = self._num_sequences - 1, self._num_tokens - waiting[newest].num_tokens
        self._next = next(self._newest, None)
        self.filled = (
            self._limit.filled(self._num_sequences, self._num_tokens, self._weight) if self._next is not None else 0.0
        )
        return newest
