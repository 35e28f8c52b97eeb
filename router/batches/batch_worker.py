"""A router's share of all batches: it runs one of each tenant at a time, each while it holds its lease."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from ...adapters.ended_tasks import end_tasks
from ...adapters.errors import RegistryUnavailable
from ...adapters.registry.batches.batch_registry import BatchRegistry
from ...adapters.registry.lease import Lease
from ..metrics import Metrics
from .batch_runner import BatchRunner
from .pace import BatchPace

MOST_BATCHES: Final = 8  # that a router runs at once, each of another tenant
_PAGE: Final = 100  # tenants that are read together
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Running:
    runner: BatchRunner
    task: asyncio.Task[None]


class BatchWorker:
    """Works from `start()` to `stop()`. Belongs to one event loop."""

    def __init__(
        self,
        batches: BatchRegistry,
        make_runner: Callable[[str, str], BatchRunner],  # (tenant id, batch id)
        metrics: Metrics,
        pace: BatchPace,
    ) -> None:
        self._batches, self._make_runner, self._metrics, self._pace = batches, make_runner, metrics, pace
        self._holder = secrets.token_hex(8)
        self._running: dict[str, _Running] = {}  # by tenant id
        self._news = asyncio.Event()
        self._working: asyncio.Task[None] | None = None

    @property
    def num_running(self) -> int:
        return len(self._running)

    def start(self) -> None:
        assert self._working is None or self._working.done(), "it works already, and only the later task could be ended"
        self._working = asyncio.create_task(self._work())

    async def stop(self) -> None:
        """Gives running lines a few seconds to end, after which their results are lost."""
        await end_tasks(self._working)
        running = [one.task for one in self._running.values()]
        for one in self._running.values():
            one.runner.leave()
        if running:
            await asyncio.wait(running, timeout=self._pace.stop_s)
        await end_tasks(*running)

    def wake(self) -> None:
        """There is a new batch."""
        self._news.set()

    async def _work(self) -> None:
        while True:
            try:
                await self._take_more()
            except RegistryUnavailable:
                pass  # those that run wait for it, too
            except Exception:
                _log.exception("looking for batches failed")
            with suppress(TimeoutError):
                async with asyncio.timeout(self._pace.look_s):
                    await self._news.wait()
            self._news.clear()

    async def _take_more(self) -> None:
        """Begins batches of tenants that have waited longest, while there are places."""
        first = 0
        while tenants := await self._batches.tenants(first, _PAGE):
            for tenant_id in tenants:
                if tenant_id in self._running:
                    continue
                if len(self._running) >= MOST_BATCHES:
                    self._end_a_turn()
                    return
                await self._take_one_of(tenant_id)
            first += _PAGE

    async def _take_one_of(self, tenant_id: str) -> None:
        """The tenant's oldest batch that no other router runs."""
        for batch_id in await self._batches.queue(tenant_id):
            lease = self._batches.lease(batch_id)
            if await lease.hold(self._holder, self._pace.lease_s):
                await self._batches.take_turn(tenant_id)
                runner = self._make_runner(tenant_id, batch_id)
                self._running[tenant_id] = _Running(runner, asyncio.create_task(self._run(runner, lease)))
                self._metrics.num_running_batches = len(self._running)
                return

    def _end_a_turn(self) -> None:
        """Makes room for another tenant: the batch that has run longest is put back if its turn is over."""
        oldest = min((one.runner for one in self._running.values()), key=lambda runner: runner.began_at)
        if self._batches.clock() - oldest.began_at >= self._pace.turn_s:
            oldest.leave()

    async def _run(self, runner: BatchRunner, lease: Lease) -> None:
        running = asyncio.create_task(runner.run())
        keeping = asyncio.create_task(self._keep(lease))
        try:
            await asyncio.wait((running, keeping), return_when=asyncio.FIRST_COMPLETED)
            if running.done() and not running.cancelled():
                running.result()
        except BlockingIOError:
            pass  # the router that had it still writes, or its end has not been noticed: it is tried again
        except Exception:
            _log.exception("a batch cannot be run now", extra={"fields": {"batch": runner.batch_id}})
            await asyncio.sleep(self._pace.disk_s)  # what failed may be back by then
        finally:
            try:
                await end_tasks(running, keeping)
            finally:  # even if it is cancelled once more
                del self._running[runner.tenant_id]
                self._metrics.num_running_batches = len(self._running)
                with suppress(RegistryUnavailable):
                    await lease.hold(self._holder, 0)

    async def _keep(self, lease: Lease) -> None:
        """Returns when another router has the lease. Without Redis no router can take it: files are locked."""
        while True:
            await asyncio.sleep(self._pace.lease_s / 4)
            with suppress(RegistryUnavailable):
                if not await lease.hold(self._holder, self._pace.lease_s):
                    return
