"""A router's part in the ledger: /v1/usage, counts of answers sent to Redis, and spools of dead routers adopted."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack, contextmanager
from datetime import UTC, date, datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import Final

import msgspec
from redis.asyncio import Redis
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ...adapters.ended_tasks import end_tasks
from ...adapters.errors import RegistryUnavailable
from ...adapters.registry.ledger.archive import LedgerArchive
from ...adapters.registry.ledger.entry import Entry, Group, merged
from ...adapters.registry.ledger.ledger import Ledger, Sum
from ...adapters.registry.registry_view import RegistryView
from ...adapters.registry.tenants.records import TenantRecord, parse_tenant_id
from ..bodies.body_reader import Turns
from ..http.auth import Identity
from ..http.errors import RETRY_AFTER_S, ApiError
from ..http.loop_turns import LoopShare
from ..http.route import Answer, RouteSpec, route, routes_of
from ..tenancy.metering import Metering
from ..tenancy.spool import FINAL, LOCK_SUFFIX, Spool, boot_id, read_lines, read_segment
from .usage_rows import Prices, UsageList, UsageQuery, UsageSums, csv_head, csv_line, usage_query

# /v1/usage: what a tenant has used; /v1/admin/usage: the same of all tenants, for the operators.

# A long CSV as an answer: streamed, no faster than its client reads.

LONGEST_S: Final = 300.0  # after which a client that reads too slowly is cut off: what the answer is made of is held


class CsvAnswer:
    """An `Answer` of endpoint.py. It must be called once."""

    status_code = 200

    def __init__(self, parts: AsyncIterator[bytes], resources: AsyncExitStack) -> None:
        """`resources`: is closed when the answer has ended, however it ends."""
        self._parts, self._resources = parts, resources
        self.raw_headers: list[tuple[bytes, bytes]] = [(b"content-type", b"text/csv; charset=utf-8")]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._resources:
            try:
                async with asyncio.timeout(LONGEST_S):
                    await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                    async for part in self._parts:
                        await send({"type": "http.response.body", "body": part, "more_body": True})
                    await send({"type": "http.response.body", "body": b""})
            except TimeoutError:
                pass  # the server closes the connection of an answer that has not ended: no client takes it for whole


# How many sums all answers for usage hold in a router's memory together: no more than there is room for.

MAX_HELD: Final = 2_000_000  # some 800 MB
MAX_HELD_FOR_CSV: Final = 1_500_000  # the rest is left to others while clients read their CSV slowly
_RETRY_AFTER_S: Final = 10


class HeldSums:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self.num_held = 0

    @contextmanager
    def answer(self, *, is_csv: bool) -> Iterator[Callable[[int], None]]:
        """What is called with how many sums the answer holds by now; they are given back when the block ends.

        It raises a 429 if there is no room for more. What it was called with is counted before it is checked, so that
        a page of the ledger may be over what there is room for.
        """
        num_counted = 0

        def hold(num_sums: int) -> None:
            nonlocal num_counted
            grown = num_sums - num_counted
            num_counted = num_sums
            self.num_held += grown
            if grown and self.num_held > (MAX_HELD_FOR_CSV if is_csv else MAX_HELD):
                message = "Other answers for usage take the memory that is for them: ask again later, or for less time."
                raise ApiError(429, message, code="too_many_requests", headers={"Retry-After": str(_RETRY_AFTER_S)})

        try:
            yield hold
        finally:
            self.num_held -= num_counted


# Which queries for usage run now: those of one caller one after the other, and few of all callers at once.
#
# A query may read a great many sums, and holds its answer in memory until its client has it.

MAX_OF_CALLER: Final = 8  # that run or wait; a page with several charts sends one for each
MAX_READING: Final = 4  # of all callers, that read at once


class UsageTurns:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self._queries = Turns(1)
        # Held for one month or day of a tenant, so that long queries do not block others.
        self.reading = asyncio.Semaphore(MAX_READING)

    def turn(self, caller: str) -> AbstractAsyncContextManager[None]:
        """Waits until no other query of the caller runs. Raises a 429 if too many wait already."""
        if self._queries.num_here(caller) >= MAX_OF_CALLER:
            message = f"{MAX_OF_CALLER} of your queries for usage are under way: try again when one has been answered."
            raise ApiError(429, message, code="too_many_requests", headers={"Retry-After": str(RETRY_AFTER_S)})
        return self._queries.of(caller)


_OPERATORS: Final = ""  # which is not a valid name of a tenant
_QUERY: Final = {"by": str, "from": str, "to": str, "format": str, "limit": int, "after": int}
_CSV: Final = {"text/csv": "The same, with `format=csv`."}
_ERRORS: Final = ("registry_unavailable", "too_many_requests")
_PRIVATE: Final = Group("(private)", "(private)", 0, "", "(private)")  # stands for all users' private adapters
_CSV_LINES: Final = 100  # in a chunk


class UsageApi:
    def __init__(self, view: RegistryView, ledger: Ledger, prices: Prices | None) -> None:
        """`prices`: None: amounts are not shown."""
        self._view, self._ledger, self._prices = view, ledger, prices
        self._turns, self._sums = UsageTurns(), HeldSums()

    @route(
        "GET",
        "/v1/usage",
        scope="metrics",
        summary="What the tenant has used, by hour, day, adapter, key or user.",
        query=_QUERY,
        answers={200: UsageList},
        texts=_CSV,
        errors=_ERRORS,
    )
    async def show(self, request: Request, identity: Identity) -> Answer:
        """Only the tenant's own usage; with the key of a user who is not an administrator, only that user's."""
        query = usage_query(request.query_params, datetime.now(UTC), for_operators=False)
        return await self._answer(
            identity.tenant.tenant_id, query, lambda: _single(identity.tenant), _shown_to(identity)
        )

    @route(
        "GET",
        "/v1/admin/usage",
        scope="operator",
        summary="What all tenants have used, for the operators.",
        query={**_QUERY, "tenant": str},
        answers={200: UsageList},
        texts=_CSV,
        errors=_ERRORS,
    )
    async def show_all(self, request: Request) -> Answer:
        """Tenants that there are: what a deleted one used is in the archive alone."""
        query = usage_query(request.query_params, datetime.now(UTC), for_operators=True)
        if query.tenant is not None:
            tenant = self._view.tenant(query.tenant)
            return await self._answer(_OPERATORS, query, lambda: _single(tenant))
        return await self._answer(_OPERATORS, query, self._tenants)

    async def _tenants(self) -> AsyncIterator[TenantRecord]:
        for tenant_id in await self._ledger.tenant_ids():
            tenant = self._view.tenant(parse_tenant_id(tenant_id)[0])
            if tenant.tenant_id == tenant_id:
                yield tenant

    async def _answer(
        self,
        caller: str,
        query: UsageQuery,
        tenants: Callable[[], AsyncIterator[TenantRecord]],
        view: Callable[[Group], Group | None] = lambda group: group,
    ) -> Answer:
        async with AsyncExitStack() as turn:
            await turn.enter_async_context(self._turns.turn(caller))
            hold = turn.enter_context(self._sums.answer(is_csv=query.is_csv))
            totals, share = UsageSums(query, self._prices, view), LoopShare()
            async for tenant in tenants():
                for pages in self._reads(tenant.tenant_id, query):
                    await self._add(totals, tenant.name, pages, hold, share)
            if query.is_csv:
                return CsvAnswer(_csv(totals, query.limit), turn.pop_all())
            has_more, rows = False, list[msgspec.Raw]()
            async for row in totals.rows(share):
                if len(rows) == query.limit:
                    has_more = True
                    break
                rows.append(msgspec.Raw(msgspec.json.encode(row)))
            body = msgspec.json.encode(totals.list_of(rows, has_more=has_more))
            return Response(body, media_type="application/json")

    async def _add(
        self,
        totals: UsageSums,
        tenant: str,
        pages: AsyncIterator[list[Sum]],
        hold: Callable[[int], None],
        share: LoopShare,
    ) -> None:
        async with self._turns.reading:
            async for page in pages:
                totals.add(tenant, page)
                hold(totals.num_sums)
                await share.pause()

    def _reads(self, tenant_id: str, query: UsageQuery) -> Iterator[AsyncIterator[list[Sum]]]:
        """Sums of the days of each month, or of the hours of each day."""
        last = (query.end - timedelta(seconds=1)).date()
        if query.needs_hours:
            for number in range((last - query.start.date()).days + 1):
                yield self._ledger.hours(tenant_id, query.start.date() + timedelta(days=number))
            return
        month = query.start.date().replace(day=1)
        while month <= last:
            yield self._ledger.days(tenant_id, month)
            month = date(month.year + month.month // 12, month.month % 12 + 1, 1)


def _shown_to(identity: Identity) -> Callable[[Group], Group | None]:
    """The part of the tenant's usage that the caller may see.

    A user sees its own; a key without a user no private adapters.
    """
    if identity.is_admin:
        return lambda group: group
    if identity.user:
        return lambda group: group if group.user == identity.user else None
    return lambda group: group if identity.sight.sees(group.adapter) else _PRIVATE


async def _single(tenant: TenantRecord) -> AsyncIterator[TenantRecord]:
    yield tenant


async def _csv(totals: UsageSums, limit: int | None) -> AsyncIterator[bytes]:
    """Some kilobytes at a time."""
    lines, num_rows = [csv_head()], 0
    async for row in totals.rows(LoopShare()):
        if num_rows == limit:
            break
        num_rows += 1
        lines.append(csv_line(row, totals.currency))
        if len(lines) == _CSV_LINES:
            yield "".join(lines).encode()
            lines.clear()
    yield "".join(lines).encode()


# Spools whose routers have died: which router may take them over, and what they hold.
#
# A router holds a lock (flock) on a file beside its spool. The kernel frees it when the process ends, however it ends.
# On a folder that several machines share the lock of another machine's router may not be seen here: such a spool is
# taken only if its router has also not touched the file for a while, by the clock of the file server.

SILENT_S: Final = 600.0  # after which a router of another machine is taken for dead
_decode: Final = msgspec.json.Decoder(Entry).decode
_log = logging.getLogger(__name__)


@contextmanager
def orphaned_spool(folder: Path, own_lock: Path) -> Iterator[list[Path] | None]:
    """The files of a spool whose router is dead, oldest first; None: there is none. Blocks.

    While the block lasts no other router can take it. Its files are removed when the block ends without an error.
    """
    own_time = own_lock.stat().st_mtime
    for path in sorted(folder.glob(f"*{LOCK_SUFFIX}")):
        lock = None if path == own_lock else _take(path, own_time)
        if lock is None:
            continue
        try:
            files = sorted(folder.glob(f"{path.name.removesuffix(LOCK_SUFFIX)}.*.log"))
            yield files
            for file in files:
                file.unlink(missing_ok=True)
            path.unlink(missing_ok=True)
        finally:
            os.close(lock)
        return
    yield None


def entries_in(files: list[Path]) -> Iterator[Entry]:
    """The lines of a dead router's files that are not acknowledged: answers that ended, then those under way."""
    under_way: dict[str, Entry] = {}
    num_damaged = 0
    for path in files:
        for kind, payload, is_acknowledged in read_segment(path):
            try:
                entry = _decode(payload) if kind else None
            except msgspec.MsgspecError:
                entry = None
            if entry is None:
                num_damaged += 1
            elif kind != FINAL:
                before = under_way.get(entry.id)
                under_way[entry.id] = entry if before is None else merged(before, entry)
            else:
                before = under_way.get(entry.id)
                if before is not None and merged(entry, before) == entry:  # else a resumed connection goes on
                    del under_way[entry.id]
                if not is_acknowledged:
                    yield entry
    if num_damaged:
        _log.warning("%d lines in the ledger of a router that has died are damaged: they are passed over", num_damaged)
    yield from under_way.values()


