"""The registry in Redis: which version each tenant's adapter name points to, and which API key belongs to which tenant.

Every change happens completely or not at all (store.py), and adds an event to a stream. The commands are those of Redis
7.0.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider

from ... import __version__
from ..adapter import AdapterVersion, BaseIdentity
from ..errors import AdapterError, KeyTaken
from ..names import PLAIN_SIGHT, Sight, check_tenant
from .events import RegistryEvent, decode_adapter, decode_event, decode_key
from .launches import Lease, launches_by_hash, mark_rows
from .name_records import NameRecords
from .redis_deadline import answered_within
from .registry_keys import (
    ADAPTERS,
    API_KEYS,
    BASE,
    EVENT_NUMBER,
    EVENTS,
    LAUNCH_KEYS,
    LAYOUT,
    NAMES,
    PINS,
    POSITIONS,
    STREAM_KEY,
    SWEEP,
    TENANTS,
    bind_script,
)
from .store import Command, Snapshot, Store, Transaction
from .stored_counts import StoredCounts

# A set of digests that takes eight bytes for each, so that a sweep can hold those of a million adapters.

DIGITS = 16  # hexadecimal, of each digest; two adapters that share them are taken for one


class DigestSet:
    """`digest in set` is never wrong about a member; two of a million others are mixed up once in 10^7 such sets."""

    def __init__(self, pages: Iterable[str]) -> None:
        """Each page: the first DIGITS digits of some digests, joined."""
        beginnings = np.frombuffer(b"".join(bytes.fromhex(page) for page in pages), ">u8")
        self._beginnings = np.unique(beginnings.astype(np.uint64))

    def __contains__(self, digest: object) -> bool:
        assert isinstance(digest, str)
        beginning = np.uint64(int(digest[:DIGITS], 16))
        place = int(np.searchsorted(self._beginnings, beginning))
        return place < len(self._beginnings) and self._beginnings[place] == beginning

    def __len__(self) -> int:
        return len(self._beginnings)


_POSITIONS_KEPT_S = "3600"
_SCAN_SIZE = 100  # records that are decoded at once, in the event loop of a router that serves
_KEYS_SIZE = 5_000  # keys that are changed at once; each change looks at all marks of launches, and so they are many
LAYOUT_NUMBER = 1  # of registry_keys.py; a release that changes it reads the one before
PAGE_SIZE = 1000  # of what is read in pages: a few milliseconds of Redis's time


@dataclass(frozen=True)
class Position:
    """Where the event stream is: id and number of the newest event, and how many adapters there are with it."""

    event_id: str
    event_number: int
    num_adapters: int


@dataclass(frozen=True)
class NumberedEvent:
    """An event as read from the stream. Numbers follow one another; a gap means that events were missed."""

    event_id: str
    number: int
    event: RegistryEvent


def connect(url: str, timeout_s: float = 2.0, credentials: CredentialProvider | None = None) -> Redis:
    """A client that fails after `timeout_s` and does not retry: motet's own clients may.

    `credentials`: called whenever a connection is made, for a `url` without a password.
    """
    client: Redis = Redis.from_url(
        url,
        decode_responses=True,
        protocol=2,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        retry=Retry(NoBackoff(), 0),
        credential_provider=credentials,
    )
    return client


def hash_key(key: str) -> str:
    """The hash that the registry stores in place of an API key. Keys are random, so SHA-256 needs no salt."""
    return sha256(key.encode()).hexdigest()


class OtherLayout(AdapterError):  # noqa: N818
    """A later version of motet has changed how the registry is stored: a launch is refused."""


class RedisMemory(NamedTuple):
    """`max_bytes`: 0 without a bound, or where the server does not report it."""

    used_bytes: int
    max_bytes: int


class Registry:
    """Every method is one round trip, unless it says that it reads pages; a change of a name reads it first.

    Raises RegistryUnavailable when Redis does not answer within `timeout_s`. A change whose answer was lost may or may
    not have happened; the same call may be repeated.
    """

    def __init__(self, client: Redis, timeout_s: float = 3.0, clock: Callable[[], float] = time.time) -> None:
        if not client.connection_pool.connection_kwargs.get("decode_responses"):
            raise ValueError("the registry needs a client that decodes responses: connect() makes one")
        self._client = client
        self._timeout_s = timeout_s
        self._clock = clock
        self.names = NameRecords(client, timeout_s, clock)
        self.stored = StoredCounts(client, timeout_s)
        self._store = Store(client, timeout_s)
        self._first_words = bind_script(client, "first_words.lua")
        self._scan_digests = bind_script(client, "scan_digests.lua")
        self._scan_hash = bind_script(client, "scan_hash.lua")

    async def ping(self) -> None:
        async with self._bounded():
            await self._command("PING")

    async def memory(self) -> RedisMemory:
        """What Redis reports about its memory."""
        async with self._bounded():
            info = await self._client.info("memory")
        return RedisMemory(int(info["used_memory"]), int(info.get("maxmemory", 0)))

    async def get(self, tenant: str, name: str) -> AdapterVersion | None:
        """The name's current version; None: there is no such name."""
        field = f"{tenant}/{name}"
        async with self._bounded():
            record = await self._command("HGET", ADAPTERS, field)
        return None if record is None else decode_adapter(field, record)

    async def list_adapters(
        self, tenant: str, after: str = "", limit: int = PAGE_SIZE, sight: Sight = PLAIN_SIGHT
    ) -> Sequence[AdapterVersion]:
        """At most `limit` of the tenant's adapters that the caller sees, by name, beginning behind the name `after`.

        `after` need not be the name of an adapter, as of one that was deleted since. Fewer than `limit`: there are no
        more. At most PAGE_SIZE a call, so that no list stops Redis for long. One round trip for each of the ranges.
        """
        check_tenant(tenant)
        if not 1 <= limit <= PAGE_SIZE:
            raise ValueError(f"limit = {limit}: 1 to {PAGE_SIZE} adapters a call are accepted")
        adapters: list[AdapterVersion] = []
        for first, end in sight.ranges():
            count = limit - len(adapters)
            if count and after < end:
                start = f"({tenant}/{after}" if after > first else f"[{tenant}/{first}"
                page = ("ZRANGEBYLEX", NAMES, start, f"({tenant}/{end}", "LIMIT", 0, count)
                fields, records = await self._store.read(page, ("HGET", ADAPTERS, (1,)))
                adapters += map(decode_adapter, fields, records)
        return adapters

    async def owners(self, tenant: str, after: str, limit: int) -> Sequence[str]:
        """At most `limit` of the tenant's users who have private adapters, behind `after`, as `user_place` sorts."""
        check_tenant(tenant)
        async with self._bounded():
            users: Sequence[str] = await self._first_words(
                names=NAMES, beginning=f"{tenant}/~", after=after, stop=f"({tenant}0", count=min(limit, PAGE_SIZE)
            )
        return users

    async def get_many(self, names: Sequence[tuple[str, str]]) -> Sequence[AdapterVersion | None]:
        """The current version of each (tenant, name), at most PAGE_SIZE of them; None: there is no such name."""
        fields = [f"{tenant}/{name}" for tenant, name in names]
        async with self._bounded():
            records = await self._command("HMGET", ADAPTERS, *fields) if fields else []
        return [
            None if record is None else decode_adapter(field, record)
            for field, record in zip(fields, records, strict=True)
        ]

    async def scan_adapters(self) -> AsyncIterator[Sequence[AdapterVersion]]:
        """All adapters, page by page. One that changes meanwhile may be missing or be there twice."""
        async for page in self._scan(ADAPTERS):
            yield [decode_adapter(field, record) for field, record in page]

    async def scan_keys(self) -> AsyncIterator[Sequence[tuple[str, str]]]:
        """Hash and record of all API keys, page by page, as `scan_adapters`. `decode_key` reads a record."""
        async for page in self._scan(API_KEYS):
            yield page

    async def scan_tenants(self) -> AsyncIterator[Sequence[tuple[str, str]]]:
        """Name and record of all tenants that have one, page by page. `decode_tenant` reads a record."""
        async for page in self._scan(TENANTS):
            yield page

    async def scan_pins(self) -> AsyncIterator[Sequence[tuple[str, str]]]:
        """Tenant/name and "digest gangs" of all pins, page by page, as `scan_adapters`."""
        async for page in self._scan(PINS):
            yield page

    async def digests(self) -> DigestSet:
        """The digests that names had as versions during the whole call, and perhaps others. One round trip a page."""
        pages = []
        cursor = "0"
        while True:
            async with self._bounded():
                cursor, page = await self._scan_digests(adapters=ADAPTERS, cursor=cursor, count=PAGE_SIZE)
            pages.append(page)
            if cursor == "0":
                return DigestSet(pages)

    async def tenants_with(self, name: str) -> Sequence[str]:
        """The tenants that have an adapter of this name. Two round trips for each PAGE_SIZE tenants."""
        tenants: set[str] = set()
        after = ""
        while True:
            async with self._bounded():
                page = await self._first_words(names=NAMES, beginning="", after=after, stop="+", count=PAGE_SIZE)
                scores = await self._command("ZMSCORE", NAMES, *(f"{tenant}/{name}" for tenant in page)) if page else []
            tenants.update(tenant for tenant, score in zip(page, scores, strict=True) if score is not None)
            if len(page) < PAGE_SIZE:
                return sorted(tenants)
            after = page[-1]

    async def hold_sweep(self, store_id: str, sweep_id: str, hold_s: float) -> bool:
        """Gives a store to one sweep for `hold_s`, as often as it asks; 0 frees it. False: another holds it."""
        return await Lease(self._client, SWEEP + store_id, self._timeout_s).hold(sweep_id, hold_s)

    async def set_launch_keys(self, owner: str, keys: Sequence[tuple[str, str]]) -> None:
        """Makes `keys`, as (tenant, key), all the keys that `owner` gives; deletes others that it gave before.

        `owner` is one word that names a launch. Keys from `KeyRegistry` stay, and so do keys that another owner gives.
        Raises KeyTaken and changes nothing if any key belongs to another tenant. Reads and changes pages, so that ten
        thousands of keys do not stop Redis; if one is taken by another launch meanwhile, some may have been set.
        """
        for tenant, _ in keys:
            check_tenant(tenant)
        tenants_by_hash = {hash_key(key): tenant for tenant, key in keys}
        if len(tenants_by_hash) < len(keys):
            _check_one_tenant_each(keys)
        for page in _pages(list(tenants_by_hash)):
            async with self._bounded():
                records = await self._command("HMGET", API_KEYS, *page)
            for key_hash, record in zip(page, records, strict=True):
                if (
                    record is not None
                    and (owner_name := decode_key(key_hash, record).tenant) != tenants_by_hash[key_hash]
                ):
                    raise _key_taken(tenants_by_hash[key_hash], owner_name)
        for page in _pages(list(tenants_by_hash)):
            await self._store.change(partial(_addition_of_keys, owner, page, tenants_by_hash), _key_rows(page))
        async with self._bounded():
            marks = await self._command("SMEMBERS", LAUNCH_KEYS)
        mine = (key_hash for giver, key_hash in (mark.split(" ") for mark in marks) if giver == owner)
        for page in _pages([key_hash for key_hash in mine if key_hash not in tenants_by_hash]):
            await self._store.change(partial(_removal_of_keys, owner, page), mark_rows(page))

    async def tenants_besides(self, owner: str) -> set[str]:
        """Tenants that have a key from `KeyRegistry` or from another owner of launch keys than this one."""
        async with self._bounded():
            # A key's launches are read before its record: one that is made in between counts as another owner's.
            pipeline: Any = self._client.pipeline(transaction=False)
            marks, keys = await pipeline.smembers(LAUNCH_KEYS).hgetall(API_KEYS).execute()
        owners: dict[str, set[str]] = {}
        for mark in marks:
            giver, _, key_hash = mark.partition(" ")
            owners.setdefault(key_hash, set()).add(giver)
        return {
            decode_key(key_hash, record).tenant for key_hash, record in keys.items() if owners.get(key_hash) != {owner}
        }

    async def claim_layout(self) -> None:
        """Records the layout of what this version of motet stores, if the registry has none yet.

        Raises OtherLayout if a later version has changed it.
        """
        number, _, version = (await self._store.set_once(LAYOUT, f"{LAYOUT_NUMBER} {__version__}")).partition(" ")
        if int(number) > LAYOUT_NUMBER:
            raise OtherLayout(
                f"the registry in Redis has layout {number}, which needs motet {version} or later: this is motet "
                f"{__version__}, which reads layout {LAYOUT_NUMBER}"
            )

    async def claim_base(self, base: BaseIdentity, remedy: str, *, if_empty: bool) -> None:
        """Records that the registry belongs to `base`, if it belongs to none yet, or `if_empty` and it has no adapters.

        Raises OtherBase, with `remedy` in its message, if it belongs to another base.
        """
        base_row = ("GET", BASE)

        def claim(rows: Snapshot) -> Transaction:
            before = rows[base_row]
            if before is not None and not (if_empty and before != str(base) and not rows["HLEN", ADAPTERS]):
                return Transaction(value=before)
            return Transaction(value=str(base), writes=[("SET", BASE, str(base))])

        claimed = await self._store.change(claim, [base_row, ("HLEN", ADAPTERS)])
        base.check(BaseIdentity.parse(claimed.value), "the registry in Redis", remedy)

    async def position(self) -> Position:
        """Where the event stream is now. What is read afterwards is at least as new as the event there."""
        newest, number, num_adapters = await self._store.read(
            ("XREVRANGE", EVENTS, "+", "-", "COUNT", 1), ("GET", EVENT_NUMBER), ("HLEN", ADAPTERS)
        )
        return Position(newest[0][0] if newest else "0-0", int(number or 0), num_adapters)

    async def has_event(self, event_id: str, number: int) -> bool:
        """Whether the stream holds this very event, and so all events after it."""
        async with self._bounded():
            client: Any = self._client
            events = await client.xrange(EVENTS, event_id, event_id)
        return bool(events) and int(events[0][1]["number"]) == number

    async def share_stream_key(self, key: bytes) -> bytes:
        """The secret with which all routers seal event ids: `key`, if there was none yet."""
        return bytes.fromhex(await self._store.set_once(STREAM_KEY, key.hex()))

    async def read_events(self, after: str, wait_s: float) -> Sequence[NumberedEvent]:
        """Events after the event with the id `after`; waits up to `wait_s` for the first one, and may return none."""
        async with self._bounded(wait_s):
            client: Any = self._client
            answer = await client.xread({EVENTS: after}, count=1000, block=max(1, int(wait_s * 1000)))
        entries = answer[0][1] if answer else []
        return [NumberedEvent(event_id, int(fields["number"]), decode_event(fields)) for event_id, fields in entries]

    async def num_events(self) -> int:
        """The number of events so far, which is the number of the newest one."""
        async with self._bounded():
            return int(await self._command("GET", EVENT_NUMBER) or 0)

    async def note_position(self, router: str, event_number: int) -> None:
        """This router has applied all events up to this one."""
        async with self._bounded():
            await self._command("ZADD", POSITIONS, str(event_number), router)
            await self._command("EXPIRE", POSITIONS, _POSITIONS_KEPT_S)

    async def num_routers_at(self, event_number: int) -> int:
        """How many routers have applied all events up to this one."""
        async with self._bounded():
            return int(await self._command("ZCOUNT", POSITIONS, str(event_number), "+inf"))

    async def _scan(self, key: str) -> AsyncIterator[Sequence[tuple[str, str]]]:
        cursor = "0"
        while True:
            async with self._bounded():
                cursor, page = await self._scan_hash(hash=key, cursor=cursor, count=_SCAN_SIZE)
            lines = page.split("\n") if page else []
            yield list(zip(lines[::2], lines[1::2], strict=True))
            if cursor == "0":
                return

    async def _command(self, *parts: str) -> Any:
        client: Any = self._client
        return await client.execute_command(*parts)

    @asynccontextmanager
    async def _bounded(self, extra_s: float = 0.0) -> AsyncIterator[None]:
        async with answered_within(self._timeout_s + extra_s):
            yield


