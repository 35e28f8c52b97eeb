"""All gangs that one router knows of. Each new sequence goes to one of them, by the policy of `affinity.py`."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace

from ...workers.wire.messages import AdapterRef
from ...workers.wire.page_keys import first_link, next_keys, short_key
from .admission import AdmissionConfig, Admitted, admit
from .affinity import GangView, RoutingConfig, RoutingRequest, choose_gang
from .leader_connection import FaultKind, LeaderConnection
from .open_sequence import OpenSequence

_MAX_ROUTED_PAGES = 2048  # of a prompt; the pages after them are not looked at


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
    ) -> None:
        """`adapter_pages`: how many pages an adapter takes in a gang's pool. `on_connect`: one more gang can be chosen.

        `on_lost` gets the sequences of a gang that was lost, and the reason. `on_orphans`: a gang has begun to keep
        sequences for any router that asks.
        """
        self._token = token
        self._routing = routing
        self._adapter_pages = adapter_pages
        self._admission = admission
        self._objectives_s = dict(self._admission.latency_objectives_s)  # by tenant
        self._on_connect = on_connect
        self._on_lost = on_lost
        self._on_orphans = on_orphans
        self.num_faults: Counter[FaultKind] = Counter()  # gangs that were lost without having been told to go
        self._connections: dict[str, LeaderConnection] = {}

    def update(self, addresses: Mapping[str, str]) -> None:
        """Makes these the gangs: connects to new ones, and lets gangs that are not named finish their sequences.

        The address of a key never changes: a gang that replaces another one has a new key.
        """
        for key in self._connections.keys() - addresses.keys():
            self._connections.pop(key).retire()
        for key in addresses.keys() - self._connections.keys():
            connection = LeaderConnection(
                addresses[key],
                self._token,
                self._routing,
                self._on_connect,
                self._on_lost,
                self._on_orphans,
                lambda kind: self.num_faults.update([kind]),
            )
            self._connections[key] = connection
            connection.start()

    @property
    def connected(self) -> list[LeaderConnection]:
        """Connections to gangs that take sequences now."""
        return [connection for connection in self._connections.values() if connection.info is not None]

    def holds(self, sequence_key: str) -> bool:
        """A connected gang keeps the sequence with this key for any router that asks, or computes it for this one."""
        return any(connection.known.holds(sequence_key) for connection in self.connected)

    def submit(self, sequence: OpenSequence) -> bool:
        """Sends the sequence to the gang that suits it best. False, and nothing done, if no gang is connected.

        A new sequence ends with the error "overloaded" if no gang can serve it in time.
        """
        adapter = sequence.request.adapter
        request = RoutingRequest(
            None if adapter is None else adapter.digest,
            sequence.num_tokens,
            0 if adapter is None else self._adapter_pages(adapter),
            random.getrandbits(32),
        )
        connections = {key: c for key, c in self._connections.items() if c.info is not None}
        page_keys: dict[int, list[int]] = {}  # by block size, in which gangs may differ during a rolling update
        views: dict[str, GangView] = {}
        for key, connection in connections.items():
            num_cached_tokens = 0
            if len(connections) > 1 or sequence.limit.timeout_s is not None or self._objective_s(sequence) is not None:
                block_size = connection.block_size
                if block_size not in page_keys:
                    page_keys[block_size] = _page_keys(sequence, block_size)
                num_cached_tokens = block_size * connection.known.num_cached_pages(page_keys[block_size])
            views[key] = connection.known.view(key, request.digest, num_cached_tokens, sequence.request.key)
        if not views:
            return False
        chosen = self._choose(sequence, request, views)
        if chosen is None:
            return True
        connection = connections[chosen]
        left = replace(request, num_tokens=request.num_tokens - views[chosen].num_cached_tokens)
        connection.submit(sequence, left, page_keys.get(connection.block_size, ()))
        return True

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
        connections, self._connections = self._connections, {}
        await asyncio.gather(*(connection.close() for connection in connections.values()))


def _page_keys(sequence: OpenSequence, block_size: int) -> list[int]:
    """Short keys of the prompt's full pages, without the last token: at least that one has to be computed."""
    token_ids = sequence.request.prompt_token_ids
    num_keys = min((len(token_ids) - 1) // block_size, _MAX_ROUTED_PAGES)
    return [short_key(key) for key in next_keys(first_link(sequence.request), token_ids, 0, block_size, num_keys)]
