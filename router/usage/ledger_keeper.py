"""A router's background work for the ledger: sends lines, adopts spools of dead routers, archives days."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Final

import msgspec

from ...adapters.ended_tasks import end_tasks
from ...adapters.errors import RegistryUnavailable
from ...adapters.registry.ledger.archive import LedgerArchive
from ...adapters.registry.ledger.entry import Entry
from ...adapters.registry.ledger.ledger import Ledger
from ..loop_share import LoopShare
from .metering import Metering
from .orphaned_spools import entries_in, orphaned_spool
from .spool import Spool
from .spool_lines import FINAL, read_lines

SHIP_INTERVAL_S: Final = 0.5
PROGRESS_INTERVAL_S: Final = 1.0
OUTAGE_PROGRESS_INTERVAL_S: Final = 30.0  # while Redis takes no lines, so that progress does not fill the disk
PROGRESS_SHARE: Final = 0.02  # of the event loop, at most, for progress
ADOPT_INTERVAL_S: Final = 5.0
ARCHIVE_INTERVAL_S: Final = 900.0
_CLOSING_S: Final = 3.0
_ADOPTED_AT_ONCE: Final = 1000  # entries
_PILE_SEGMENTS: Final = 3
_decode: Final = msgspec.json.Decoder(Entry).decode
_log = logging.getLogger(__name__)


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