def _pages(hashes: Sequence[str]) -> Iterator[Sequence[str]]:
    return (hashes[start : start + _KEYS_SIZE] for start in range(0, len(hashes), _KEYS_SIZE))


def _key_rows(hashes: Sequence[str]) -> list[Command]:
    return [("HMGET", API_KEYS, *hashes), *mark_rows(hashes)]


def _addition_of_keys(owner: str, hashes: Sequence[str], tenants: Mapping[str, str], rows: Snapshot) -> Transaction:
    """Adds keys that a launch gives, by their hashes."""
    change, launches = Transaction(), launches_by_hash(rows, hashes)
    for key_hash, record in zip(hashes, rows[_key_rows(hashes)[0]], strict=True):
        tenant = tenants[key_hash]
        if record is None:
            change.writes.append(("HSET", API_KEYS, key_hash, tenant))
            change.events.append(("key", key_hash, tenant))
        elif (owner_name := decode_key(key_hash, record).tenant) != tenant:
            raise _key_taken(tenant, owner_name)
        if record is None or key_hash in launches:
            change.writes.append(("SADD", LAUNCH_KEYS, f"{owner} {key_hash}"))
    return change


def _removal_of_keys(owner: str, hashes: Sequence[str], rows: Snapshot) -> Transaction:
    """Removes keys that a launch no longer gives. Those that no other launch gives are deleted."""
    change, launches = Transaction(), launches_by_hash(rows, hashes)
    for key_hash in hashes:
        if owner in launches[key_hash]:
            change.writes.append(("SREM", LAUNCH_KEYS, f"{owner} {key_hash}"))
            if len(launches[key_hash]) == 1:
                change.writes.append(("HDEL", API_KEYS, key_hash))
                change.events.append(("key", key_hash, ""))
    return change


def _check_one_tenant_each(keys: Sequence[tuple[str, str]]) -> None:
    tenants: dict[str, str] = {}
    for tenant, key in keys:
        if tenants.setdefault(key, tenant) != tenant:
            raise _key_taken(tenant, tenants[key])


def _key_taken(tenant: str, owner: str) -> KeyTaken:
    # The key itself is a secret and is left out.
    return KeyTaken(f"a key that was given for {tenant} is {owner}'s already: each tenant needs keys of its own")
