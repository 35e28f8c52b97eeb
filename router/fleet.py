"""All gangs that one router knows of, and which of them a new sequence goes to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from .leader_connection import LeaderConnection
from .open_sequence import OpenSequence


@dataclass(frozen=True)
class LeaderView:
    """What is known of a connected leader at the time of a choice."""

    key: str
    num_running: int  # sequences, of all routers
    num_waiting: int
    num_unseen: int  # sent by this router since the leader last told its load

    @property
    def num_sequences(self) -> int:
        return self.num_running + self.num_waiting + self.num_unseen


def choose_leader(leaders: Sequence[LeaderView]) -> str | None:
    """Key of the leader with the fewest sequences; among equals the first by key. None: there is no leader."""
    if not leaders:
        return None
    return min(leaders, key=lambda leader: (leader.num_sequences, leader.key)).key


class Fleet:
    """Connections to the gangs that `update` names. Belongs to one event loop."""

    def __init__(
        self, token: str, on_connect: Callable[[], None], on_lost: Callable[[list[OpenSequence], str], None]
    ) -> None:
        """`on_connect`: one more gang can be chosen. `on_lost`: sequences whose gang was lost, and why."""
        self._token = token
        self._on_connect = on_connect
        self._on_lost = on_lost
        self._connections: dict[str, LeaderConnection] = {}

    def update(self, addresses: Mapping[str, str]) -> None:
        """Makes these the gangs: connects to new ones, lets those not named finish what they serve.

        Keys name gangs, and a key's address never changes: a replaced gang is a new key.
        """
        for key in self._connections.keys() - addresses.keys():
            self._connections.pop(key).retire()
        for key in addresses.keys() - self._connections.keys():
            connection = LeaderConnection(addresses[key], self._token, self._on_connect, self._on_lost)
            self._connections[key] = connection
            connection.start()

    @property
    def connected(self) -> list[LeaderConnection]:
        """Those that take sequences now."""
        return [connection for connection in self._connections.values() if connection.info is not None]

    def choose(self) -> LeaderConnection | None:
        """The leader for a new sequence; None while no gang is connected."""
        views = [
            LeaderView(key, connection.load.num_running, connection.load.num_waiting, connection.num_unseen)
            for key, connection in self._connections.items()
            if connection.info is not None
        ]
        key = choose_leader(views)
        return None if key is None else self._connections[key]

    async def close(self) -> None:
        """Ends all connections."""
        connections, self._connections = self._connections, {}
        await asyncio.gather(*(connection.close() for connection in connections.values()))