def _take(path: Path, own_time: float) -> int | None:
    """The lock's handle; None: its router lives, or another router has taken it."""
    try:
        lock = os.open(path, os.O_RDWR)
    except OSError:
        return None
    try:
        is_here = os.read(lock, 256).decode(errors="replace") == boot_id()
        status = os.stat(path)
        if not is_here and own_time - status.st_mtime < SILENT_S:
            raise BlockingIOError
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.stat(path).st_ino != os.fstat(lock).st_ino:
            raise BlockingIOError
    except OSError:
        os.close(lock)
        return None
    return lock


# A router's background work for the ledger: sends lines, adopts spools of dead routers, archives days.

SHIP_INTERVAL_S: Final = 0.5
PROGRESS_INTERVAL_S: Final = 1.0
OUTAGE_PROGRESS_INTERVAL_S: Final = 30.0  # while Redis takes no lines, so that progress does not fill the disk
PROGRESS_SHARE: Final = 0.02  # of the event loop, at most, for progress
ADOPT_INTERVAL_S: Final = 5.0
ARCHIVE_INTERVAL_S: Final = 900.0
_CLOSING_S: Final = 3.0
_ADOPTED_AT_ONCE: Final = 1000  # entries
_PILE_SEGMENTS: Final = 3


class LedgerKeeper:
    """Runs between `start()` and `stop()`. Owned by one event loop."""

    def __init__(self, spool: Spool, metering: Metering, ledger: Ledger, archive: LedgerArchive, folder: Path) -> None:
        """`folder`: where the spools of all routers are."""
        self._spool, self._metering, self._ledger, self._archive = spool, metering, ledger, archive
        self._folder = folder
        self._tasks: list[asyncio.Task[None]] = []
        self._shipping = asyncio.Lock()  # else two tasks could acknowledge the same lines
        self._behind_since: float | None = None  # time.monotonic(); None: all lines have arrived
        self._progress_s = 0.0  # CPU time of the last writing of progress

    @property
    def num_waiting_bytes(self) -> int:
        """Bytes of lines that Redis does not have yet."""
        return self._spool.num_waiting_bytes

    @property
    def behind_s(self) -> float:
        """How long there have been lines that Redis does not have."""
        return 0.0 if self._behind_since is None else time.monotonic() - self._behind_since

    def start(self) -> None:
        jobs: list[tuple[Callable[[], Awaitable[object]], Callable[[], float]]] = [
            (self.ship, lambda: SHIP_INTERVAL_S),
            (self._write_progress, self._progress_interval_s),
            (self.adopt, lambda: ADOPT_INTERVAL_S),
            (self._archive_days, lambda: ARCHIVE_INTERVAL_S),
        ]
        self._tasks = [asyncio.create_task(_forever(work, interval_s)) for work, interval_s in jobs]

    async def stop(self) -> None:
        """Sends what is left, if Redis answers; else it stays on disk for another router."""
        await end_tasks(*self._tasks)
        try:
            async with asyncio.timeout(_CLOSING_S):
                await self.ship()
        except (RegistryUnavailable, TimeoutError) as error:
            _log.warning("the ledger keeps its last lines on disk for another router: %s", error)
        await self._spool.close()

    async def ship(self) -> None:
        """Sends all lines to Redis. Raises RegistryUnavailable; lines that were sent are not sent again."""
        async with self._shipping:
            await self._ship()

    async def _ship(self) -> None:
        while (segment := self._spool.oldest_unacknowledged()) is not None:
            if self._behind_since is None:
                self._behind_since = time.monotonic()
            share, entries, num_bytes = LoopShare(), [], 0
            for kind, payload, num_bytes in read_lines(segment.unacknowledged()):  # noqa: B007
                if kind == FINAL:
                    entries.append(_decode(payload))
                await share.pause()  # there may be thousands of lines of progress, which are not sent
            if entries:
                try:
                    await self._ledger.take(entries)
                except RegistryUnavailable:
                    await self._spool.sync()
                    raise
            segment.acknowledge(num_bytes)
        self._behind_since = None

    async def adopt(self) -> int:
        """Takes over the spools of dead routers. Returns how many."""
        await asyncio.to_thread(self._spool.touch)
        num_adopted = 0
        while True:
            with ExitStack() as stack:
                entering = orphaned_spool(self._folder, self._spool.lock_path)
                files = await asyncio.to_thread(stack.enter_context, entering)
                if files is None:
                    return num_adopted
                entries = entries_in(files)
                while some := await asyncio.to_thread(_next, entries):
                    await self._ledger.take(some)
                num_adopted += 1
                _log.info("took over the ledger of a router that has died: %d files", len(files))

    async def _write_progress(self) -> None:
        began = time.process_time()
        await self._spool.drop_before(await self._metering.write_progress())
        self._progress_s = time.process_time() - began

    def _progress_interval_s(self) -> float:
        usual = PROGRESS_INTERVAL_S if self._spool.num_segments < _PILE_SEGMENTS else OUTAGE_PROGRESS_INTERVAL_S
        return max(usual, self._progress_s / PROGRESS_SHARE)

    async def _archive_days(self) -> None:
        if await self._ledger.hold_archive(self._spool.name, 2 * ARCHIVE_INTERVAL_S):
            await self._archive.archive_all(datetime.now(UTC))


