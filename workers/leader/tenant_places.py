"""A bound on the sequences that an engine has of one tenant at once; further ones wait in front of the engine."""

from __future__ import annotations

from collections import defaultdict, deque

from ..wire.messages import SequenceRequest


class TenantPlaces:
    """Holds the sequences beyond their tenants' places in the engine, by the engine's ids."""

    def __init__(self, num_places: int | None) -> None:
        """`num_places`: of each tenant; None: there is no bound."""
        assert num_places is None or num_places > 0
        self._num_places = num_places
        self._tenants: dict[int, str] = {}  # whose sequence it is, of those in the engine
        self._num_used: defaultdict[str, int] = defaultdict(int)
        self._held: dict[int, SequenceRequest] = {}
        self._queues: defaultdict[str, deque[int]] = defaultdict(deque)  # the oldest first; some may have left
        self.num_held_tokens = 0  # of prompts

    @property
    def num_held(self) -> int:
        return len(self._held)

    def is_placed(self, engine_id: int) -> bool:
        """The sequence is in the engine, and was not given up."""
        return engine_id in self._tenants

    def is_held(self, engine_id: int) -> bool:
        return engine_id in self._held

    def enter(self, request: SequenceRequest) -> bool:
        """Whether the sequence may go to the engine now. Else it is held until `leave` or `change` returns it."""
        if self._has_place(request.tenant):
            self._take_place(request)
            return True
        self._held[request.sequence_id] = request
        self._queues[request.tenant].append(request.sequence_id)
        self.num_held_tokens += len(request.prompt_token_ids)
        return False

    def leave(self, engine_id: int) -> SequenceRequest | None:
        """The sequence has ended, here or in the engine. Returns the one that gets its place and must go to the engine.

        Unknown ids are ignored.
        """
        held = self._held.pop(engine_id, None)
        if held is not None:
            self.num_held_tokens -= len(held.prompt_token_ids)
        tenant = self._tenants.pop(engine_id, None)
        if tenant is None:
            return None
        self._num_used[tenant] -= 1
        if not self._num_used[tenant]:
            del self._num_used[tenant]
        following = self._next_of(tenant) if self._has_place(tenant) else None
        if following is not None:
            self._take_place(following)
        return following

    def change(self, num_places: int | None) -> list[SequenceRequest]:
        """Sets the number of each tenant's places. Returns the sequences that must go to the engine, the oldest first.

        If a tenant has more sequences in the engine, they stay there, and none follows until they are fewer.
        """
        assert num_places is None or num_places > 0
        self._num_places = num_places
        freed = []
        for request in [*self._held.values()]:
            if self._has_place(request.tenant):
                following = self._next_of(request.tenant)
                assert following is not None, "it is the oldest of its tenant that is held"
                self._take_place(following)
                freed.append(following)
        return freed

    def check_integrity(self) -> None:
        """Raises AssertionError if a place is miscounted, or a sequence waits while there is one."""
        counted: dict[str, int] = {}
        for tenant in self._tenants.values():
            counted[tenant] = counted.get(tenant, 0) + 1
        assert counted == self._num_used, "places are miscounted"
        assert not any(self._has_place(held.tenant) for held in self._held.values()), "a place is free"
        assert self._held.keys() <= {engine_id for queue in self._queues.values() for engine_id in queue}
        assert self.num_held_tokens == sum(len(held.prompt_token_ids) for held in self._held.values())

    def _has_place(self, tenant: str) -> bool:
        return self._num_places is None or self._num_used.get(tenant, 0) < self._num_places

    def _take_place(self, request: SequenceRequest) -> None:
        self._tenants[request.sequence_id] = request.tenant
        self._num_used[request.tenant] += 1

    def _next_of(self, tenant: str) -> SequenceRequest | None:
        queue = self._queues.get(tenant, deque())
        while queue:
            held = self._held.pop(queue.popleft(), None)
            if held is not None:
                self.num_held_tokens -= len(held.prompt_token_ids)
                return held
        self._queues.pop(tenant, None)
        return None
