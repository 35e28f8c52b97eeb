"""Removes files, stored responses and batches that have expired, and files on the disk that no record knows."""

from __future__ import annotations

import asyncio
import logging
import secrets

from ...adapters.errors import FileInUse, NoSuchFile, RegistryUnavailable
from ...adapters.registry.batches.batch_registry import BatchRegistry
from ...adapters.registry.batches.file_registry import FileRegistry
from ...adapters.registry.batches.records import FILE_PREFIX, RESPONSE_PREFIX
from .file_store import FileStore
from .stored_responses import StoredResponses

SWEEP_S = 600.0  # between sweeps, of all routers together
_LEASE_S = 120.0
_ORPHAN_S = 86_400.0  # a file that was not written for this time does not belong to a running upload
_LATER_S = 3600.0
_log = logging.getLogger(__name__)


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
            for tenant_id, one in expired:
                await self._remove(tenant_id, one)
            await self._files.sweeping.hold(self._holder, _LEASE_S)
        for tenant_id, names in await asyncio.to_thread(lambda: [*self._store.old_files(orphan_s)]):
            if not names:
                continue
            known = set[str]()
            async for page in self._batches.pages_of(tenant_id):
                for batch in page:
                    known |= set() if batch.has_ended else {batch.output_file_id, batch.error_file_id}
            # Afterwards: a batch that ends meanwhile has its files there.
            known.update(await self._files.ids_of(tenant_id))
            for name in names:
                if name not in known:
                    await asyncio.to_thread(self._store.delete, tenant_id, name)
        await self._files.sweeping.hold(self._holder, rest_s)
        return True

    async def _remove(self, tenant_id: str, one: str) -> None:
        if one.startswith(RESPONSE_PREFIX):
            await self._responses.remove(tenant_id, one)
        elif not one.startswith(FILE_PREFIX):
            batch = await self._batches.get(tenant_id, one)
            if batch is not None and not batch.has_ended:
                await self._files.put_off(tenant_id, one, _LATER_S)
                return
            await self._batches.delete(tenant_id, one)
        elif (file := await self._files.get(tenant_id, one)) is not None:
            try:
                await self._files.delete(file)
            except FileInUse:
                await self._files.put_off(tenant_id, one, _LATER_S)
                return
            except NoSuchFile:
                pass
            await asyncio.to_thread(self._store.delete, tenant_id, one)
        await self._files.forget_place(tenant_id, one)