def _next(entries: Iterator[Entry]) -> list[Entry]:
    return [*islice(entries, _ADOPTED_AT_ONCE)]


async def _forever(work: Callable[[], Awaitable[object]], interval_s: Callable[[], float]) -> None:
    is_failing = False
    while True:
        try:
            await work()
            is_failing = False
        except (RegistryUnavailable, OSError) as error:
            if not is_failing:
                _log.warning("the ledger's background work failed, trying again: %s", error)
            is_failing = True
        except Exception:
            _log.exception("the ledger's background work failed")
        await asyncio.sleep(interval_s())


LEDGERS_PART = 4  # the ledger leaves a quarter of what uploads leave free, so uploads alone never stop answers


class UsageService:
    """Works from `start()` to `stop()`. Everything belongs to one event loop."""

    def __init__(
        self,
        client: Redis,
        spool_path: Path,
        archive_path: Path,
        *,
        kept_days: int,
        spool_bytes: int,
        min_free_bytes: int,
        prices: Prices | None,
    ) -> None:
        """`spool_path`: the folder of all routers' spools. `spool_bytes`: at most, and `min_free_bytes` stay free."""
        self.ledger = Ledger(client, kept_days)
        self.archive = LedgerArchive(self.ledger, archive_path)
        self._prices = prices
        self._spool = Spool(spool_path, spool_bytes, min_free_bytes)
        self.metering = Metering(self._spool)
        self.keeper = LedgerKeeper(self._spool, self.metering, self.ledger, self.archive, spool_path)

    async def start(self) -> None:
        """Raises OSError if the disk has no room for a spool."""
        await self._spool.start()
        self.keeper.start()

    async def stop(self) -> None:
        await self.keeper.stop()

    async def retire(self, tenant_id: str) -> None:
        """A tenant is deleted: its ledger is archived and removed."""
        await self.archive.retire(tenant_id, datetime.now(UTC))

    def routes(self, view: RegistryView) -> Sequence[RouteSpec]:
        return routes_of(UsageApi(view, self.ledger, self._prices))

    def behind(self) -> tuple[int, float]:
        """What Redis does not have yet: bytes of lines, and the seconds since there have been any."""
        return self.keeper.num_waiting_bytes, self.keeper.behind_s
