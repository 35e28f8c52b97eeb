"""All gangs that one router knows of. Each new sequence goes to one of them, by the policy of `affinity.py`."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Mapping

from ..workers.messages import AdapterRef
from .affinity import RoutingConfig, RoutingRequest, choose_gang
from .leader_connection import FaultKind, LeaderConnection
from .open_sequence import OpenSequence


class Fleet:
    """Connections to the gangs that `update` names. Belongs to one event loop."""

    def __init__(
        self,
        token: str,
        routing: RoutingConfig,
        adapter_pages: Callable[[AdapterRef], int],
        on_connect: Callable[[], None],
        on_lost: Callable[[list[OpenSequence], str], None],
        on_orphans: Callable[[], None] = lambda: None,
    ) -> None:
        """`adapter_pages`: that an adapter takes in a gang's pool. `on_connect`: one more gang can be chosen.

        `on_orphans`: a gang has begun to hold sequences for whoever asks.

        `on_lost`: sequences whose gang was lost, and why.
        """
        self._token = token
        self._routing = routing
        self._adapter_pages = adapter_pages
        self._on_connect = on_connect
        self._on_lost = on_lost
        self._on_orphans = on_orphans
        self.num_faults: Counter[FaultKind] = Counter()  # gangs that were lost without having been told to go
        self._connections: dict[str, LeaderConnection] = {}

    def update(self, addresses: Mapping[str, str]) -> None:
        """Makes these the gangs: connects to new ones, lets those not named finish what they serve.

        Keys name gangs, and a key's address never changes: a replaced gang is a new key.
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
        """Those that take sequences now."""
        return [connection for connection in self._connections.values() if connection.info is not None]

    def holds(self, sequence_key: str) -> bool:
        """One of the connected gangs has the sequence with this key, for whoever asks."""
        return any(connection.known.holds(sequence_key) for connection in self.connected)

    def submit(self, sequence: OpenSequence) -> bool:
        """Sends the sequence to the gang that suits it best; False, and nothing done, while no gang is connected."""
        adapter = sequence.request.adapter
        request = RoutingRequest(
            None if adapter is None else adapter.digest,
            sequence.num_tokens,
            0 if adapter is None else self._adapter_pages(adapter),
            random.getrandbits(32),
        )
        views = [
            connection.known.view(key, request.digest, sequence.request.key)
            for key, connection in self._connections.items()
            if connection.info is not None
        ]
        key = choose_gang(request, views, self._routing)
        if key is None:
            return False
        self._connections[key].submit(sequence, request)
        return True

    async def close(self) -> None:
        """Ends all connections."""
        connections, self._connections = self._connections, {}
        await asyncio.gather(*(connection.close() for connection in connections.values()))
