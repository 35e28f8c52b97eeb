"""Reports of gangs and routers that cannot start yet: what they wait for, or why they failed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Literal

import msgspec
from redis.asyncio import Redis

from .redis_deadline import answered_within
from .registry_keys import STARTS

Kind = Literal["gang", "router"]

KEPT_S = 600.0  # of a failed start, unless one of its kind has come up since
FRESH_S = 150.0  # of a waiting start, which reports again with each try


class StartReport(msgspec.Struct, frozen=True, kw_only=True):
    """One start of a replica."""

    kind: Kind
    replica: str  # its id; Serve gives each new try another one
    reason: str  # text: what it waits for, or why it failed
    has_failed: bool  # else it waits, and goes on by itself
    began_at: float  # Unix seconds, as `reported_at`
    reported_at: float = msgspec.field(name="told_at")  # its name in Redis and in /status


class Starts:
    """The reports of one cluster. Raises RegistryUnavailable as `Registry` does."""

    def __init__(self, client: Redis, cluster: str, clock: Callable[[], float] = time.time) -> None:
        self._client: Any = client
        self._key = STARTS + cluster
        self._clock = clock

    async def report(self, report: StartReport) -> None:
        """Replaces this replica's earlier report."""
        async with answered_within():
            await self._client.hset(self._key, report.replica, msgspec.json.encode(report).decode())
            await self._client.expire(self._key, int(2 * KEPT_S))

    async def reports(self) -> Sequence[StartReport]:
        """The reports that still hold, the oldest first. Expired ones are deleted."""
        async with answered_within():
            found: dict[str, str] = await self._client.hgetall(self._key)
            reports = [*_decoded(found.values())]
            now = self._clock()
            held = [one for one in reports if now - one.reported_at < (KEPT_S if one.has_failed else FRESH_S)]
            if gone := [one.replica for one in reports if one not in held]:
                await self._client.hdel(self._key, *gone)
        return sorted(held, key=lambda report: report.began_at)

    async def succeeded(self, kind: Kind, replica: str) -> None:
        """Deletes this replica's report, and the failures of its kind, which are over."""
        over = [one.replica for one in await self.reports() if one.kind == kind and one.has_failed]
        async with answered_within():
            await self._client.hdel(self._key, replica, *over)


async def reports_of_all(client: Redis) -> Sequence[StartReport]:
    """The reports of all clusters that use this Redis, the oldest first. Raises RegistryUnavailable."""
    any_client: Any = client
    async with answered_within():
        names = [name async for name in any_client.scan_iter(f"{STARTS}*", count=10_000)]
    clusters = [await Starts(client, name.removeprefix(STARTS)).reports() for name in names]
    return sorted((one for reports in clusters for one in reports), key=lambda report: report.began_at)


def _decoded(texts: Iterable[str]) -> Iterator[StartReport]:
    """Leaves out reports of another version of motet that this one cannot read."""
    for text in texts:
        with suppress(msgspec.DecodeError):
            yield msgspec.json.decode(text, type=StartReport)
