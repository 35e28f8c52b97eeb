"""A router's part in the ledger: counts of answers go to Redis, and spools of dead routers are adopted."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Final

import msgspec
from redis.asyncio import Redis

from ...adapters.ended_tasks import end_tasks
from ...adapters.errors import RegistryUnavailable
from ...adapters.registry.ledger.archive import LedgerArchive
from ...adapters.registry.ledger.entry import Entry, merged
from ...adapters.registry.ledger.ledger import Ledger
from ...adapters.registry.registry_view import RegistryView
from ..http.loop_turns import LoopShare
from ..http.route import RouteSpec, routes_of
from ..tenancy.metering import Metering
from ..tenancy.spool import FINAL, LOCK_SUFFIX, Spool, boot_id, read_lines, read_segment
from .usage_api import UsageApi
from .usage_rows import Prices

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


class Usage:
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
