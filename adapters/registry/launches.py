"""What launches that share a registry tell each other: which of them live, and one secret of routers and gangs.

A launch is one application on one cluster. Several share a registry while one cluster takes over from another. Each
gives its own API keys; what it gave goes when it has been silent for long. Silence is counted by whoever listens, from
one beat to the next, so that neither clocks that differ nor an outage of Redis make a living launch look dead.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from redis.asyncio import Redis

from .redis_deadline import answered_within
from .registry_keys import CLUSTER_TOKEN, LAUNCHES


class Launches:
    """The launches of one registry. Raises RegistryUnavailable as `Registry` does."""

    def __init__(self, client: Redis, timeout_s: float = 3.0) -> None:
        self._client: Any = client
        self._timeout_s = timeout_s

    async def beat(self, owner: str) -> dict[str, int]:
        """Says that the launch lives; the number of beats of each launch."""
        async with answered_within(self._timeout_s):
            transaction = self._client.pipeline(transaction=True)
            transaction.hincrby(LAUNCHES, owner, 1).hgetall(LAUNCHES)
            _, beats = await transaction.execute()
        return {launch: int(count) for launch, count in beats.items()}

    async def forget(self, owner: str) -> None:
        """The launch is gone: nobody listens for it any more."""
        async with answered_within(self._timeout_s):
            await self._client.hdel(LAUNCHES, owner)

    async def shared_token(self, token: str) -> str:
        """The secret of routers and gangs of all launches: `token`, if there was none yet."""
        async with answered_within(self._timeout_s):
            held: str | None = await self._client.set(CLUSTER_TOKEN, token, nx=True, get=True)
        return token if held is None else held


@dataclass
class SilentLaunches:
    """Which launches have been silent for long, as one listener knows. Times are seconds of any steady clock."""

    silence_s: float  # after which a launch is given up
    longest_gap_s: float  # between two times of listening; after a longer one all silence counts from anew
    _heard: dict[str, tuple[int, float]] = field(default_factory=dict)  # beats, and when they were first seen
    _listened_at: float | None = None

    def hear(self, beats: dict[str, int], now: float) -> Collection[str]:
        """Takes in the beats of all launches. Those that have been silent for `silence_s`."""
        if self._listened_at is None or now - self._listened_at > self.longest_gap_s:
            self._heard.clear()
        self._listened_at = now
        self._heard = {
            launch: self._heard[launch] if self._heard.get(launch, (-1, 0.0))[0] == count else (count, now)
            for launch, count in beats.items()
        }
        return [launch for launch, (_, since) in self._heard.items() if now - since >= self.silence_s]
