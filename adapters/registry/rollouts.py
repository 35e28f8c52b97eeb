"""The configuration with which an application was whole the last time, and why a newer one was taken back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from redis.asyncio import Redis

from .redis_deadline import answered_within
from .registry_keys import ROLLOUT_LOOK, ROLLOUTS


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """The rollout of one application on one cluster."""

    good: Mapping[str, Any]  # Serve's configuration of the application, as JSON has it
    taken_back: str | None = None  # why a newer one was rolled back; None: none was, or there is a newer one since
    came_back_at: float = 0.0  # Unix seconds: when Serve was given it again
    tried_at: float = 0.0  # when Serve was given the newest configuration
    said: Mapping[str, str] = {}  # what Serve said of each deployment soon after; it may be of the one before


class Rollouts:
    """Raises RegistryUnavailable as `Registry` does."""

    def __init__(self, client: Redis) -> None:
        self._client: Any = client

    async def get(self, cluster: str) -> Rollout | None:
        """None: the application was never whole."""
        async with answered_within():
            text = await self._client.hget(ROLLOUTS, cluster)
        return None if text is None else msgspec.json.decode(text, type=Rollout)

    async def set(self, cluster: str, rollout: Rollout) -> None:
        async with answered_within():
            await self._client.hset(ROLLOUTS, cluster, msgspec.json.encode(rollout).decode())

    async def may_look(self, cluster: str, rest_s: float) -> bool:
        """Whether the caller is the one of all routers that looks after the rollout in the next `rest_s`."""
        async with answered_within():
            return bool(await self._client.set(ROLLOUT_LOOK + cluster, "", nx=True, px=int(1000 * rest_s)))
