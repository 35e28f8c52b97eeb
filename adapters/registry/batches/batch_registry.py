"""Records of tenants' batches in Redis, and the queue of those that have not ended."""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Final

import msgspec
from msgspec import structs
from redis.asyncio import Redis

from ...errors import CallerGone, NoSuchFile, QuotaExceeded
from ..launches import Lease
from ..redis_deadline import answered_within
from ..registry_keys import (
    BATCH_LEASE,
    BATCH_QUEUE,
    BATCH_TENANTS,
    BATCHES,
    FILE_USES,
    FILES,
    STORED,
    bind_script,
)
from ..stored_counts import bound_args
from ..tenants.records import AuditEntry, StorageBound, encode_entry, log_entry
from .records import BatchRecord, FileRecord

MAX_BATCHES: Final = 300  # of a tenant; the oldest ones that have ended are forgotten
MAX_WAITING: Final = 100  # of a tenant that have not ended
_PAGE: Final = 25  # records that are decoded at once, in the event loop of a router that serves
_decode: Final = msgspec.json.Decoder(BatchRecord).decode
_encode: Final = msgspec.json.Encoder().encode


class BatchRegistry:
    """Raises RegistryUnavailable when Redis does not answer."""

    def __init__(self, client: Redis, timeout_s: float = 3.0, clock: Callable[[], float] = time.time) -> None:
        self._client: Any = client
        self._timeout_s, self.clock = timeout_s, clock
        self._add = bind_script(client, "batches/add_batch.lua")
        # What a batch has computed is noted also while Redis is at its bound of memory.
        self._change = bind_script(client, "batches/change_batch.lua", allow_oom=True)
        self._delete = bind_script(client, "batches/delete_batch.lua", allow_oom=True)

    async def add(self, batch: BatchRecord, kept_until: float, last_event: int) -> None:
        """`last_event`: see `Admission`. Raises CallerGone, NoSuchFile, QuotaExceeded."""
        async with answered_within(self._timeout_s):
            reply = await self._add(
                tenant=batch.tenant,
                user=batch.user,
                incarnation=batch.incarnation,
                last_event=last_event,
                tenant_id=batch.tenant_id,
                id=batch.id,
                record=_encode(batch),
                input_file=batch.input_file_id,
                now=self.clock(),
                ends_at=kept_until,
                max_waiting=MAX_WAITING,
                max_batches=MAX_BATCHES,
                files=FILES + batch.tenant_id,
                file_uses=FILE_USES + batch.tenant_id,
                batches=BATCHES + batch.tenant_id,
                batch_queue=BATCH_QUEUE + batch.tenant_id,
            )
        if reply == 0:
            raise CallerGone(f"the tenant {batch.tenant}, or its user, was deleted")
        if reply == 2:
            raise QuotaExceeded(f"a tenant has at most {MAX_WAITING} batches that have not ended: wait for one")
        if reply == 3:
            raise NoSuchFile("there is no such file")

    async def get(self, tenant_id: str, batch_id: str) -> BatchRecord | None:
        record = await self._read(tenant_id, batch_id)
        return None if record is None else _decode(record)

    async def ids_of(self, tenant_id: str) -> list[str]:
        async with answered_within(self._timeout_s):
            return sorted(await self._client.hkeys(BATCHES + tenant_id))

    async def pages_of(
        self, tenant_id: str, after: str | None = None, *, is_ascending: bool = False
    ) -> AsyncGenerator[list[BatchRecord], None]:
        """Those that there are, the newest first unless `is_ascending`, from behind the id `after`."""
        ids = await self.ids_of(tenant_id)
        if after is not None:
            ids = ids[bisect_right(ids, after) :] if is_ascending else ids[: bisect_left(ids, after)]
        ids = ids if is_ascending else ids[::-1]
        for start in range(0, len(ids), _PAGE):
            async with answered_within(self._timeout_s):
                records = await self._client.hmget(BATCHES + tenant_id, ids[start : start + _PAGE])
            yield [_decode(record) for record in records if record is not None]

    async def change(
        self,
        tenant_id: str,
        batch_id: str,
        make: Callable[[BatchRecord], BatchRecord],
        *,
        bounds: Sequence[StorageBound] = (),
        files: Callable[[BatchRecord], Sequence[FileRecord]] = lambda batch: (),
        kept_until: float = 0.0,
        entry: AuditEntry | None = None,
    ) -> tuple[BatchRecord | None, bool]:
        """The batch as it is now (None: it is gone), and whether one of `bounds` of bytes is exceeded.

        `make`: pure; what it returns replaces the record, and counts more bytes if it has more. With a record that has
        ended `files` are registered, until they expire, and it is kept until `kept_until`. `entry`: of a change, for
        the audit log.
        """
        while True:
            before = await self._read(tenant_id, batch_id)
            if before is None:
                return None, False
            old = _decode(before)
            new = make(old)
            if new == old and not bounds:
                return new, False
            ends = new.has_ended and not old.has_ended
            new_files = {file.id: file for file in (files(new) if ends else ())}
            records = {file_id: _encode(file) for file_id, file in new_files.items()}
            async with answered_within(self._timeout_s):
                reply = await self._change(
                    tenant=new.tenant,
                    tenant_id=tenant_id,
                    id=batch_id,
                    before=before,
                    after=_encode(new),
                    num_bytes=new.num_bytes - old.num_bytes,
                    key_id=new.key_id,
                    user=new.user,
                    input_file=new.input_file_id if ends else "",
                    ends_at=kept_until,
                    files_end_at=max((file.expires_at or kept_until for file in new_files.values()), default=0),
                    output_id=new.output_file_id,
                    output=records.get(new.output_file_id, ""),
                    error_id=new.error_file_id,
                    errors=records.get(new.error_file_id, ""),
                    entry=encode_entry(entry),
                    bounds=bound_args(bounds),
                    batches=BATCHES + tenant_id,
                    files=FILES + tenant_id,
                    file_uses=FILE_USES + tenant_id,
                    batch_queue=BATCH_QUEUE + tenant_id,
                    stored=STORED + new.tenant,
                )
            if reply is not None:
                if entry is not None:
                    log_entry(entry)
                return new, reply == 2

    async def cancel(self, tenant_id: str, batch_id: str, entry: AuditEntry | None = None) -> BatchRecord | None:
        """The batch, which runs no further line unless it has ended; None: it is gone. `entry`: see `change`."""

        def cancelling(batch: BatchRecord) -> BatchRecord:
            if batch.has_ended or batch.status == "cancelling":
                return batch
            return structs.replace(batch, status="cancelling", cancelling_at=int(self.clock()))

        return (await self.change(tenant_id, batch_id, cancelling, entry=entry))[0]

    async def delete(self, tenant_id: str, batch_id: str) -> BatchRecord | None:
        """The batch as it was, whatever it was doing; None: it is not there."""
        while True:
            before = await self._read(tenant_id, batch_id)
            if before is None:
                return None
            batch = _decode(before)
            async with answered_within(self._timeout_s):
                reply = await self._delete(
                    tenant=batch.tenant,
                    tenant_id=tenant_id,
                    id=batch_id,
                    record=before,
                    num_bytes=batch.num_bytes,
                    key_id=batch.key_id,
                    user=batch.user,
                    input_file=batch.input_file_id,
                    batches=BATCHES + tenant_id,
                    file_uses=FILE_USES + tenant_id,
                    batch_queue=BATCH_QUEUE + tenant_id,
                )
            if reply == 1:
                return batch

    async def tenants(self, first: int, limit: int) -> list[str]:
        """Ids of tenants with batches that have not ended, the longest wait first."""
        async with answered_within(self._timeout_s):
            tenant_ids: list[str] = await self._client.zrange(BATCH_TENANTS, first, first + limit - 1)
        return tenant_ids

    async def queue(self, tenant_id: str) -> list[str]:
        """Ids of a tenant's batches that have not ended, the oldest first."""
        async with answered_within(self._timeout_s):
            return sorted(await self._client.smembers(BATCH_QUEUE + tenant_id))

    async def take_turn(self, tenant_id: str) -> None:
        """The tenant goes behind all that wait."""
        async with answered_within(self._timeout_s):
            await self._client.zadd(BATCH_TENANTS, {tenant_id: self.clock()}, xx=True)

    def lease(self, batch_id: str) -> Lease:
        """The router that holds the lease runs the batch."""
        return Lease(self._client, BATCH_LEASE + batch_id, self._timeout_s)

    async def _read(self, tenant_id: str, batch_id: str) -> str | None:
        async with answered_within(self._timeout_s):
            record: str | None = await self._client.hget(BATCHES + tenant_id, batch_id)
        return record
