"""Uploads of adapters: validate, store, register. An upload that is refused changes nothing."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from .adapter import AdapterVersion
from .errors import UploadTooLarge
from .format.content import AdapterContent
from .format.peft import CONFIG_FILE, TENSORS_FILE
from .format.validation import validate
from .names import check_name, check_tenant
from .packing.layout import AdapterLayout
from .registry.events import AdapterDeleted, AdapterSet
from .registry.registry import Registry
from .registry.registry_view import RegistryView
from .store.store import BEGINNINGS, AdapterStore
from .tenants.audit_entry import AuditEntry

_SWEEP_LEASE_S = 60.0  # of a 256th of a store; after so long another router takes over from one that died


@dataclass(frozen=True, kw_only=True)
class UploadLimits:
    max_tensors_bytes: int  # of adapter_model.safetensors
    max_config_bytes: int = 1 << 20
    max_concurrent: int = 2  # uploads validated and packed at once, each in a thread


class UploadService:
    """Uploads, lists and deletes adapters. Owned by one event loop; tensors are handled in threads.

    Adapters are packed for each of `layouts`, which are of one base. `reserved`: names that no adapter may have.
    """

    def __init__(
        self,
        store: AdapterStore,
        registry: Registry,
        view: RegistryView,
        layouts: Sequence[AdapterLayout],
        limits: UploadLimits,
        reserved: Collection[str] = (),
    ) -> None:
        if not layouts or any(layout.shape != layouts[0].shape for layout in layouts):
            raise ValueError(f"{len(layouts)} layouts: at least one is needed, and all must be of one base")
        self.limits = limits
        self._store = store
        self._registry = registry
        self._view = view
        self._layouts = tuple(layouts)
        self._reserved = frozenset(reserved)
        self._slots = asyncio.Semaphore(self.limits.max_concurrent)

    async def upload(
        self,
        tenant: str,
        name: str,
        config: bytes | Path,
        tensors: Path,
        *,
        num_ended: int | None = None,
        entry: AuditEntry | None = None,
    ) -> tuple[AdapterVersion, bool]:
        """The version that the name points to from now on, and whether this upload made it: the same content does not.

        `config` is adapter_config.json, as bytes or a file; `tensors` is the file adapter_model.safetensors. The caller
        removes both afterwards. Once this returns, the adapter is on disk. `num_ended` and `entry`: see
        `Registry.register`. Raises AdapterInvalid, UploadTooLarge, TenantGone, RegistryUnavailable; after the last one
        the same upload may be repeated.
        """
        check_tenant(tenant)
        check_name(name, self._reserved)
        await self._registry.ping()  # no work for an upload that cannot be registered
        async with self._slots:
            content = await asyncio.to_thread(self._keep, config, tensors)
        adapter, created = await self._registry.register(
            tenant,
            name,
            digest=content.digest,
            module_ranks=content.module_ranks,
            num_bytes=content.num_bytes,
            num_ended=num_ended,
            entry=entry,
        )
        self._view.apply(AdapterSet(adapter))
        return adapter, created

    async def delete(self, tenant: str, name: str, entry: AuditEntry | None = None) -> bool:
        """Deletes the name; whether there was one. Sequences that run on it finish. Raises RegistryUnavailable."""
        version = await self._registry.delete(tenant, name, entry)
        if version is None:
            return False
        self._view.apply(AdapterDeleted(tenant, name, version))
        return True

    async def list_page(self, tenant: str, after: str, limit: int) -> Sequence[AdapterVersion]:
        """At most `limit` of them, from behind the name `after`. Raises RegistryUnavailable."""
        return await self._registry.list_adapters(tenant, after, limit)

    async def list(self, tenant: str) -> Sequence[AdapterVersion]:
        """The tenant's adapters, sorted by name. Raises RegistryUnavailable."""
        return await self._registry.list(tenant)

    async def get(self, tenant: str, name: str) -> AdapterVersion | None:
        """The name's current version. Raises RegistryUnavailable."""
        return await self._registry.get(tenant, name)

    async def sweep(self, older_than_s: float = 3600.0, rest_s: float = 0.0) -> int | None:
        """Removes stored adapters that no name has pointed to for `older_than_s`, and returns their number.

        None: another router sweeps this store, or did so less than its `rest_s` ago. The caller calls it at intervals.
        Raises RegistryUnavailable.
        """
        store_id, sweep_id = await asyncio.to_thread(self._store.store_id), secrets.token_hex(16)
        if not await self._registry.hold_sweep(store_id, sweep_id, _SWEEP_LEASE_S):
            return None
        num_removed, is_held, rest = 0, True, 0.0
        try:
            referenced = await self._registry.digests()
            for beginning in BEGINNINGS:
                is_held = await self._registry.hold_sweep(store_id, sweep_id, _SWEEP_LEASE_S)
                if not is_held:  # this router was stopped for so long that another one goes on
                    return num_removed
                removed = await asyncio.to_thread(self._store.sweep_some, beginning, referenced, older_than_s)
                num_removed += len(removed)
            await asyncio.to_thread(self._store.sweep_unfinished)
            rest = rest_s
        finally:
            if is_held:
                await self._registry.hold_sweep(store_id, sweep_id, rest)
        return num_removed

    def _keep(self, config: bytes | Path, tensors: Path) -> AdapterContent:
        config_bytes = config.stat().st_size if isinstance(config, Path) else len(config)
        _check_size(CONFIG_FILE, config_bytes, self.limits.max_config_bytes)
        _check_size(TENSORS_FILE, tensors.stat().st_size, self.limits.max_tensors_bytes)
        data = config.read_bytes() if isinstance(config, Path) else config
        content = validate(data, tensors, self._layouts[0].shape)
        self._store.put(content, self._layouts)
        return content


def _check_size(what: str, num_bytes: int, limit: int) -> None:
    if num_bytes > limit:
        raise UploadTooLarge(f"{what} has {num_bytes} bytes: at most {limit} are accepted")
