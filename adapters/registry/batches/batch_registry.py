"""Records of tenants' batches in Redis, and the queue of those that have not ended."""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Final

import msgspec
from msgspec import structs
from redis.asyncio import Redis

from ...errors import NoSuchFile, QuotaExceeded
from ..launches import Lease
from ..redis_deadline import answered_within
from ..registry_keys import (
    BATCH_LEASE,
    BATCH_QUEUE,
    BATCH_TENANTS,
    BATCHES,
    FILE_BYTES,
    FILE_ENDS,
    FILE_USES,
    FILES,
    STORED,
)
from ..store import Bound, Command, Snapshot, Store, Transaction, caller_rows, check_caller
from ..stored_counts import add_file_bytes, owners_of, use_of
from ..tenants.records import Admission, AuditEntry, StorageBound, parse_tenant_id
from .records import BatchRecord, FileRecord, place_of

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
        self._store = Store(client, timeout_s)

    async def add(self, batch: BatchRecord, kept_until: float, last_event: int) -> None:
        """`last_event`: see `Admission`. Raises CallerGone, NoSuchFile, QuotaExceeded."""
        admission = Admission(incarnation=batch.incarnation, last_event=last_event, user=batch.user)
        tenant_id, batches, queue = batch.tenant_id, BATCHES + batch.tenant_id, BATCH_QUEUE + batch.tenant_id
        file_row = ("HEXISTS", FILES + tenant_id, batch.input_file_id)
        ids_row, count_row, queue_row = ("HKEYS", batches), ("HLEN", batches), ("SMEMBERS", queue)
        now = self.clock()

        def addition(rows: Snapshot) -> Transaction:
            check_caller(rows, batch.tenant, admission, "", f"the tenant {batch.tenant}, or its user, was deleted")
            if not rows[file_row]:
                raise NoSuchFile("there is no such file")
            change = Transaction(when_full=False)
            change.bounds.append(Bound(MAX_WAITING - 1, [(1, "SCARD", queue)], _refuse))
            change.increases.append((FILE_USES + tenant_id, batch.input_file_id, 1))
            ended = {*rows.peek(ids_row)} - {*rows.peek(queue_row)}
            if rows[count_row] >= MAX_BATCHES and ended:
                oldest = min(ended)  # ids sort by time
                change.writes += [("HDEL", batches, oldest), ("ZREM", FILE_ENDS, f"{tenant_id}/{oldest}")]
            change.writes += [
                ("HSET", batches, batch.id, _encode(batch).decode()),
                ("SADD", queue, batch.id),
                ("ZADD", BATCH_TENANTS, "NX", now, tenant_id),
                ("ZADD", FILE_ENDS, kept_until, f"{tenant_id}/{batch.id}"),
            ]
            return change

        rows = [*caller_rows(batch.tenant, admission), file_row, ids_row, count_row, queue_row]
        await self._store.change(addition, rows)

    async def get(self, tenant_id: str, batch_id: str) -> BatchRecord | None:
        async with answered_within(self._timeout_s):
            record: str | None = await self._client.hget(BATCHES + tenant_id, batch_id)
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
        row = ("HGET", BATCHES + tenant_id, batch_id)
        tenant, _ = parse_tenant_id(tenant_id)
        limits = {bound.owner: bound.stored_bytes for bound in bounds if bound.stored_bytes is not None}
        counts_row, bytes_row = ("HMGET", STORED + tenant, *limits), ("HMGET", FILE_BYTES + tenant, *limits)

        def apply(rows: Snapshot) -> Transaction:
            if rows[row] is None:
                return Transaction(value=(None, False))
            old = _decode(rows[row])
            new = make(old)
            if new == old and not bounds:
                return Transaction(value=(new, False))
            more = new.num_bytes - old.num_bytes
            change = Transaction(entry=entry)
            change.writes.append(("HSET", BATCHES + tenant_id, batch_id, _encode(new).decode()))
            owners = owners_of(new.key_id, new.user)
            add_file_bytes(change, new.tenant, owners, more)
            is_exceeded = False
            if limits:
                counts = zip(limits, rows.peek(counts_row), rows.peek(bytes_row), strict=True)
                is_exceeded = any(
                    use_of(count, file_bytes).stored_bytes + (more if owner in owners else 0) > limits[owner]
                    for owner, count, file_bytes in counts
                )
            if new.has_ended and not old.has_ended:
                _end(change, rows, new)
                change.writes.append(("ZADD", FILE_ENDS, kept_until, place_of(new)))
                new_files = files(new)
                files_end_at = max((file.expires_at or kept_until for file in new_files), default=0)
                for file in new_files:
                    change.writes.append(("HSET", FILES + tenant_id, file.id, msgspec.json.encode(file).decode()))
                    change.writes.append(("ZADD", FILE_ENDS, files_end_at, place_of(file)))
            change.value = new, is_exceeded
            return change

        rows = [row, *_queue_rows(tenant_id, batch_id), *((counts_row, bytes_row) if limits else ())]
        value: tuple[BatchRecord | None, bool] = (await self._store.change(apply, rows)).value
        return value

    async def cancel(self, tenant_id: str, batch_id: str, entry: AuditEntry | None = None) -> BatchRecord | None:
        """The batch, which runs no further line unless it has ended; None: it is gone. `entry`: see `change`."""

        def cancelling(batch: BatchRecord) -> BatchRecord:
            if batch.has_ended or batch.status == "cancelling":
                return batch
            return structs.replace(batch, status="cancelling", cancelling_at=int(self.clock()))

        return (await self.change(tenant_id, batch_id, cancelling, entry=entry))[0]

    async def delete(self, tenant_id: str, batch_id: str) -> BatchRecord | None:
        """The batch as it was, whatever it was doing; None: it is not there."""
        row = ("HGET", BATCHES + tenant_id, batch_id)

        def removal(rows: Snapshot) -> Transaction:
            if rows[row] is None:
                return Transaction()
            batch = _decode(rows[row])
            change = Transaction(value=batch)
            change.writes += [("HDEL", BATCHES + tenant_id, batch_id), ("ZREM", FILE_ENDS, place_of(batch))]
            if _end(change, rows, batch):  # else its results are files by now
                add_file_bytes(change, batch.tenant, owners_of(batch.key_id, batch.user), -batch.num_bytes)
            return change

        value: BatchRecord | None = (await self._store.change(removal, [row, *_queue_rows(tenant_id, batch_id)])).value
        return value

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


def _refuse(_: int) -> None:
    raise QuotaExceeded(f"a tenant has at most {MAX_WAITING} batches that have not ended: wait for one")


def _queue_rows(tenant_id: str, batch_id: str) -> list[Command]:
    return [("SISMEMBER", BATCH_QUEUE + tenant_id, batch_id), ("SCARD", BATCH_QUEUE + tenant_id)]


def _end(change: Transaction, rows: Snapshot, batch: BatchRecord) -> bool:
    """Takes the batch from the queue, and its input file from those that are in use; whether it was there."""
    is_queued, num_queued = (rows[row] for row in _queue_rows(batch.tenant_id, batch.id))
    if is_queued:
        change.writes.append(("SREM", BATCH_QUEUE + batch.tenant_id, batch.id))
        if num_queued == 1:
            change.writes.append(("ZREM", BATCH_TENANTS, batch.tenant_id))
        change.increases.append((FILE_USES + batch.tenant_id, batch.input_file_id, -1))
    return bool(is_queued)
