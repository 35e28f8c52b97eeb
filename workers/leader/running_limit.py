"""Limits the sequences of one tenant in an engine; further ones wait before they enter the engine.

A beam search takes a place for each of its beams, or all places if it has more beams.
"""

from __future__ import annotations

from collections import defaultdict, deque

from ..wire.messages import SequenceRequest


class RunningLimit:
    """Holds sequences whose tenants have no place left in the engine, by the engine's ids."""

    def __init__(self, num_places: int | None) -> None:
        """`num_places`: of each tenant; None: no limit."""
        assert num_places is None or num_places > 0
        self._num_places = num_places
        self._inside: dict[int, SequenceRequest] = {}  # in the engine
        self._num_used: defaultdict[str, int] = defaultdict(int)
        self._held: dict[int, SequenceRequest] = {}
        self._queues: defaultdict[str, deque[int]] = defaultdict(deque)  # the oldest first; some may have left
        self.num_held_tokens = 0  # of prompts

    @property
    def num_held(self) -> int:
        return len(self._held)

    def is_placed(self, engine_id: int) -> bool:
        """Whether the sequence is in the engine."""
        return engine_id in self._inside

    def is_held(self, engine_id: int) -> bool:
        return engine_id in self._held

    def enter(self, request: SequenceRequest) -> bool:
        """Whether the sequence may go to the engine now. Else it is held until `leave` or `change` returns it."""
        if request.tenant not in self._queues and self._has_place(request):
            self._take_place(request)
            return True
        self._held[request.sequence_id] = request
        self._queues[request.tenant].append(request.sequence_id)
        self.num_held_tokens += len(request.prompt_token_ids)
        return False

    def leave(self, engine_id: int) -> list[SequenceRequest]:
        """The sequence has ended, here or in the engine. Returns those that get its places and must go to the engine.

        Unknown ids are ignored.
        """
        held = self._held.pop(engine_id, None)
        if held is not None:
            self.num_held_tokens -= len(held.prompt_token_ids)
            return self._take_places(held.tenant)  # a search may have waited for several places
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
        tenants = dict.fromkeys([request.tenant for request in self._held.values()])
        freed = [request for tenant in tenants for request in self._take_places(tenant)]
        return sorted(freed, key=lambda request: request.sequence_id)

    def check_integrity(self) -> None:
        """Raises AssertionError if a place is miscounted, or a sequence waits while there is one."""
        counted: dict[str, int] = {}
        for request in self._inside.values():
            counted[request.tenant] = counted.get(request.tenant, 0) + _num_beams(request)
        assert counted == self._num_used, "places are miscounted"
        for queue in self._queues.values():
            oldest = next((self._held[engine_id] for engine_id in queue if engine_id in self._held), None)
            assert oldest is not None and not self._has_place(oldest), "a place is free"
        assert self._held.keys() <= {engine_id for queue in self._queues.values() for engine_id in queue}
        assert self.num_held_tokens == sum(len(held.prompt_token_ids) for held in self._held.values())

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
            del self._held[following.sequence_id]
            self.num_held_tokens -= len(following.prompt_token_ids)
            self._take_place(following)
            placed.append(following)
        self._next_of(tenant)
        return placed

    def _next_of(self, tenant: str) -> SequenceRequest | None:
        """The tenant's oldest held sequence; None: there is none."""
        queue = self._queues.get(tenant)
        while queue:
            held = self._held.get(queue[0])
            if held is not None:
                return held
            queue.popleft()
        self._queues.pop(tenant, None)
        return None


def _num_beams(request: SequenceRequest) -> int:
    return 1 if request.beams is None else request.beams.width
