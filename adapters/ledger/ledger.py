"""The ledger in Redis: what each tenant used, entry by entry for some days, summed by hour and day for longer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from itertools import islice
from typing import Any, Final

import msgspec
from redis.asyncio import Redis

from ..registry.redis_deadline import answered_within
from ..registry.registry_scripts import HOLD_SWEEP_SCRIPT
from .entry import Entry, Group, parse_group
from .ledger_scripts import ARCHIVIST, DAYS, ENTRIES, HOURS, SEEN, TAKE_SCRIPT, TENANTS, prefix_of

DAY_S: Final = 86_400
HOURS_KEPT_DAYS: Final = 40
DAYS_KEPT_DAYS: Final = 800
_BATCH_SIZE: Final = 100  # entries of a script, a few milliseconds of Redis's time
_PIPELINE_SIZE: Final = 50  # scripts that are sent at once
_PAGE_SIZE: Final = 1000
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

    def __init__(self, client: Redis, kept_days: int, timeout_s: float = 3.0) -> None:
        """`kept_days`: for so long after its day an id is known, and counted once; entries stay for as long."""
        self._client: Any = client
        self.kept_days, self._timeout_s = kept_days, timeout_s
        self._take_script = client.register_script(TAKE_SCRIPT)
        self._hold_script = client.register_script(HOLD_SWEEP_SCRIPT)

    async def take(self, entries: Sequence[Entry]) -> None:
        """Takes entries in, of any tenants. Each may have been taken in before."""
        by_tenant: defaultdict[str, list[Entry]] = defaultdict(list)
        for entry in entries:
            by_tenant[entry.tenant].append(entry)
        batches = (
            (tenant, found[start : start + _BATCH_SIZE])
            for tenant, found in by_tenant.items()
            for start in range(0, len(found), _BATCH_SIZE)
        )
        while some := [*islice(batches, _PIPELINE_SIZE)]:
            async with answered_within(self._timeout_s), self._client.pipeline(transaction=False) as pipeline:
                pipeline.sadd(TENANTS, *{tenant for tenant, _ in some})
                for tenant, batch in some:
                    await self._take_script(keys=[prefix_of(tenant)], args=self._arguments(batch), client=pipeline)
                await pipeline.execute()

    async def hours(self, tenant: str, day: date) -> list[Sum]:
        """What the tenant used in each hour of a day."""
        start = datetime(day.year, day.month, day.day, tzinfo=UTC)
        found = await self._sums(f"{prefix_of(tenant)}{HOURS}{_day(start)}")
        return [Sum(start + timedelta(hours=place), group, numbers) for place, group, numbers in found]

    async def days(self, tenant: str, month: date) -> list[Sum]:
        """What the tenant used on each day of the month that `month` is in."""
        start = datetime(month.year, month.month, 1, tzinfo=UTC)
        found = await self._sums(f"{prefix_of(tenant)}{DAYS}{_month(start)}")
        return [Sum(start + timedelta(days=place - 1), group, numbers) for place, group, numbers in found]

    async def tenants(self) -> list[str]:
        """Those that may have a ledger, sorted."""
        async with answered_within(self._timeout_s):
            return sorted(await self._client.smembers(TENANTS))

    async def first_day(self, tenant: str) -> date | None:
        """When the oldest entry that is kept was taken in, by Redis's clock; None: there is none."""
        async with answered_within(self._timeout_s):
            found = await self._client.xrange(prefix_of(tenant) + ENTRIES, count=1)
        return datetime.fromtimestamp(int(found[0][0].split("-")[0]) / 1000, UTC).date() if found else None

    async def entries_of(self, tenant: str, day: date) -> AsyncIterator[list[RawEntry]]:
        """Pages of the entries that were taken in on that day, by Redis's clock."""
        start = _midnight_ms(day)
        first, last = f"{start}-0", f"{start + DAY_S * 1000 - 1}"
        while True:
            async with answered_within(self._timeout_s):
                page = await self._client.xrange(prefix_of(tenant) + ENTRIES, first, last, count=_PAGE_SIZE)
            if page:
                yield [RawEntry(number, fields["e"]) for number, fields in page]
            if len(page) < _PAGE_SIZE:
                return
            first = f"({page[-1][0]}"

    async def trim(self, tenant: str, day: date) -> None:
        """Forgets the entries that were taken in on this day or before; sums stay."""
        async with answered_within(self._timeout_s):
            oldest = f"{_midnight_ms(day) + DAY_S * 1000}-0"
            await self._client.xtrim(prefix_of(tenant) + ENTRIES, minid=oldest, approximate=False)

    async def remove(self, tenant: str, now: datetime) -> None:
        """Forgets all of a tenant's ledger."""
        prefix, names = prefix_of(tenant), {ENTRIES}
        for number in range(-1, DAYS_KEPT_DAYS + 32):
            day = now - timedelta(days=number)
            names |= {HOURS + _day(day), SEEN + _day(day), DAYS + _month(day)}
        async with answered_within(self._timeout_s):
            await self._client.unlink(*(prefix + name for name in names))
            await self._client.srem(TENANTS, tenant)

    async def hold_archive(self, owner: str, hold_s: float) -> bool:
        """Whether `owner` alone archives, for so long from now on."""
        async with answered_within(self._timeout_s):
            return bool(await self._hold_script(keys=[ARCHIVIST], args=[owner, int(hold_s * 1000)]))

    async def _sums(self, key: str) -> list[tuple[int, Group, tuple[int, ...]]]:
        found: dict[str, str] = {}
        cursor = 0
        while True:
            async with answered_within(self._timeout_s):
                cursor, page = await self._client.hscan(key, cursor, count=_PAGE_SIZE)
            found |= page
            if not cursor:
                break
        split = ((*field.split("\t", 1), numbers) for field, numbers in found.items())
        return [(int(place), parse_group(group), tuple(map(int, told.split()))) for place, group, told in split]

    def _arguments(self, entries: Sequence[Entry]) -> list[str | int | bytes]:
        arguments: list[str | int | bytes] = [
            (self.kept_days + 1) * DAY_S,
            HOURS_KEPT_DAYS * DAY_S,
            DAYS_KEPT_DAYS * DAY_S,
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
