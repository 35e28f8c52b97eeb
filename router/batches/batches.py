"""A router's part in files, stored responses and batches: its routes, what runs batches, what removes old files."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from redis.asyncio import Redis
from starlette.types import ASGIApp

from ...adapters.ended_tasks import end_tasks
from ...adapters.errors import NoSuchFile
from ...adapters.registry.batches.batch_registry import BatchRegistry
from ...adapters.registry.batches.file_registry import FileRegistry
from ...adapters.registry.registry_keys import RESPONSES
from ...adapters.registry.registry_view import RegistryView
from ...adapters.registry.tenants.audit_entry import Actor, AuditEntry
from ...adapters.registry.tenants.records import TenantRecord
from ..config import CurrentConfig
from ..metrics import Metrics
from ..quotas.quotas import Quotas
from ..route import RouteSpec, routes_of
from .batch_runner import BatchRunner
from .batch_worker import BatchWorker
from .batches_api import BatchesApi
from .file_store import FileStore
from .file_sweep import FileSweep
from .files_api import FilesApi
from .line_authenticator import LineAuthenticator
from .line_call import LineCaller
from .line_room import LineRoom
from .pace import BatchPace
from .responses_api import ResponsesApi
from .stored_responses import StoredResponses


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
            what="stored responses",
            most=lambda: config.now.max_stored_responses,
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
