"""What the processes of a launch share in the registry: leases, heartbeats, rollouts, and reports of starts."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from redis.asyncio import Redis

from .redis_deadline import TIMEOUT_S, answered_within
from .registry_keys import CLUSTER_TOKEN, LAUNCH_KEYS, LAUNCHES, ROLLOUT_LOOK, ROLLOUTS, STARTS
from .store import Command, Snapshot, Store, Transaction, Write

# What one process at a time may do, as a string in Redis that expires.


class Lease:
    """The lease that is stored as `key`. Raises RegistryUnavailable when Redis does not answer."""

    def __init__(self, client: Redis, key: str, timeout_s: float = TIMEOUT_S) -> None:
        self._key = key
        self._store = Store(client, timeout_s, slot=key)

    async def hold(self, holder: str, hold_s: float) -> bool:
        """Gives the lease to the holder for `hold_s` from now on; 0 ends it. False: another one holds it."""
        holder_row, milliseconds = ("GET", self._key), math.ceil(hold_s * 1000)

        def change(rows: Snapshot) -> Transaction:
            if rows[holder_row] not in (None, holder):
                return Transaction(value=False)
            write: Write = ("SET", self._key, holder, "PX", milliseconds) if milliseconds > 0 else ("DEL", self._key)
            return Transaction(value=True, writes=[write])

        return bool((await self._store.change(change, [holder_row])).value)


# Marks of the API keys that launches give. They are read as they are, and compared by their number.


def mark_rows(hashes: Sequence[str]) -> list[Command]:
    """What `launches_by_hash` reads."""
    pattern = f"* {hashes[0]}" if len(hashes) == 1 else "*"
    return [("SCARD", LAUNCH_KEYS), ("SSCAN", LAUNCH_KEYS, 0, "MATCH", pattern, "COUNT", 10_000_000)]


def launches_by_hash(rows: Snapshot, hashes: Sequence[str]) -> dict[str, set[str]]:
    """The launches that give each of the keys with these hashes, and perhaps those of others."""
    count_row, marks_row = mark_rows(hashes)
    launches: defaultdict[str, set[str]] = defaultdict(set)
    if rows[count_row]:
        for mark in rows.peek(marks_row)[1]:
            launch, _, key_hash = mark.partition(" ")
            launches[key_hash].add(launch)
    return launches


class Launches:
    """The launches of one registry. Raises RegistryUnavailable as `Registry` does."""

    def __init__(self, client: Redis) -> None:
        self._client: Any = client
        self._store = Store(client)

    async def heartbeat(self, owner: str) -> dict[str, int]:
        """Counts one more heartbeat of the launch; returns how many there were of each launch."""
        await self._store.change(lambda _: Transaction(writes=[("HINCRBY", LAUNCHES, owner, 1)]), [])
        async with answered_within():
            counts: dict[str, str] = await self._client.hgetall(LAUNCHES)
        return {launch: int(count) for launch, count in counts.items()}

    async def forget(self, owner: str) -> None:
        """Removes an expired launch."""
        async with answered_within():
            await self._client.hdel(LAUNCHES, owner)
            await self._client.hdel(ROLLOUTS, owner)

    async def shared_token(self, token: str) -> str:
        """The secret of routers and gangs of all launches: `token`, if there was none yet."""
        return await self._store.set_once(CLUSTER_TOKEN, token)


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


# The configuration with which an application was whole the last time, and why a newer one was taken back.


class ApplicationRollout(msgspec.Struct, frozen=True, kw_only=True):
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

    async def get(self, cluster: str) -> ApplicationRollout | None:
        """None: the application was never whole."""
        async with answered_within():
            text = await self._client.hget(ROLLOUTS, cluster)
        return None if text is None else msgspec.json.decode(text, type=ApplicationRollout)

    async def set(self, cluster: str, rollout: ApplicationRollout) -> None:
        async with answered_within():
            await self._client.hset(ROLLOUTS, cluster, msgspec.json.encode(rollout).decode())

    async def may_look(self, cluster: str, rest_s: float) -> bool:
        """Whether the caller is the one of all routers that looks after the rollout in the next `rest_s`."""
        async with answered_within():
            return bool(await self._client.set(ROLLOUT_LOOK + cluster, "", nx=True, px=int(1000 * rest_s)))


# Reports of gangs and routers that cannot start yet: what they wait for, or why they failed.

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
            records: dict[str, str] = await self._client.hgetall(self._key)
            reports = [*_decoded(records.values())]
            now = self._clock()
            fresh_reports = [
                report for report in reports if now - report.reported_at < (KEPT_S if report.has_failed else FRESH_S)
            ]
            if stale_replicas := [report.replica for report in reports if report not in fresh_reports]:
                await self._client.hdel(self._key, *stale_replicas)
        return sorted(fresh_reports, key=lambda report: report.began_at)

    async def succeeded(self, kind: Kind, replica: str) -> None:
        """Deletes this replica's report, and the failures of its kind, which are over."""
        over = [report.replica for report in await self.reports() if report.kind == kind and report.has_failed]
        async with answered_within():
            await self._client.hdel(self._key, replica, *over)


async def reports_of_all(client: Redis) -> Sequence[StartReport]:
    """The reports of all clusters that use this Redis, the oldest first. Raises RegistryUnavailable."""
    any_client: Any = client
    async with answered_within():
        names = [name async for name in any_client.scan_iter(f"{STARTS}*", count=10_000)]
    clusters = [await Starts(client, name.removeprefix(STARTS)).reports() for name in names]
    return sorted((report for reports in clusters for report in reports), key=lambda report: report.began_at)


def _decoded(texts: Iterable[str]) -> Iterator[StartReport]:
    """Leaves out reports of another version of motet that this one cannot read."""
    for text in texts:
        with suppress(msgspec.DecodeError):
            yield msgspec.json.decode(text, type=StartReport)
