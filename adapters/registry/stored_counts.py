"""Storage in use by tenants, their keys and their users, counted in the registry with each change of a name."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, Final, NamedTuple

from redis.asyncio import Redis

from .redis_deadline import answered_within
from .registry_keys import FILE_BYTES, STORED, STORED_IS_COUNTED, UNSWEPT, UNSWEPT_TENANTS, bind_script
from .tenants.records import StorageBound, StorageUse

_PAGE: Final = 500  # of tenants, or of a tenant's entries


class Unswept(NamedTuple):
    """Content that no name of a tenant points to any more, but that counts as its storage until it is swept."""

    digest: str
    entry: str  # as stored in Redis

    @property
    def event_number(self) -> int:
        """The number of the last event that took it from a name of the tenant."""
        return int(self.entry.split(" ", 1)[0])

    @property
    def num_bytes(self) -> int:
        return int(self.entry.split(" ", 2)[1])


class StoredCounts:
    """Raises RegistryUnavailable when Redis does not answer."""

    def __init__(self, client: Redis, timeout_s: float) -> None:
        self._client: Any = client
        self._timeout_s = timeout_s
        self._recount_tenant = bind_script(client, "recount_tenant.lua", allow_oom=True)
        self._set_once = bind_script(client, "set_once.lua", allow_oom=True)
        self._release_swept = bind_script(client, "release_swept.lua", allow_oom=True)
        self._scan_hash = bind_script(client, "scan_hash.lua")

    async def of(self, tenant: str, owner: str) -> tuple[StorageUse, StorageUse]:
        """Storage of the tenant, unswept content included, and of that the part of `owner`: a key, or `~user`."""
        async with answered_within(self._timeout_s), self._client.pipeline(transaction=False) as pipeline:
            pipeline.hmget(STORED + tenant, ["", owner])
            pipeline.hmget(FILE_BYTES + tenant, ["", owner])
            counts, file_bytes = await pipeline.execute()
        of_tenant, of_owner = (_use(*numbers) for numbers in zip(counts, file_bytes, strict=True))
        return of_tenant, of_owner

    async def unswept_bytes(self, tenant: str, digest: str) -> int:
        """The bytes that this content counts although no name of the tenant has it; 0: none."""
        async with answered_within(self._timeout_s):
            entry: str | None = await self._client.hget(UNSWEPT + tenant, digest)
        return 0 if entry is None else Unswept(digest, entry).num_bytes

    async def unswept(self) -> AsyncIterator[tuple[str, Sequence[Unswept]]]:
        """Unswept content of all tenants, page by page. An entry may come twice."""
        cursor = 0
        while True:
            async with answered_within(self._timeout_s):
                cursor, tenants = await self._client.sscan(UNSWEPT_TENANTS, cursor, count=_PAGE)
            for tenant in tenants:
                async for page in self._unswept_of(tenant):
                    yield tenant, page
            if not cursor:
                return

    async def _unswept_of(self, tenant: str) -> AsyncIterator[Sequence[Unswept]]:
        cursor = "0"
        while True:
            async with answered_within(self._timeout_s):
                cursor, text = await self._scan_hash(hash=UNSWEPT + tenant, cursor=cursor, count=_PAGE)
            lines = text.split("\n") if text else []
            yield [Unswept(*pair) for pair in zip(lines[::2], lines[1::2], strict=True)]
            if cursor == "0":
                return

    async def release(self, tenant: str, unswept: Sequence[Unswept]) -> None:
        """Stops counting these, except those that have changed since they were read."""
        async with answered_within(self._timeout_s):
            await self._release_swept(tenant=tenant, entries=[part for entry in unswept for part in entry])

    async def count_once(self) -> bool:
        """Counts all tenants unless that was done before: a registry may be older than the counts. Whether it did."""
        async with answered_within(self._timeout_s):
            if await self._client.exists(STORED_IS_COUNTED):
                return False
        await self.recount()
        async with answered_within(self._timeout_s):
            await self._set_once(key=STORED_IS_COUNTED, value=1)
        return True

    async def recount(self) -> int:
        """Recounts all tenants, each atomically, and returns how many have something stored.

        Changes meanwhile are counted, too. One round trip for each tenant.
        """
        tenant, num_tenants = "", 0
        while True:
            async with answered_within(self._timeout_s):
                tenant = await self._recount_tenant(previous=tenant)
            if not tenant:
                return num_tenants
            num_tenants += 1


def bound_args(bounds: Sequence[StorageBound]) -> list[str]:
    """The bounds that limit anything, as arguments of scripts."""
    args = []
    for bound in bounds:
        if not bound.is_open:
            args += [
                bound.owner,
                *("" if limit is None else str(limit) for limit in (bound.adapters, bound.stored_bytes)),
            ]
    return args


def use_of(adapters: int | str, stored_bytes: int | str) -> StorageUse:
    return StorageUse(int(adapters), int(stored_bytes))


def _use(text: str | None, file_bytes: str | None) -> StorageUse:
    adapters, num_bytes = ("0", "0") if text is None else text.split(" ")
    return use_of(adapters, int(num_bytes) + int(file_bytes or 0))
