"""The ledger in Redis: what each tenant used, entry by entry for some days, summed by hour and day for longer."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from redis.asyncio import Redis

from ..launches import Lease
from ..lua_script import LuaScript
from ..redis_deadline import answered_within
from ..registry_keys import bind_script
from ..store import Snapshot, Store, Transaction
from ..tenants.records import parse_tenant_id
from .entry import NUM_DIGEST_DIGITS, NUMBERS, OTHERS, Entry, Group, Stage, parse_group

# Which keys of Redis the ledger has, and how a record is written there.
#
# The keys of a tenant begin alike (`prefix_of`), so that a Redis cluster has them in one slot: scripts take that
# beginning as their key. They contain the tenant's id: a new tenant with the name of a deleted one has other keys.

TENANT_IDS: Final = "motet:{ledger}:tenants"  # set: ids of tenants that may have a ledger
ARCHIVIST: Final = "motet:{ledger}:archivist"  # the router that archives, as a string that expires

# Below the prefix; a day is like 20261122, a month like 202611.
RECORDS: Final = "records:"  # + day: sorted map (packed_map.lua), field of an id -> record, until the day is archived
GROUPS: Final = "groups:"  # + day: hash, number -> group and group -> number, of the day's records
PENDING: Final = "pending"  # sorted set: days that have records, by when one changed last, Unix time in microseconds
HOURS: Final = "hours:"  # + day: hash, "hour\tgroup" -> numbers
# + month: hash, "day\tgroup" -> numbers, "day\t" -> how many groups the day has; "folded": single users no more
DAYS: Final = "days:"

# Written by versions before records; take.lua and archive.py still read them.
OLD_ENTRIES: Final = "entries"  # stream: each entry that changed something, as JSON in the field e
OLD_SEEN: Final = "seen:"  # + day: hash, id -> "stage\ngroup\nnumbers"; expires

_KINDS: Final = {"cmpl-": "c", "chatcmpl-": "h", "shadow-": "s"}  # of ids, which are most of a record
_OTHER_KIND: Final = "="


def prefix_of(tenant_id: str) -> str:
    return f"motet:{{tenant:{tenant_id}}}:ledger:"


def field_of(id_text: str) -> str:
    """A short name of an answer's id."""
    prefix, dash, id_tail = id_text.partition("-")
    kind = _KINDS.get(prefix + dash)
    return f"{_OTHER_KIND}{id_text}" if kind is None else kind + id_tail


def entry_of(tenant_id: str, day: date, field: str, record: str, group: str) -> Entry:
    """The entry that a record encodes.

    A record is `<stage> <group> <second of the day> <numbers>`, as decimal numbers. The numbers are those that
    `NUMBERS` names, without zeros at the end. A group below 0 is summed with `OTHERS`, one with a + with all other
    users of its adapter. A tab and the error follow if there is one.

    >>> entry_of("acme", date(2026, 11, 22), "=x", "2 1 61 1 0 9", "key\\tsql\\t3\\tab12").prompt_tokens
    9
    """
    texts, _, error = record.partition("\t")
    stage, _, second, *numbers = map(int, texts.split(" "))
    tenant, num_ended = parse_tenant_id(tenant_id)
    *user, key_id, adapter, version, digest = group.split("\t")
    midnight = int(datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp())
    kind, id_tail = field[0], field[1:]
    prefix = next((prefix for prefix, short in _KINDS.items() if short == kind), "")
    return Entry(
        id=prefix + id_tail,
        tenant=tenant,
        num_ended=num_ended,
        began_at=midnight + second,
        stage=Stage(stage),
        key_id=key_id,
        user="".join(user),
        adapter=adapter,
        version=int(version),
        digest=digest,
        error=error,
        **dict(zip(NUMBERS, numbers, strict=False)),
    )


