"""A router's part in files, stored responses and batches: its routes, what runs batches, what removes old files."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from redis.asyncio import Redis
from starlette.types import ASGIApp

from ...adapters.ended_tasks import end_tasks
from ...adapters.errors import FileInUse, NoSuchFile, RegistryUnavailable
from ...adapters.registry.batches.batch_registry import BatchRegistry
from ...adapters.registry.batches.file_registry import FileRegistry
from ...adapters.registry.batches.records import FILE_PREFIX, RESPONSE_PREFIX
from ...adapters.registry.launches import Lease
from ...adapters.registry.registry_keys import RESPONSES
from ...adapters.registry.registry_view import RegistryView
from ...adapters.registry.tenants.records import Actor, AuditEntry, TenantRecord
from ..config import CurrentConfig
from ..http.route import RouteSpec, routes_of
from ..metrics import Metrics
from ..tenancy.quotas import Quotas
from .batch_files import FileStore
from .batch_runner import BatchRunner
from .batches_api import BatchesApi, FilesApi
from .line_call import LineAuthenticator, LineCaller, LineRoom
from .schema import BatchPace
from .stored_responses import ResponsesApi, StoredResponses

# A router's share of all batches: it runs one of each tenant at a time, each while it holds its lease.

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
        running = [batch.task for batch in self._running.values()]
        for batch in self._running.values():
            batch.runner.leave()
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
        oldest = min((batch.runner for batch in self._running.values()), key=lambda runner: runner.began_at)
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


# Removes files, stored responses and batches that have expired, and files on the disk that no record knows.

SWEEP_S = 600.0  # between sweeps, of all routers together
_LEASE_S = 120.0
_ORPHAN_S = 86_400.0  # a file that was not written for this time does not belong to a running upload
_LATER_S = 3600.0


class FileSweep:
    def __init__(
        self, files: FileRegistry, batches: BatchRegistry, store: FileStore, responses: StoredResponses
    ) -> None:
        self._files, self._batches, self._store, self._responses = files, batches, store, responses
        self._holder = secrets.token_hex(8)

    async def sweep_forever(self) -> None:
        while True:
            try:
                await self.sweep(SWEEP_S)
            except (RegistryUnavailable, OSError) as error:
                _log.warning("expired files were not swept: %s", error)
            await asyncio.sleep(SWEEP_S)

    async def sweep(self, rest_s: float = 0.0, orphan_s: float = _ORPHAN_S) -> bool:
        """False: another router sweeps, or did so less than its `rest_s` ago. Raises RegistryUnavailable, OSError."""
        if not await self._files.sweeping.hold(self._holder, _LEASE_S):
            return False
        while expired := await self._files.expired():
            for tenant_id, entry_id in expired:
                await self._remove(tenant_id, entry_id)
            await self._files.sweeping.hold(self._holder, _LEASE_S)
        for tenant_id, names in await asyncio.to_thread(lambda: [*self._store.old_files(orphan_s)]):
            if not names:
                continue
            file_ids = set[str]()
            async for page in self._batches.pages_of(tenant_id):
                for batch in page:
                    file_ids |= set() if batch.has_ended else {batch.output_file_id, batch.error_file_id}
            # Afterwards: a batch that ends meanwhile has its files there.
            file_ids.update(await self._files.ids_of(tenant_id))
            for name in names:
                if name not in file_ids:
                    await asyncio.to_thread(self._store.delete, tenant_id, name)
        await self._files.sweeping.hold(self._holder, rest_s)
        return True

    async def _remove(self, tenant_id: str, entry_id: str) -> None:
        if entry_id.startswith(RESPONSE_PREFIX):
            await self._responses.remove(tenant_id, entry_id)
        elif not entry_id.startswith(FILE_PREFIX):
            batch = await self._batches.get(tenant_id, entry_id)
            if batch is not None and not batch.has_ended:
                await self._files.put_off(tenant_id, entry_id, _LATER_S)
                return
            await self._batches.delete(tenant_id, entry_id)
        elif (file := await self._files.get(tenant_id, entry_id)) is not None:
            try:
                await self._files.delete(file)
            except FileInUse:
                await self._files.put_off(tenant_id, entry_id, _LATER_S)
                return
            except NoSuchFile:
                pass
            await asyncio.to_thread(self._store.delete, tenant_id, entry_id)
        await self._files.forget_place(tenant_id, entry_id)


class Batches:
    """Works from `start()` to `stop()`. Everything belongs to one event loop."""

    def __init__(
        self,
        client: Redis,
        folder: Path,
        view: RegistryView,
        config: CurrentConfig,
        metrics: Metrics,
        quotas: Quotas | None = None,
        *,
        pace: BatchPace | None = None,
        clock: Callable[[], float] = time.time,
        timeout_s: float = 3.0,
    ) -> None:
        """`folder`: of all routers' files; stored responses are beside it. `timeout_s`: for Redis to answer."""
        self.files, self.batches = FileRegistry(client, timeout_s, clock), BatchRegistry(client, timeout_s, clock)
        self.store = FileStore(folder, lambda: config.now.min_free_bytes)
        self.authenticator = LineAuthenticator(view, clock)
        records = FileRegistry(
            client,
            timeout_s,
            clock,
            key=RESPONSES,
            kind="stored responses",
            max_files=lambda: config.now.max_stored_responses,
        )
        responses = FileStore(folder.with_name("responses"), lambda: config.now.min_free_bytes)
        self.responses = StoredResponses(config, records, responses, clock)
        self.sweep = FileSweep(self.files, self.batches, self.store, self.responses)
        self._view, self._config, self._metrics = view, config, metrics
        self._pace = pace or BatchPace()
        self.room = LineRoom()
        self._caller: LineCaller | None = None
        self._is_served: Callable[[], bool] = lambda: True
        self._worker = BatchWorker(self.batches, self._runner, metrics, self._pace)
        self._files_api = FilesApi(config, self.files, self.store, quotas, clock)
        self._batches_api = BatchesApi(config, self.batches, self._files_api, self._worker.wake)
        self._sweeping: asyncio.Task[None] | None = None

    def routes(self) -> Sequence[RouteSpec]:
        return routes_of(self._files_api, self._batches_api, ResponsesApi(self.responses))

    def answer_with(self, routes: Mapping[str, ASGIApp], is_served: Callable[[], bool]) -> None:
        """`routes`: what answers lines, by path. `is_served`: whether one may be answered now."""
        self._caller, self._is_served = LineCaller(routes, self.room), is_served

    def start(self) -> None:
        """The app has been made."""
        assert self._caller is not None
        self._worker.start()
        self._sweeping = asyncio.create_task(self.sweep.sweep_forever())

    async def stop(self) -> None:
        await end_tasks(self._sweeping)
        await self._worker.stop()
        await self.responses.wait()

    async def retire(self, tenant_id: str) -> None:
        """A tenant is deleted with all its files, responses and batches. Those that run end by themselves."""
        await self.files.retire(tenant_id)
        await asyncio.to_thread(self.store.retire, tenant_id)
        await self.responses.retire(tenant_id)

    async def delete_of_user(self, tenant: TenantRecord, user: str) -> int:
        """Deletes a user's files, responses and batches, and returns how many. Its keys are gone by now."""
        num_deleted = await self.responses.remove_of_user(tenant.tenant_id, user)
        async for batches in self.batches.pages_of(tenant.tenant_id):
            for batch in batches:
                if batch.user == user:
                    num_deleted += await self.batches.delete(tenant.tenant_id, batch.id) is not None
        async for files in self.files.pages_of(tenant.tenant_id):
            for file in files:
                if file.user == user:
                    with suppress(NoSuchFile):
                        await self._files_api.remove(file)
                        num_deleted += 1
        return num_deleted

    async def cancel_of_user(self, tenant: TenantRecord, user: str, actor: Actor) -> int:
        """Cancels a user's batches, each with an entry in the audit log. Returns how many have not ended yet."""
        num_cancelled = 0
        for batch_id in await self.batches.queue(tenant.tenant_id):
            batch = await self.batches.get(tenant.tenant_id, batch_id)
            if batch is not None and batch.user == user:
                entry = AuditEntry(
                    action="batch.cancel", tenant=tenant.name, target=batch_id, changed={"user": user}, actor=actor
                )
                batch = await self.batches.cancel(tenant.tenant_id, batch_id, entry)
                num_cancelled += batch is not None and not batch.has_ended
        return num_cancelled

    def _runner(self, tenant_id: str, batch_id: str) -> BatchRunner:
        assert self._caller is not None
        return BatchRunner(
            tenant_id,
            batch_id,
            batches=self.batches,
            store=self.store,
            caller=self._caller,
            view=self._view,
            metrics=self._metrics,
            pace=self._pace,
            is_served=self._is_served,
            most_lines=lambda: max(1, self._config.now.max_batch_lines // max(1, self._worker.num_running)),
            kept_s=lambda: self._config.now.file_days * 86_400.0,
        )
