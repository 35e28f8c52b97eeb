"""A router's app on a real registry, view, store and upload service; only the gangs are stand-ins. In one event loop.

It has two tenants with a key for everything and an adapter each, and keys that may not, or no longer, do something. Two
users of one tenant have keys that are no administrators', and one of them has a private adapter.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, get_args

import httpx
from redis.asyncio import Redis
from starlette.applications import Starlette

from motet.adapters.registry.administration.administration import Administration
from motet.adapters.registry.batches.records import BatchRecord, FileRecord
from motet.adapters.registry.canary_counts import CanaryCounts
from motet.adapters.registry.preloads import Preloads
from motet.adapters.registry.registry import Registry, connect, hash_key
from motet.adapters.registry.registry_keys import BATCH_LEASE
from motet.adapters.registry.registry_view import CAPACITY, RegistryView
from motet.adapters.registry.tenants.records import KeyRecord, Scope, TenantRecord
from motet.adapters.store.store import AdapterStore
from motet.adapters.upload import UploadLimits, UploadService
from motet.router.batches.batches import Batches
from motet.router.batches.schema import BatchPace
from motet.router.config import CurrentConfig
from motet.router.fleet.dispatch import Dispatcher
from motet.router.fleet.pin_keeper import PinKeeper
from motet.router.http.auth import Identity
from motet.router.metrics import Metrics
from motet.router.rest_server import create_app
from motet.router.tenancy.account import Accountant
from motet.router.tenancy.quotas import Quotas
from motet.router.text.text import TextService
from motet.router.usage.usage import UsageService
from motet.router.versions.canary_book import CanaryBook
from motet.tests.rigs.described_routes import described_routes
from motet.tests.rigs.given_keys import give_key
from motet.tests.rigs.lora_files import LAYOUT, LoraFiles, lora_files
from motet.tests.rigs.part_configs import router_config
from motet.tests.rigs.patience import PATIENCE_S
from motet.tests.rigs.router_rig import BASE, FakeDispatcher, encoded

OWNER, ASKER = "tenant-of-lions", "tenant-of-moles"
SUSPENDED: Final = "tenant-of-sloths"
OWNER_KEY, ASKER_KEY = "roar-key-of-lions", "soil-key-of-moles"
OPERATOR_KEY = "key-of-the-operators"
EXPIRED_KEY, SUSPENDED_KEY = "stale-key-of-moles", "slow-key-of-sloths"
OWNERS_ADAPTER, ASKERS_ADAPTER = "lions-adapter", "moles-adapter"
BADGER, WOMBAT = "badger", "wombat@dig.example"  # users of the asker's tenant
LION = "leo"  # a user of the owner's tenant, with a private adapter
BADGER_KEY, WOMBAT_KEY = "sett-key-of-badger", "dirt-key-of-wombat"
BADGERS_OWN = "badgers-adapter"
BADGERS_ADAPTER = f"~{BADGER}/{BADGERS_OWN}"
SCOPES: Final[frozenset[Scope]] = frozenset(get_args(Scope))
QUICK: Final = BatchPace(
    look_s=0.02, lease_s=30.0, flush_s=0.01, retry_s=0.01, longest_retry_s=0.05, disk_s=0.02, turn_s=0.1, stop_s=30.0
)
SPOOL_BYTES = 1 << 30  # of the ledger
_READS: Final[Mapping[str, Callable[[Any, str], Any]]] = {  # all of a key, by its type
    "string": lambda redis, key: redis.get(key),
    "hash": lambda redis, key: redis.hgetall(key),
    "set": lambda redis, key: redis.smembers(key),
    "zset": lambda redis, key: redis.zrange(key, 0, -1, withscores=True),
    "list": lambda redis, key: redis.lrange(key, 0, -1),
    "stream": lambda redis, key: redis.xrange(key),
}
LIMITS = UploadLimits(max_config_bytes=10_000, max_tensors_bytes=50_000)


def file_of(owner: str) -> str:
    return f"file-{hash_key(owner)[:16]}"


def batch_of(owner: str) -> str:
    return f"batch_{hash_key(owner)[:16]}"


def response_of(whose: str) -> str:
    return f"resp_{hash_key(whose)[:36]}"


def key_without(scope: Scope) -> str:
    """The asker's, with every scope but this."""
    return f"soil-key-without-{scope}"


