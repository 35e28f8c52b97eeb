"""Heartbeats of the launches that share a registry, and one secret of their routers and gangs.

A launch is one application on one cluster. Several share a registry while one cluster takes over from another. Each
gives its own API keys, which are deleted when its heartbeats have stopped for long. Each router measures that by its
own clock, from one heartbeat to the next, so that neither clocks that differ nor an outage of Redis expire a living
launch.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from redis.asyncio import Redis

from .redis_deadline import answered_within
from .registry_keys import CLUSTER_TOKEN, LAUNCHES, ROLLOUTS, bind_script


class Launches:
    """The launches of one registry. Raises RegistryUnavailable as `Registry` does."""

    def __init__(self, client: Redis) -> None:
        self._client: Any = client
        self._heartbeat = bind_script(client, "count_heartbeat.lua", allow_oom=True)
        self._set_once = bind_script(client, "set_once.lua", allow_oom=True)

    async def heartbeat(self, owner: str) -> dict[str, int]:
        """Counts one more heartbeat of the launch; returns how many there were of each launch."""
        async with answered_within():
            words = await self._heartbeat(launches=LAUNCHES, launch=owner)
        return {launch: int(count) for launch, count in zip(words[::2], words[1::2], strict=True)}

    async def forget(self, owner: str) -> None:
        """Removes an expired launch."""
        async with answered_within():
            await self._client.hdel(LAUNCHES, owner)
            await self._client.hdel(ROLLOUTS, owner)

    async def shared_token(self, token: str) -> str:
        """The secret of routers and gangs of all launches: `token`, if there was none yet."""
        async with answered_within():
            held: str | None = await self._set_once(key=CLUSTER_TOKEN, value=token)
        return token if held is None else held


@dataclass
class ExpiredLaunches:
    """Which launches have sent no heartbeat for long. Times are seconds of any steady clock."""

    expires_after_s: float
    longest_gap_s: float  # between two calls of `observe`; after a longer gap all launches are observed from the start
    _seen: dict[str, tuple[int, float]] = field(default_factory=dict)  # number of heartbeats, and when it last grew
    _observed_at: float | None = None

    def observe(self, heartbeats: dict[str, int], now: float) -> Collection[str]:
        """Takes in how many heartbeats each launch has sent, and returns the launches that have expired."""
        if self._observed_at is None or now - self._observed_at > self.longest_gap_s:
            self._seen.clear()
        self._observed_at = now
        self._seen = {
            launch: self._seen[launch] if self._seen.get(launch, (-1, 0.0))[0] == count else (count, now)
            for launch, count in heartbeats.items()
        }
        return [launch for launch, (_, since) in self._seen.items() if now - since >= self.expires_after_s]
