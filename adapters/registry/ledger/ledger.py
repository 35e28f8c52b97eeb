"""The ledger in Redis: what each tenant used, entry by entry for some days, summed by hour and day for longer."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Any, Final

import msgspec
from redis.asyncio import Redis

from ..lease import Lease
from ..redis_deadline import answered_within
from .entry import Entry, Group, parse_group
from .ledger_scripts import ARCHIVIST, DAYS, ENTRIES, HOURS, LIVES, SEEN, SUMS_SCRIPT, TAKE_SCRIPT, prefix_of

DAY_S: Final = 86_400
HOURS_KEPT_DAYS: Final = 40
DAYS_KEPT_DAYS: Final = 800
MAX_GROUPS: Final = 20_000  # of a tenant, on a day, that are kept apart
_BATCH_SIZE: Final = 100  # entries of a script, a few milliseconds of Redis's time
_SENT_AT_ONCE: Final = 200  # entries, which the event loop writes and reads in one piece
_PAGE_SIZE: Final = 1000
_SUMS_PAGE_SIZE: Final = 200  # of what the event loop reads in one piece
_encode: Final = msgspec.json.Encoder().encode


@dataclass(frozen=True)
class Sum:
    """What a group used in an hour, or on a day."""

    start: datetime  # UTC
    group: Group
    numbers: tuple[int, ...]  # as `NUMBERS` of entry.py names them; there may be fewer, the rest is 0


@dataclass(frozen=True)
class RawEntry:
    number: str  # of the stream: grows with each entry of a tenant
    text: str  # JSON of an `Entry`


class Ledger:
    """Raises RegistryUnavailable when Redis does not answer in time. Every call may be repeated."""

    def __init__(self, client: Redis, kept_days: int, timeout_s: float = 3.0, max_groups: int = MAX_GROUPS) -> None:
        """`kept_days`: for so long after its day an id is known, and counted once; entries stay for as long.

        `max_groups`: of a tenant and a day; what is beyond them is counted for `OTHERS`.
        """
        self._client: Any = client
        self.kept_days, self._timeout_s, self._max_groups = kept_days, timeout_s, max_groups
        self._take_script = client.register_script(TAKE_SCRIPT)
        self._sums_script = client.register_script(SUMS_SCRIPT)
        self._archivist = Lease(client, ARCHIVIST, timeout_s)

    async def take(self, entries: Sequence[Entry]) -> None:
        """Takes entries in, of any tenants. Each may have been taken in before."""
        for start in range(0, len(entries), _SENT_AT_ONCE):
            by_life: defaultdict[str, list[Entry]] = defaultdict(list)
            for entry in entries[start : start + _SENT_AT_ONCE]:
                by_life[entry.life].append(entry)
            async with answered_within(self._timeout_s), self._client.pipeline(transaction=False) as pipeline:
                pipeline.sadd(LIVES, *by_life)
                for life, found in by_life.items():
                    for first in range(0, len(found), _BATCH_SIZE):
                        arguments = self._arguments(found[first : first + _BATCH_SIZE])
                        await self._take_script(keys=[prefix_of(life)], args=arguments, client=pipeline)
                await asyncio.sleep(0)
                await pipeline.execute()

    async def hours(self, life: str, day: date) -> AsyncIterator[list[Sum]]:
        """What a tenant used in each hour of a day, in small pages."""
        start = datetime(day.year, day.month, day.day, tzinfo=UTC)
        async for page in self._sums(f"{prefix_of(life)}{HOURS}{_day(start)}"):
            yield [Sum(start + timedelta(hours=place), group, numbers) for place, group, numbers in page]

    async def days(self, life: str, month: date) -> AsyncIterator[list[Sum]]:
        """What a tenant used on each day of the month that `month` is in, in small pages."""
        start = datetime(month.year, month.month, 1, tzinfo=UTC)
        async for page in self._sums(f"{prefix_of(life)}{DAYS}{_month(start)}"):
            yield [Sum(start + timedelta(days=place - 1), group, numbers) for place, group, numbers in page]

    async def lives(self) -> list[str]:
        """Those of tenants that may have a ledger, sorted."""
        async with answered_within(self._timeout_s):
            return sorted(await self._client.smembers(LIVES))

    async def first_day(self, life: str) -> date | None:
        """When the oldest entry that is kept was taken in, by Redis's clock; None: there is none."""
        async with answered_within(self._timeout_s):
            found = await self._client.xrange(prefix_of(life) + ENTRIES, count=1)
        return datetime.fromtimestamp(int(found[0][0].split("-")[0]) / 1000, UTC).date() if found else None

    async def entries_of(self, life: str, day: date) -> AsyncIterator[list[RawEntry]]:
        """Pages of the entries that were taken in on that day, by Redis's clock."""
        start = _midnight_ms(day)
        first, last = f"{start}-0", f"{start + DAY_S * 1000 - 1}"
        while True:
            async with answered_within(self._timeout_s):
                page = await self._client.xrange(prefix_of(life) + ENTRIES, first, last, count=_PAGE_SIZE)
            if page:
                yield [RawEntry(number, fields["e"]) for number, fields in page]
            if len(page) < _PAGE_SIZE:
                return
            first = f"({page[-1][0]}"

    async def trim(self, life: str, day: date) -> None:
        """Forgets the entries that were taken in on this day or before; sums stay."""
        async with answered_within(self._timeout_s):
            oldest = f"{_midnight_ms(day) + DAY_S * 1000}-0"
            await self._client.xtrim(prefix_of(life) + ENTRIES, minid=oldest, approximate=False)

    async def remove(self, life: str, now: datetime) -> None:
        """Forgets all of a tenant's ledger."""
        prefix, names = prefix_of(life), {ENTRIES}
        for number in range(-1, DAYS_KEPT_DAYS + 32):
            day = now - timedelta(days=number)
            names |= {HOURS + _day(day), SEEN + _day(day), DAYS + _month(day)}
        async with answered_within(self._timeout_s):
            await self._client.unlink(*(prefix + name for name in names))
            await self._client.srem(LIVES, life)

    async def hold_archive(self, owner: str, hold_s: float) -> bool:
        """Whether `owner` alone archives, for so long from now on."""
        return await self._archivist.hold(owner, hold_s)

    async def _sums(self, key: str) -> AsyncIterator[list[tuple[int, Group, tuple[int, ...]]]]:
        # Redis may tell a field twice while it makes room for more. By hour or day, since a set that is large takes
        # long when it grows.
        seen: defaultdict[str, set[str]] = defaultdict(set)
        groups: dict[str, tuple[str, Group]] = {}  # each is there for many hours or days
        cursor = "0"
        while True:
            async with answered_within(self._timeout_s):
                cursor, told = await self._sums_script(keys=[key], args=[cursor, _SUMS_PAGE_SIZE])
            page, words = [], told.split("\n")
            for field, numbers in zip(words[::2], words[1::2], strict=False):
                place, _, name = field.partition("\t")
                if not name or name in seen[place]:
                    continue
                known = groups.get(name)
                if known is None:
                    known = groups[name] = name, parse_group(name)
                name, group = known  # one text in memory, however often it was read
                seen[place].add(name)
                page.append((int(place), group, tuple([int(number) for number in numbers.split()])))
            yield page
            if cursor == "0":
                return

    def _arguments(self, entries: Sequence[Entry]) -> list[str | int | bytes]:
        arguments: list[str | int | bytes] = [
            (self.kept_days + 1) * DAY_S,
            HOURS_KEPT_DAYS * DAY_S,
            DAYS_KEPT_DAYS * DAY_S,
            self._max_groups,
        ]
        for entry in entries:
            began = datetime.fromtimestamp(entry.began_at, UTC)
            arguments += (entry.id, _month(began), _day(began), f"{began.hour:02}", int(entry.stage))
            arguments += (str(entry.group), " ".join(map(str, entry.numbers)), _encode(entry))
        return arguments


def _day(time: datetime) -> str:
    return f"{time:%Y%m%d}"


def _month(time: datetime) -> str:
    return f"{time:%Y%m}"


def _midnight_ms(day: date) -> int:
    return int(datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp()) * 1000