def _records() -> dict[str, KeyRecord]:
    tenants = {OWNER_KEY: OWNER, ASKER_KEY: ASKER, SUSPENDED_KEY: SUSPENDED}
    records = {
        key: KeyRecord(key_id=hash_key(key)[:16], tenant=tenant, scopes=SCOPES) for key, tenant in tenants.items()
    }
    records[EXPIRED_KEY] = KeyRecord(
        key_id=hash_key(EXPIRED_KEY)[:16], tenant=ASKER, scopes=SCOPES, created_at=1.0, expires_at=2.0
    )
    for scope in SCOPES:
        key = key_without(scope)
        records[key] = KeyRecord(key_id=hash_key(key)[:16], tenant=ASKER, scopes=SCOPES - {scope})
    for key, user in ((BADGER_KEY, BADGER), (WOMBAT_KEY, WOMBAT)):
        records[key] = KeyRecord(key_id=hash_key(key)[:16], tenant=ASKER, scopes=SCOPES - {"admin"}, user=user)
    return records


KEYS: Final = _records()


def but_for_ended_users(stored: Any, tenant: str = "") -> Any:
    """`RealFront.stored()` without what the deletion of an unknown user leaves, whose work may be under way.

    `tenant`: what its name begins with.
    """
    records, files = stored
    ended = f"motet:{{registry}}:ended_users:{tenant}"
    others = ("motet:{registry}:events", "motet:{registry}:event_number")
    return {key: value for key, value in records.items() if key not in others and not key.startswith(ended)}, files


class FurnishedView(RegistryView):
    """The registry's view, which also knows the keys of this rig, and that a tenant is suspended."""

    def key(self, key: str) -> KeyRecord | None:
        return KEYS.get(key) or super().key(key)

    def tenant(self, name: str) -> TenantRecord:
        return TenantRecord(name=name, is_suspended=True) if name == SUSPENDED else super().tenant(name)


@dataclass(frozen=True)
class RealFront:
    app: Starlette
    redis: Redis
    registry: Registry
    view: RegistryView
    uploads: UploadService
    dispatcher: FakeDispatcher
    folder: Path
    document: Any  # what /openapi.json says
    batches: Batches  # not started
    config: CurrentConfig
    metrics: Metrics
    canaries: CanaryBook

    def client(self) -> httpx.AsyncClient:
        """Without credentials."""
        return httpx.AsyncClient(transport=httpx.ASGITransport(app=self.app), base_url="http://router")

    async def furnish(self) -> None:
        """Gives both tenants what they have, as far as it has gone."""
        for tenant, key in ((OWNER, OWNER_KEY), (ASKER, ASKER_KEY)):
            await give_key(self.registry, tenant, key)
        await self.view.catch_up()
        await self._upload(OWNER, OWNERS_ADAPTER, lora_files(seed=1))
        await self._upload(ASKER, ASKERS_ADAPTER, lora_files(seed=2))
        await self.registry.names.register(
            OWNER, f"~{LION}/x", digest="f" * 64, module_ranks={"q_proj": 4}, num_bytes=1
        )
        await self._upload(ASKER, BADGERS_ADAPTER, lora_files(seed=3))

    async def give_work(self) -> None:
        """Gives the owner, and a user of each tenant, a stored response, a file, and a batch that nothing runs."""
        for tenant, user in ((OWNER, ""), (OWNER, LION), (ASKER, BADGER)):
            await self._give_work(tenant, user)

    async def _give_work(self, tenant: str, user: str) -> None:
        owner, now, until = user or tenant, 1, int(time.time()) + 86_400
        file = FileRecord(
            id=file_of(owner),
            tenant=tenant,
            user=user,
            filename="work.jsonl",
            num_bytes=2,
            purpose="batch",
            created_at=now,
            expires_at=until,
        )
        self.batches.store.make_folder_of(tenant)
        self.batches.store.path(tenant, file.id).write_bytes(b"{}")
        await self.batches.files.add(file, (), self.view.last_event)
        batch = BatchRecord(
            id=batch_of(owner),
            tenant=tenant,
            user=user,
            endpoint="/v1/completions",
            input_file_id=file.id,
            completion_window="24h",
            created_at=now,
            expires_at=until,
        )
        await self.batches.batches.add(batch, until, self.view.last_event)
        key = KeyRecord(key_id="", tenant=tenant, user=user)
        identity = Identity(TenantRecord(name=tenant), key, last_event=self.view.last_event)
        await self.batches.responses.add(identity, response_of(owner), b"[]", b"{}")

    async def expire_lease(self, batch_id: str) -> None:
        """As if the router that died with it were silent for long. A living one on a busy machine may well be."""
        await self.redis.delete(BATCH_LEASE + batch_id)

    async def stored(self) -> Any:
        """All that a request could leave: what the registry says, and files of adapters, uploads and tenants.

        What earlier requests have begun beside their answers has ended by then.
        """
        if begun := [task for task in asyncio.all_tasks() if task.get_name() in ("preload", "shadow")]:
            await asyncio.wait(begun)
        await self.canaries.flush()
        folders = (
            self.folder / name for name in ("store", "spool", "files", "responses")
        )  # the ledger's change by themselves
        files = sorted(str(path) for folder in folders for path in folder.rglob("*") if path.is_file())
        return await self._records(), files

    async def _records(self) -> dict[str, Any]:
        """What is in each key, in an order of its own: reads alone may change that of a hash, and so its DUMP."""
        keys = sorted([key async for key in self.redis.scan_iter(match="motet:{registry}:*")])
        async with self.redis.pipeline(transaction=False) as pipeline:
            for key in keys:
                pipeline.type(key)
            kinds = await pipeline.execute()
            for key, kind in zip(keys, kinds, strict=True):
                _READS[kind](pipeline, key)
            return dict(zip(keys, await pipeline.execute(), strict=True))

    async def _upload(self, tenant: str, name: str, files: LoraFiles) -> None:
        tensors = files.write(self.folder)
        await self.uploads.upload(tenant, name, files.config_bytes, tensors)
        tensors.unlink()


