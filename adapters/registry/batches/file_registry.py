"""Records of tenants' files, or of their stored responses, in Redis."""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Final

import msgspec
from redis.asyncio import Redis

from ...errors import FileInUse, NoSuchFile, QuotaExceeded
from ..launches import Lease
from ..redis_deadline import answered_within
from ..registry_keys import (
    BATCH_QUEUE,
    BATCH_TENANTS,
    BATCHES,
    FILE_BYTES,
    FILE_ENDS,
    FILE_SWEEP,
    FILE_USES,
    FILES,
    RESPONSES,
)
from ..store import Bound, Snapshot, Store, Transaction, caller_rows, check_caller
from ..stored_counts import add_file_bytes, owners_of, storage_limits
from ..tenants.records import Admission, StorageBound, parse_tenant_id
from .records import FileRecord, place_of

MAX_FILES: Final = 1000  # of a tenant
_PAGE: Final = 25  # records that are decoded at once, in the event loop of a router that serves
_decode: Final = msgspec.json.Decoder(FileRecord).decode


def _encode(file: FileRecord) -> str:
    return msgspec.json.encode(file).decode()


class FileRegistry:
    """Raises RegistryUnavailable when Redis does not answer."""

    def __init__(
        self,
        client: Redis,
        timeout_s: float = 3.0,
        clock: Callable[[], float] = time.time,
        *,
        key: str = FILES,
        kind: str = "files",
        max_files: Callable[[], int] = lambda: MAX_FILES,
    ) -> None:
        """`key`: of what a tenant has, which is called `kind`. `max_files`: that a tenant may have."""
        self._client: Any = client
        self._timeout_s, self._clock = timeout_s, clock
        self._key, self._kind, self._max_files = key, kind, max_files
        self.sweeping = Lease(client, FILE_SWEEP, timeout_s)
        self._store = Store(client, timeout_s)

    async def add(self, file: FileRecord, bounds: Sequence[StorageBound], last_event: int) -> None:
        """`last_event`: see `Admission`. Raises CallerGone, QuotaExceeded."""
        await self._add(file, bounds, last_event, is_kept=True)

    async def check(self, file: FileRecord, bounds: Sequence[StorageBound], last_event: int) -> None:
        """Raises what `add` would raise now, and adds nothing."""
        await self._add(file, bounds, last_event, is_kept=False)

    async def _add(self, file: FileRecord, bounds: Sequence[StorageBound], last_event: int, *, is_kept: bool) -> None:
        admission = Admission(incarnation=file.incarnation, last_event=last_event, user=file.user)
        files, owners = self._key + file.tenant_id, owners_of(file.key_id, file.user)

        def addition(rows: Snapshot) -> Transaction:
            check_caller(rows, file.tenant, admission, "", f"the tenant {file.tenant}, or its user, was deleted")
            change = Transaction(when_full=False)
            change.bounds.append(Bound(self._max_files() - 1, [(1, "HLEN", files)], self._refuse))
            change.bounds += storage_limits(file.tenant, bounds, dict.fromkeys(owners, (0, file.num_bytes)))
            if is_kept:
                add_file_bytes(change, file.tenant, owners, file.num_bytes)
                change.writes.append(("HSET", files, file.id, _encode(file)))
                change.writes.append(("ZADD", FILE_ENDS, file.expires_at, place_of(file)))
            return change

        await self._store.change(addition, caller_rows(file.tenant, admission))

    def _refuse(self, _: int) -> None:
        raise QuotaExceeded(f"a tenant has at most {self._max_files()} {self._kind}: delete one")

    async def get(self, tenant_id: str, file_id: str) -> FileRecord | None:
        async with answered_within(self._timeout_s):
            record: str | None = await self._client.hget(self._key + tenant_id, file_id)
        return None if record is None else _decode(record)

    async def ids_of(self, tenant_id: str) -> list[str]:
        async with answered_within(self._timeout_s):
            return sorted(await self._client.hkeys(self._key + tenant_id))

    async def pages_of(
        self, tenant_id: str, after: str | None = None, *, is_ascending: bool = False
    ) -> AsyncGenerator[list[FileRecord], None]:
        """Those that there are, the newest first unless `is_ascending`, from behind the id `after`."""
        ids = await self.ids_of(tenant_id)
        if after is not None:
            ids = ids[bisect_right(ids, after) :] if is_ascending else ids[: bisect_left(ids, after)]
        ids = ids if is_ascending else ids[::-1]
        for start in range(0, len(ids), _PAGE):
            async with answered_within(self._timeout_s):
                records = await self._client.hmget(self._key + tenant_id, ids[start : start + _PAGE])
            yield [_decode(record) for record in records if record is not None]

    async def scan(self, tenant_id: str) -> AsyncGenerator[list[FileRecord], None]:
        """All, in no order, however many there are; one may come twice."""
        cursor = 0
        while True:
            async with answered_within(self._timeout_s):
                cursor, records = await self._client.hscan(self._key + tenant_id, cursor, count=_PAGE)
            yield [_decode(record) for record in records.values()]
            if not cursor:
                return

    async def delete(self, file: FileRecord) -> None:
        """Raises NoSuchFile, FileInUse if a batch that has not ended reads it."""
        row, uses_row = ("HGET", self._key + file.tenant_id, file.id), ("HEXISTS", FILE_USES + file.tenant_id, file.id)

        def removal(rows: Snapshot) -> Transaction:
            if rows[row] != _encode(file):
                raise NoSuchFile("there is no such file")
            if rows[uses_row]:
                raise FileInUse("a batch that has not ended reads this file: cancel it first")
            change = Transaction()
            change.writes += [("HDEL", self._key + file.tenant_id, file.id), ("ZREM", FILE_ENDS, place_of(file))]
            add_file_bytes(change, file.tenant, owners_of(file.key_id, file.user), -file.num_bytes)
            return change

        await self._store.change(removal, [row, uses_row])

    async def expired(self, limit: int = 100) -> list[tuple[str, str]]:
        """Tenant ids, and ids of files, responses and batches."""
        async with answered_within(self._timeout_s):
            places = await self._client.zrange(FILE_ENDS, 0, self._clock(), byscore=True, offset=0, num=limit)
        return [(tenant_id, record_id) for tenant_id, _, record_id in (place.partition("/") for place in places)]

    async def forget_place(self, tenant_id: str, record_id: str) -> None:
        """Removes the entry of an expired file or batch that has no record any more."""
        async with answered_within(self._timeout_s):
            await self._client.zrem(FILE_ENDS, f"{tenant_id}/{record_id}")

    async def put_off(self, tenant_id: str, record_id: str, by_s: float) -> None:
        """An expired file that a batch still reads, or a batch that has not ended, is looked at again later."""
        async with answered_within(self._timeout_s):
            await self._client.zadd(FILE_ENDS, {f"{tenant_id}/{record_id}": self._clock() + by_s}, xx=True)

    async def retire(self, tenant_id: str) -> None:
        """A tenant is deleted: its files, responses and batches are forgotten. May be called again."""
        tenant, _ = parse_tenant_id(tenant_id)
        for key in (FILES, RESPONSES, BATCHES):
            cursor = 0
            while True:
                async with answered_within(self._timeout_s):
                    cursor, records = await self._client.hscan(key + tenant_id, cursor, count=_PAGE)
                if records:
                    async with answered_within(self._timeout_s):
                        await self._client.zrem(FILE_ENDS, *(f"{tenant_id}/{record_id}" for record_id in records))
                if not cursor:
                    break
        async with answered_within(self._timeout_s):
            await self._client.zrem(BATCH_TENANTS, tenant_id)
            await self._client.unlink(
                BATCH_QUEUE + tenant_id,
                FILES + tenant_id,
                RESPONSES + tenant_id,
                BATCHES + tenant_id,
                FILE_USES + tenant_id,
                FILE_BYTES + tenant,
            )