DAY_S: Final = 86_400
HOURS_KEPT_DAYS: Final = 40
DAYS_KEPT_DAYS: Final = 800
MAX_GROUPS: Final = 20_000  # of a tenant, on a day, that are kept apart
USERS_PART: Final = (
    2  # the part of them that may be of single users is 1 over this; the others are for adapters, which have prices
)
MONTHS_OF_USERS: Final = 2  # this one and the last: an invoice can be made all of the next month
_BATCH_SIZE: Final = 100  # entries of a script, a few milliseconds of Redis's time
_SENT_AT_ONCE: Final = 200  # entries, which the event loop writes and reads in one piece
_PAGE_SIZE: Final = 1000
_SUMS_PAGE_SIZE: Final = 200  # of what the event loop reads in one piece
_TAKE, _FOLD_USERS = (
    LuaScript(Path(__file__).with_name(name), allow_oom=allow_oom)
    for name, allow_oom in (("take.lua", False), ("fold_users.lua", True))
)


@dataclass(frozen=True)
class Sum:
    """What a group used in an hour, or on a day."""

    start: datetime  # UTC
    group: Group
    numbers: tuple[int, ...]  # as `NUMBERS` of entry.py names them; there may be fewer, the rest is 0


@dataclass(frozen=True)
class PendingDay:
    """A day whose records are in Redis."""

    day: date
    changed_us: int  # when one of them changed last: Unix time in microseconds, by Redis's clock


@dataclass(frozen=True)
class OldEntry:
    """An entry in the stream of versions before records."""

    number: str  # grows
    text: str  # JSON of an `Entry`