@asynccontextmanager
async def real_front(
    redis_url: str,
    folder: Path,
    text: TextService,
    capacity: int = CAPACITY,
    accountants: Sequence[Accountant] = (),
    dispatcher: Dispatcher | None = None,
    *,
    is_first: bool = True,
) -> AsyncIterator[RealFront]:
    """On a server that is emptied first. `capacity`: adapters that the router keeps in memory.

    `dispatcher`: None: a stand-in. `is_first`: False: another router, on what the first one has.
    """
    redis = connect(redis_url, PATIENCE_S)
    if is_first:
        await redis.flushall()
    registry = Registry(redis, PATIENCE_S)
    view = FurnishedView(registry, capacity)
    uploads = UploadService(AdapterStore(folder / "store"), registry, view, [LAYOUT], LIMITS, reserved={BASE})
    await view.start()
    fake = FakeDispatcher(answer=encoded(text, "hello world"))
    quotas, canaries = Quotas(redis, lambda: 1, wait_s=PATIENCE_S), CanaryBook(CanaryCounts(redis))
    usage = UsageService(
        redis,
        folder / "ledger",
        folder / "archive",
        kept_days=1,
        spool_bytes=SPOOL_BYTES,
        min_free_bytes=0,
        prices=None,
    )
    quotas.start()
    canaries.start()
    await usage.start()
    config = CurrentConfig(
        router_config(BASE, folder / "spool", max_upload_bytes=LIMITS.max_tensors_bytes, response_days=30)
    )
    metrics = Metrics()
    batches = Batches(redis, folder / "files", view, config, metrics, quotas, pace=QUICK, timeout_s=PATIENCE_S)
    app = create_app(
        config=config,
        metrics=metrics,
        batches=batches,
        dispatcher=dispatcher or fake,
        view=view,
        uploads=uploads,
        text=text,
        operator_key=OPERATOR_KEY,
        administration=Administration.of(redis, [batches.retire, usage.retire]),
        quotas=quotas,
        canaries=canaries,
        preloads=Preloads(redis),
        pins=PinKeeper(view.pins, tuple),
        accountants=[usage.metering, *accountants],
        more_routes=usage.routes,
    )
    document = described_routes(app.state.routes)
    front = RealFront(app, redis, registry, view, uploads, fake, folder, document, batches, config, metrics, canaries)
    try:
        if is_first:
            await front.furnish()
        yield front
    finally:
        await canaries.stop()
        await quotas.stop()
        await usage.stop()
        await view.stop()
        await redis.aclose()
