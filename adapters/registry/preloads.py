"""The state of tenants' preloads, in Redis, for all routers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from redis.asyncio import Redis

from .redis_deadline import answered_within
from .registry_keys import PREFIX

KEPT_S: Final = 300  # after the last change
_PRELOADS: Final = PREFIX + "preloads:"  # + tenant/name@version digest: hash: id of a gang -> JSON of Preload; expires


class Preload(msgspec.Struct, frozen=True, omit_defaults=True):
    """The preload of a version into one gang."""

    is_over: bool = False
    failure: str = ""  # why the gang does not have it; empty: it has, or loads it still


_decode: Final = msgspec.json.Decoder(Preload).decode


class Preloads:
    """Raises RegistryUnavailable when Redis does not answer; every call may be repeated."""

    def __init__(self, client: Redis) -> None:
        self._client: Any = client

    async def note(self, place: str, preloads: Mapping[str, Preload]) -> None:
        """Writes the state of a version's preloads by the ids of gangs. `place`: see `place_of`."""
        key = _PRELOADS + place
        async with answered_within(), self._client.pipeline(transaction=True) as pipeline:
            pipeline.hset(key, mapping={gang: msgspec.json.encode(preload) for gang, preload in preloads.items()})
            pipeline.expire(key, KEPT_S)
            await pipeline.execute()

    async def read(self, places: Sequence[str]) -> list[dict[str, Preload]]:
        """What was noted of each version lately, by the ids of gangs."""
        async with answered_within(), self._client.pipeline(transaction=False) as pipeline:
            for place in places:
                pipeline.hgetall(_PRELOADS + place)
            records: list[dict[str, str]] = await pipeline.execute()
        return [{gang: _decode(preload) for gang, preload in record.items()} for record in records]


def place_of(tenant: str, name: str, version: int, digest: str) -> str:
    """A version of a name; a later one that has the same number, after the name was deleted, is another."""
    return f"{tenant}/{name}@{version} {digest[:16]}"