class Ledger:
    """Raises RegistryUnavailable when Redis does not answer in time. Every call may be repeated."""

    def __init__(self, client: Redis, kept_days: int, timeout_s: float = 3.0, max_groups: int = MAX_GROUPS) -> None:
        """`kept_days`: how long after its day's last entry an id is known, and so counted only once.

        `max_groups`: of a tenant and a day. Users beyond their part of them are counted together, by adapter; what is
        beyond all of them is counted for `OTHERS`.
        """
        self._client: Any = client
        self.kept_days, self._timeout_s, self._max_groups = kept_days, timeout_s, max_groups
        self._take = _TAKE.bind(client)
        self._scan_hash = bind_script(client, "scan_hash.lua")
        self._fold_users = _FOLD_USERS.bind(client)
        self._archivist = Lease(client, ARCHIVIST, timeout_s)

    async def take(self, entries: Sequence[Entry]) -> None:
        """Takes entries in, of any tenants. Each may have been taken in before."""
        for start in range(0, len(entries), _SENT_AT_ONCE):
            by_tenant: defaultdict[str, list[Entry]] = defaultdict(list)
            for entry in entries[start : start + _SENT_AT_ONCE]:
                by_tenant[entry.tenant_id].append(entry)
            async with answered_within(self._timeout_s), self._client.pipeline(transaction=False) as pipeline:
                pipeline.sadd(TENANT_IDS, *by_tenant)
                for tenant_id, tenant_entries in by_tenant.items():
                    for first in range(0, len(tenant_entries), _BATCH_SIZE):
                        await self._take(
                            on=pipeline,
                            prefix=prefix_of(tenant_id),
                            hour_seconds=HOURS_KEPT_DAYS * DAY_S,
                            day_seconds=DAYS_KEPT_DAYS * DAY_S,
                            max_groups=self._max_groups,
                            max_user_groups=self._max_groups // USERS_PART,
                            others=str(OTHERS),
                            digest_digits=NUM_DIGEST_DIGITS,
                            entries=_arguments(tenant_entries[first : first + _BATCH_SIZE]),
                        )
                await asyncio.sleep(0)
                await pipeline.execute()

    async def hours(self, tenant_id: str, day: date) -> AsyncIterator[list[Sum]]:
        """What a tenant used in each hour of a day, in small pages."""
        start = _midnight(day)
        async for page in self._sums(f"{prefix_of(tenant_id)}{HOURS}{_day(start)}"):
            yield [Sum(start + timedelta(hours=place), group, numbers) for place, group, numbers in page]

    async def days(self, tenant_id: str, month: date) -> AsyncIterator[list[Sum]]:
        """What a tenant used on each day of the month that `month` is in, in small pages."""
        start = _midnight(month.replace(day=1))
        async for page in self._sums(f"{prefix_of(tenant_id)}{DAYS}{_month(start)}"):
            yield [Sum(start + timedelta(days=place - 1), group, numbers) for place, group, numbers in page]

    async def tenant_ids(self) -> list[str]:
        """Ids of tenants that may have a ledger, sorted."""
        async with answered_within(self._timeout_s):
            return sorted(await self._client.smembers(TENANT_IDS))

    async def pending_days(self, tenant_id: str) -> list[PendingDay]:
        """The days that have records, beginning with the one that has not changed for longest."""
        async with answered_within(self._timeout_s):
            days = await self._client.zrange(prefix_of(tenant_id) + PENDING, 0, -1, withscores=True)
        return [PendingDay(datetime.strptime(day, "%Y%m%d").date(), int(score)) for day, score in days]

    async def entries_of(self, tenant_id: str, day: date) -> AsyncIterator[list[Entry]]:
        """What is known of each answer that began on the day, in small pages."""
        prefix, first = prefix_of(tenant_id), ""
        hashes, groups = f"{prefix}{RECORDS}{_day(day)}", f"{prefix}{GROUPS}{_day(day)}"
        while True:
            async with answered_within(self._timeout_s), self._client.pipeline(transaction=False) as pipeline:
                pipeline.hgetall(f"{hashes}:{first}")
                pipeline.zrangebylex(hashes, f"({first}", "+", 0, 1)
                records, later = await pipeline.execute()
                numbers = [record.split(" ", 2)[1].lstrip("+-") for record in records.values()]
                names = await self._client.hmget(groups, numbers) if numbers else []
            rows = zip(records.items(), names, strict=True)
            yield [entry_of(tenant_id, day, field, record, name) for (field, record), name in rows]
            if not later:
                return
            (first,) = later

    async def remove_day(self, tenant_id: str, pending: PendingDay) -> bool:
        """Forgets what is known of the day's answers; sums stay. False: it has changed meanwhile, and is kept."""
        prefix, day = prefix_of(tenant_id), _day(pending.day)
        changed_row, hashes = ("ZSCORE", prefix + PENDING, day), f"{prefix}{RECORDS}{day}"
        hashes_row = ("ZRANGE", hashes, 0, -1)

        def removal(rows: Snapshot) -> Transaction:
            if rows[changed_row] is not None and int(float(rows[changed_row])) != pending.changed_us:
                return Transaction(value=False)
            starts = rows.peek(hashes_row)
            writes = [
                ("UNLINK", key) for key in (*(f"{hashes}:{start}" for start in starts), hashes, prefix + GROUPS + day)
            ]
            return Transaction(value=True, writes=[*writes, ("ZREM", prefix + PENDING, day)])

        store = Store(self._client, self._timeout_s, slot=prefix)
        return bool((await store.change(removal, [changed_row, hashes_row])).value)

    async def fold_users(self, tenant_id: str, now: date) -> None:
        """Adds up what single users used on each day of months that have passed: one row for each adapter stays."""
        month = now.replace(day=1)
        for number in range(DAYS_KEPT_DAYS // 28 + 1):
            if number >= MONTHS_OF_USERS:
                await self._fold_month(f"{prefix_of(tenant_id)}{DAYS}{_month(month)}")
            month = (month - timedelta(days=1)).replace(day=1)

    async def _fold_month(self, key: str) -> None:
        cursor: str | None = "0"
        while cursor is not None:
            began = time.monotonic()
            async with answered_within(self._timeout_s):
                cursor = await self._fold_users(sums=key, cursor=cursor, count=_SUMS_PAGE_SIZE)
            if cursor is not None:
                await asyncio.sleep(time.monotonic() - began)  # at most half of Redis's time

    async def first_old_day(self, tenant_id: str) -> date | None:
        """The day of the oldest entry in the stream of versions before records; None: there is none."""
        async with answered_within(self._timeout_s):
            first_entries = await self._client.xrange(prefix_of(tenant_id) + OLD_ENTRIES, count=1)
        return (
            datetime.fromtimestamp(int(first_entries[0][0].split("-")[0]) / 1000, UTC).date() if first_entries else None
        )

    async def old_entries_of(self, tenant_id: str, day: date) -> AsyncIterator[list[OldEntry]]:
        """Pages of that stream's entries that were taken in on that day, by Redis's clock."""
        start = int(_midnight(day).timestamp()) * 1000
        first, last = f"{start}-0", f"{start + DAY_S * 1000 - 1}"
        while True:
            async with answered_within(self._timeout_s):
                page = await self._client.xrange(prefix_of(tenant_id) + OLD_ENTRIES, first, last, count=_PAGE_SIZE)
            if page:
                yield [OldEntry(number, fields["e"]) for number, fields in page]
            if len(page) < _PAGE_SIZE:
                return
            first = f"({page[-1][0]}"

    async def trim_old(self, tenant_id: str, number: str) -> None:
        """Forgets that stream's entries up to the one with this number."""
        async with answered_within(self._timeout_s):
            time, place = number.split("-")
            behind = f"{time}-{int(place) + 1}"
            await self._client.xtrim(prefix_of(tenant_id) + OLD_ENTRIES, minid=behind, approximate=False)

    async def remove(self, tenant_id: str, now: datetime) -> None:
        """Forgets all of a tenant's ledger, of which no records are pending."""
        prefix, names = prefix_of(tenant_id), {OLD_ENTRIES}
        for number in range(-1, DAYS_KEPT_DAYS + 32):
            day = now - timedelta(days=number)
            names |= {HOURS + _day(day), OLD_SEEN + _day(day), DAYS + _month(day)}
        async with answered_within(self._timeout_s):
            await self._client.unlink(*(prefix + name for name in names))
            await self._client.srem(TENANT_IDS, tenant_id)

    async def hold_archive(self, owner: str, hold_s: float) -> bool:
        """Whether `owner` alone archives from now on, for this time."""
        return await self._archivist.hold(owner, hold_s)

    async def _sums(self, key: str) -> AsyncIterator[list[tuple[int, Group, tuple[int, ...]]]]:
        # HSCAN may return a field twice while the hash grows. By hour or day, since a large set takes long to grow.
        seen: defaultdict[str, set[str]] = defaultdict(set)
        groups: dict[str, tuple[str, Group]] = {}  # each is there for many hours or days
        cursor = "0"
        while True:
            async with answered_within(self._timeout_s):
                cursor, text = await self._scan_hash(hash=key, cursor=cursor, count=_SUMS_PAGE_SIZE)
            page, words = [], text.split("\n")
            for field, numbers in zip(words[::2], words[1::2], strict=False):
                place, _, name = field.partition("\t")
                if not name or name in seen[place]:
                    continue
                name_and_group = groups.get(name)
                if name_and_group is None:
                    name_and_group = groups[name] = name, parse_group(name)
                name, group = name_and_group  # one text in memory, however often it was read
                seen[place].add(name)
                page.append((int(place), group, tuple([int(number) for number in numbers.split()])))
            yield page
            if cursor == "0":
                return


def _arguments(entries: Sequence[Entry]) -> list[str | int]:
    """The entries as take.lua takes them, ten arguments each."""
    arguments: list[str | int] = []
    for entry in entries:
        began = datetime.fromtimestamp(entry.began_at, UTC)
        second = began.hour * 3600 + began.minute * 60 + began.second
        arguments += (field_of(entry.id), entry.id, _month(began), _day(began), f"{began.hour:02}", second)
        arguments += (int(entry.stage), entry.full_group, " ".join(map(str, entry.numbers)), entry.error)
    return arguments


def _day(time: date) -> str:
    return f"{time:%Y%m%d}"


def _month(time: date) -> str:
    return f"{time:%Y%m}"


def _midnight(day: date) -> datetime:
    return datetime(day.year, day.month, day.day, tzinfo=UTC)
