"""All gangs that one router knows of. Each new sequence goes to one of them, by the policy of `affinity.py`."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice

from ...workers.wire.engine_load import ServedElsewhere, TenantShare
from ...workers.wire.messages import AdapterRef, Outdated, SequenceError
from ...workers.wire.page_keys import KeyChain, PageKey, short_key
from .admission import AdmissionConfig, Admitted, admit
from .affinity import GangView, RoutingConfig, RoutingRequest, choose_gang
from .fair_queue import FleetShares
from .leader_connection import FaultKind, LeaderConnection
from .open_sequence import OpenSequence
from .relocator import Relocator

_MAX_ROUTED_PAGES = 2048  # of a prompt; later pages are ignored
_MAX_EXAMINED = 1024  # tenants of a gang in one message about their service elsewhere
_SERVED_INTERVAL_S = 0.25  # between two messages to a gang about its tenants' service elsewhere
STORE_PAUSE_S = 2.0  # for which other gangs are preferred after a gang could not read an adapter


class Fleet:
    """Connections to the gangs that `update` names. Belongs to one event loop."""

    def __init__(
        self,
        token: str,
        routing: RoutingConfig,
        admission: AdmissionConfig,
        adapter_pages: Callable[[AdapterRef], int],
        on_connect: Callable[[], None],
        on_lost: Callable[[list[OpenSequence], str], None],
        on_orphans: Callable[[], None] = lambda: None,
        on_unplaced: Callable[[OpenSequence], None] = lambda sequence: None,
        on_store_failure: Callable[[OpenSequence, SequenceError], None] = lambda sequence, error: sequence.refuse(
            error
        ),
    ) -> None:
        """`adapter_pages`: how many pages an adapter takes in a gang's pool. `on_connect`: one more gang can be chosen.

        `on_lost` gets the sequences of a gang that was lost, and the reason. `on_orphans`: a gang has begun to keep
        sequences for any router that asks. `on_unplaced` gets a sequence that was to move to a gang that
        is gone. `on_store_failure` gets a sequence whose gang cannot read its adapter, and its error;
        the gang is not chosen for it again before the others have tried as often.
        """
        self._token = token
        self._routing = routing
        self._adapter_pages = adapter_pages
        self._admission, self._objectives_s = admission, dict(admission.latency_objectives_s)  # by tenant
        self._on_connect = on_connect
        self._on_lost = on_lost
        self._on_orphans, self._on_unplaced = on_orphans, on_unplaced
        self._num_moved = 0
        self._on_store_failure = on_store_failure
        self._store_failed_at: dict[str, float] = {}  # by gang: when it could not read an adapter, for the last time
        self.num_faults: Counter[FaultKind] = Counter()  # gangs that were lost by a fault and not by being stopped
        self._connections: dict[str, LeaderConnection] = {}
        self._relocator = Relocator(self._connections, adapter_pages)
        self._shares = FleetShares()
        self._gang_ids: dict[str, str] = {}  # by key: the process that reported shares there last
        self._next_served_at: dict[str, float] = {}  # by key: when the next message about service elsewhere is due

    def update(self, addresses: Mapping[str, str]) -> None:
        """Makes these the gangs: connects to new ones, and lets gangs that are not named finish their sequences.

        The address of a key never changes: a gang that replaces another one has a new key.
        """
        for key in [key for key in self._connections if key not in addresses]:
            self._forget_shares(key)
            self._connections.pop(key).retire()
            self._store_failed_at.pop(key, None)
        for key in [key for key in addresses if key not in self._connections]:
            connection = LeaderConnection(
                addresses[key],
                self._token,
                self._routing,
                self._on_connect,
                self._on_lost,
                self._found_orphans,
                lambda kind: self.num_faults.update([kind]),
                on_load=partial(self._on_load, key),
                on_withdrawn=self._withdrawn,
                on_store_failure=partial(self._lose_store, key),
            )
            self._connections[key] = connection
            connection.start()

    def _on_load(self, key: str, shares: Sequence[TenantShare]) -> None:
        """Takes in a gang's report of its load and of its tenants' shares."""
        connection = self._connections.get(key)
        if connection is not None and connection.info is not None and (shares or key in self._gang_ids):
            gang_id = connection.info.gang_id
            if self._gang_ids.get(key, gang_id) != gang_id:
                self._forget_shares(key)  # another process has its address
            self._gang_ids[key] = gang_id
            self._shares.receive(gang_id, shares)
            self._send_served(key, connection)
        self._relocator.run_round()

    def _send_served(self, key: str, connection: LeaderConnection) -> None:
        """Sends a gang what its tenants were served at other gangs, if there are others and it is time."""
        now = asyncio.get_running_loop().time()
        if len(self._gang_ids) < 2 or now < self._next_served_at.get(key, now):
            return
        self._next_served_at[key] = now + _SERVED_INTERVAL_S
        reported_last = islice(reversed(connection.known_gang.fair_queue.active), _MAX_EXAMINED)
        if totals := self._shares.take_due(self._gang_ids[key], reported_last):
            connection.send(ServedElsewhere(totals))

    def _forget_shares(self, key: str) -> None:
        self._next_served_at.pop(key, None)
        if (gang_id := self._gang_ids.pop(key, None)) is not None:
            self._shares.forget(gang_id)

    @property
    def connected(self) -> list[LeaderConnection]:
        """Connections to gangs that take sequences now."""
        return [connection for connection in self._connections.values() if connection.info is not None]

    def take_back(self, tenant: str) -> None:
        """`on_lost` gets the tenant's sequences, but for those of gangs that are being replaced."""
        for connection in self.connected:
            connection.take_back(tenant)

    def holds(self, sequence_key: str) -> bool:
        """A connected gang keeps the sequence with this key for any router that asks, or computes it for this one."""
        return any(connection.known_gang.holds(sequence_key) for connection in self.connected)

    def has_untried(self, sequence: OpenSequence) -> bool:
        """A connected gang has not failed to read the sequence's adapter."""
        return any(not sequence.num_store_failures[key] for key, c in self._connections.items() if c.info is not None)

    def submit(self, sequence: OpenSequence) -> bool:
        """Sends the sequence to the gang that suits it best. Returns False if no gang is connected.

        A new sequence ends with the error "overloaded" if no gang can serve it in time.
        """
        request = self._request(sequence)
        connections = self._able(sequence)
        page_keys: dict[int, list[int]] = {}  # by block size, in which gangs may differ during a rolling update
        views: dict[str, GangView] = {}
        for key, connection in connections.items():
            num_cached_tokens = 0
            if len(connections) > 1 or sequence.limit.timeout_s is not None or self._objective_s(sequence) is not None:
                block_size = connection.block_size
                if block_size not in page_keys:
                    page_keys[block_size] = _page_keys(sequence, block_size)
                num_cached_tokens = block_size * connection.known_gang.num_cached_pages(page_keys[block_size])
            views[key] = connection.known_gang.view(
                key,
                request.digest,
                num_cached_tokens,
                sequence.request.key,
                request.tenant,
                request.weight,
                request.is_background,
            )
        if not views:
            return False
        chosen = self._choose(sequence, request, views)
        if chosen is None:
            return True
        connection = connections[chosen]
        uncached_request = replace(request, num_tokens=request.num_tokens - views[chosen].num_cached_tokens)
        connection.submit(sequence, uncached_request, page_keys.get(connection.block_size, ()))
        return True

    def bring(self, sequences: Sequence[OpenSequence], wait_s: float) -> list[str]:
        """Sends sequences of one request to different gangs, the most suitable ones. Returns their ids.

        Fewer if no more are connected: the other sequences are sent nowhere. Each is given up if it still waits after
        `wait_s`, and admitted even if a longer wait is expected.
        """
        if not sequences:
            return []
        request, connections = self._request(sequences[0]), self._able(sequences[0])
        views = {
            key: leader.known_gang.view(key, request.digest, 0, "", request.tenant, request.weight)
            for key, leader in connections.items()
        }
        gang_ids = []
        for sequence in sequences[: len(views)]:
            key = choose_gang(request, [*views.values()], self._routing)
            assert key is not None
            del views[key]
            connection = connections[key]
            assert connection.info is not None
            sequence.stays = True
            sequence.admit(wait_s)
            connection.submit(sequence, request)
            gang_ids.append(connection.info.gang_id)
        return gang_ids

    @property
    def num_moved(self) -> int:
        """How often a sequence has left a gang's queue for another's."""
        return self._num_moved

    def _withdrawn(self, sequence: OpenSequence, target: str) -> None:
        """A sequence has left a gang's queue for that of `target`, as long as this one is there."""
        sequence.leave_queue()
        self._num_moved += 1
        connection = self._connections.get(target)
        if connection is None or connection.info is None:
            self._on_unplaced(sequence)
        else:
            connection.submit(sequence, self._request(sequence))

    def _found_orphans(self, connection: LeaderConnection, keys: Collection[str]) -> None:
        """A gang keeps sequences for any router that asks. Those that this router has elsewhere need not be kept."""
        self._on_orphans()
        other_connections = [other for other in self._connections.values() if other is not connection]
        orphan_keys = frozenset(keys)
        elsewhere = (
            [sequence for other in other_connections for sequence in other.living(orphan_keys)] if orphan_keys else []
        )
        if elsewhere:
            connection.disown([(sequence.request.tenant, sequence.request.key) for sequence in elsewhere])

    def _request(self, sequence: OpenSequence) -> RoutingRequest:
        adapter = sequence.request.adapter
        return RoutingRequest(
            None if adapter is None else adapter.digest,
            sequence.num_tokens,
            0 if adapter is None else self._adapter_pages(adapter),
            random.getrandbits(32),
            sequence.request.tenant,
            sequence.request.weight,
            sequence.request.is_background,
            sequence.request.owner,
        )

    def _able(self, sequence: OpenSequence) -> dict[str, LeaderConnection]:
        """The connected gangs, without those that are less likely than others to be able to read the adapter."""
        connected = {key: c for key, c in self._connections.items() if c.info is not None}
        if sequence.request.adapter is None or not (sequence.num_store_failures or self._store_failed_at):
            return connected
        fewest = min((sequence.num_store_failures[key] for key in connected), default=0)
        least_tried = {key: c for key, c in connected.items() if sequence.num_store_failures[key] == fewest}
        digest, since = sequence.request.adapter.digest, asyncio.get_running_loop().time() - STORE_PAUSE_S
        can_read = {
            key: c
            for key, c in least_tried.items()
            if c.known_gang.has(digest) or self._store_failed_at.get(key, since) <= since
        }
        return can_read or least_tried

    def _lose_store(self, key: str, sequence: OpenSequence, error: SequenceError) -> None:
        if key in self._connections:
            self._store_failed_at[key] = asyncio.get_running_loop().time()
        sequence.lose_store(key)
        self._on_store_failure(sequence, error)

    def change_admission(self, admission: AdmissionConfig) -> None:
        """New sequences are admitted by this configuration."""
        self._admission, self._objectives_s = admission, dict(admission.latency_objectives_s)

    def outdate(self, digest: str) -> None:
        """Notifies the gangs that no name points to the adapter any more."""
        for connection in self._connections.values():
            connection.send(Outdated(digest))

    def _choose(self, sequence: OpenSequence, request: RoutingRequest, views: Mapping[str, GangView]) -> str | None:
        """The key of the gang to send the sequence to; None: it was refused, as only a new sequence may be."""
        gangs = [*views.values()]
        if not sequence.is_new:
            return choose_gang(request, gangs, self._routing)
        objective_s = self._objective_s(sequence)
        verdict = admit(request, sequence.limit, gangs, self._routing, self._admission, objective_s)
        if isinstance(verdict, Admitted):
            sequence.admit(verdict.wait_s)
            return verdict.gang_key
        sequence.refuse(verdict)
        return None

    def _objective_s(self, sequence: OpenSequence) -> float | None:
        return self._objectives_s.get(sequence.request.tenant)

    async def close(self) -> None:
        """Ends all connections."""
        connections = [*self._connections.values()]
        self._connections.clear()
        await asyncio.gather(*(connection.close() for connection in connections))


def _page_keys(sequence: OpenSequence, block_size: int) -> list[int]:
    """Short keys of the prompt's full pages, without the last token: at least that one has to be computed."""
    token_ids = sequence.request.prompt_token_ids
    num_keys = min((len(token_ids) - 1) // block_size, _MAX_ROUTED_PAGES)
    keys: list[PageKey] = []
    KeyChain.of(sequence.request, block_size).extend(keys, token_ids, num_keys)
    return [short_key(key) for key in keys]
