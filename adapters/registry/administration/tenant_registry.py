"""Tenants in the registry: created, changed, suspended, deleted with everything that belongs to them."""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import msgspec
from msgspec import structs
from redis.asyncio import Redis

from ...errors import NoSuchTenant, TenantEnding, TenantExists, TooManyKeys
from ...names import check_tenant
from ..events import decode_key, decode_tenant
from ..launches import launches_by_hash, mark_rows
from ..redis_deadline import answered_within
from ..registry_keys import (
    ADAPTERS,
    ANSWER_ORDER,
    ANSWERS,
    API_KEYS,
    CANARIES,
    CANARY_COMMENTS,
    CANARY_COUNTS,
    CANARY_STICKY,
    ENDED_USERS,
    KEY_ENDS,
    LAUNCH_KEYS,
    MADE_KEYS,
    NAMES,
    PINNED,
    PINS,
    STORED,
    TENANTS,
    UNSWEPT,
    UNSWEPT_TENANTS,
    UPDATED_TRIALS,
    VERSION_NOTES,
    bind_script,
)
from ..store import Bound, Command, Numbered, Snapshot, Store, Transaction, Write, caller_rows, check_caller
from ..tenants.records import Actor, Admission, AuditEntry, KeyRecord, TenantRecord

# Changes of records of tenants and keys: read a record, change it, and replace it if it is still the one read.

MAX_KEYS: Final = 1000  # of a tenant, beside those of a configuration
MAX_ENDED_USERS: Final = 10_000  # of a tenant
ENDED_USERS_KEPT_S: Final = 7 * 86_400  # no request is under way for so long


@dataclass(frozen=True, kw_only=True)
class Found:
    """The records in the registry."""

    tenant: TenantRecord | None
    keys: Mapping[str, KeyRecord | None]  # by hash


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The records that replace them."""

    entry: AuditEntry | None  # None: nothing that the audit log tells
    tenant: TenantRecord | None = None  # None: it is kept
    keys: Mapping[str, KeyRecord | None] = field(default_factory=dict)  # by hash; None: it is deleted


class RecordChanges:
    """Any number of processes may change records at the same time without losing changes."""

    def __init__(self, client: Redis) -> None:
        self._store = Store(client)

    async def change(
        self,
        tenant: str,
        hashes: Sequence[str],
        make: Callable[[Found], Wanted],
        *,
        admission: Admission | None = None,
        ended_user: str = "",
        may_delete: bool = False,
    ) -> Wanted:
        """Applies a change and returns it. `make` is called again whenever the records have changed.

        `admission`: of the request; None: it is not checked. `ended_user`: that is deleted with these keys.
        `may_delete`: whether the change may delete any of the keys. Passes on what `make` raises, without any change.
        Raises RegistryUnavailable, after which the change may or may not have happened, TooManyKeys if the tenant would
        have more than MAX_KEYS, and CallerGone.
        """
        rows = [*caller_rows(tenant, admission), *(("HGET", API_KEYS, key_hash) for key_hash in hashes)]
        if ended_user:
            rows += _ended_rows(tenant)
        if may_delete:
            rows += mark_rows(hashes)

        def transaction(read: Snapshot) -> Transaction:
            tenant_record = read["HGET", TENANTS, tenant]
            key_records = {key_hash: read["HGET", API_KEYS, key_hash] for key_hash in hashes}
            update = make(
                Found(
                    tenant=None if tenant_record is None else decode_tenant(tenant_record),
                    keys={
                        key_hash: None if record is None else decode_key(key_hash, record)
                        for key_hash, record in key_records.items()
                    },
                )
            )
            check_caller(read, tenant, admission, "", f"the tenant {tenant}, or its user, was deleted")
            change = Transaction(value=update, entry=update.entry)
            if update.tenant is not None:
                record = _encoded(update.tenant)
                change.writes.append(("HSET", TENANTS, tenant, record))
                change.events.append(("tenant", tenant, record))
            self._add_keys(change, read, tenant, update.keys)
            launches = launches_by_hash(read, hashes) if may_delete else {}
            for key_hash, key in update.keys.items():
                if key is None:
                    delete_key(change, key_hash, tenant, launches.get(key_hash, ()))
            if ended_user:
                _add_ended_user(change, read, tenant, ended_user)
            return change

        update: Wanted = (await self._store.change(transaction, rows)).value
        return update

    def _add_keys(self, change: Transaction, rows: Snapshot, tenant: str, keys: Mapping[str, KeyRecord | None]) -> None:
        made_keys, num_new = MADE_KEYS + tenant, 0
        for key_hash, key in keys.items():
            if key is None:
                continue
            record = _encoded(key)
            change.writes.append(("HSET", API_KEYS, key_hash, record))
            if rows["HGET", API_KEYS, key_hash] is None:
                num_new += 1
                change.writes.append(("SADD", made_keys, key_hash))
            if key.expires_at is None:
                change.writes.append(("ZREM", KEY_ENDS, key_hash))
            else:
                change.writes.append(("ZADD", KEY_ENDS, key.expires_at, key_hash))
            change.events.append(("key", key_hash, record))
        if num_new:
            change.bounds.append(Bound(MAX_KEYS - num_new, [(1, "SCARD", made_keys)], partial(_refuse_key, tenant)))


def delete_key(change: Transaction, key_hash: str, tenant: str, launches: Iterable[str] = ()) -> None:
    """Adds the deletion of a key of this tenant, and of the marks of the launches that give it."""
    change.writes += [
        ("HDEL", API_KEYS, key_hash),
        ("SREM", MADE_KEYS + tenant, key_hash),
        ("ZREM", KEY_ENDS, key_hash),
    ]
    change.writes += [("SREM", LAUNCH_KEYS, f"{launch} {key_hash}") for launch in launches]
    change.events.append(("key", key_hash, ""))


def _refuse_key(tenant: str, _: int) -> None:
    raise TooManyKeys(f"{tenant} has {MAX_KEYS} keys already")


def _ended_rows(tenant: str) -> list[Command]:
    ended = ENDED_USERS + tenant
    return [("ZCARD", ended), ("ZRANGE", ended, 1, 1, "WITHSCORES")]


def _add_ended_user(change: Transaction, rows: Snapshot, tenant: str, user: str) -> None:
    """Requests that were admitted before this event leave nothing of the user."""
    ended = ENDED_USERS + tenant
    num_ended, second = (rows[row] for row in _ended_rows(tenant))
    if num_ended >= MAX_ENDED_USERS:  # the oldest become one entry, which counts for all users
        change.writes += [("ZREMRANGEBYRANK", ended, 0, 1), ("ZADD", ended, second[1], "")]
    change.events.append(("user", f"{tenant}/{user}", ""))
    change.writes.append(("ZADD", ended, Numbered("", event=len(change.events)), user))
    change.writes.append(("EXPIRE", ended, ENDED_USERS_KEPT_S))


def _encoded(record: TenantRecord | KeyRecord) -> str:
    return msgspec.json.encode(record).decode()


_PAGE_SIZE: Final = 200  # of what is deleted at once: a few milliseconds of Redis's time
_TRIAL_ID: Final = re.compile(r'"id":"([0-9a-f]+)"')
# Deletes what is kept of the tenant with this `tenant_id`; may be called again.
EndOfTenant = Callable[[str], Awaitable[None]]


class TenantRegistry:
    """Raises RegistryUnavailable as `Registry` does."""

    def __init__(
        self,
        client: Redis,
        ends: Sequence[EndOfTenant] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`ends`: what else is deleted with a tenant."""
        self._store, self._changes = Store(client), RecordChanges(client)
        self._ends, self._clock = tuple(ends), clock
        self._scan_hash = bind_script(client, "scan_hash.lua")

    async def create(self, tenant: TenantRecord, actor: Actor) -> TenantRecord:
        """The tenant as it was made. Raises AdapterInvalid for its name, TenantExists, TenantEnding.

        A tenant that has keys but no record keeps its keys.
        """
        check_tenant(tenant.name)
        audit_fields: dict[str, object] = {"weight": tenant.weight, "is_background": tenant.is_background}
        audit_fields |= {"quota": structs.asdict(tenant.quota), "user_quota": structs.asdict(tenant.user_quota)}
        entry = AuditEntry(action="tenant.create", tenant=tenant.name, changed=audit_fields, actor=actor)

        def make(records: Found) -> Wanted:
            before = records.tenant or TenantRecord(name=tenant.name, is_gone=True)
            _check_not_ending(before)
            if not before.is_gone:
                raise TenantExists(f"there is a tenant {tenant.name} already")
            record = structs.replace(tenant, created_at=self._clock(), num_ended=before.num_ended)
            return Wanted(entry=entry, tenant=record)

        return _tenant_of(await self._changes.change(tenant.name, (), make))

    async def change(
        self, name: str, fields: Mapping[str, Any], actor: Actor, action: str = "tenant.change"
    ) -> TenantRecord:
        """The tenant with these fields changed; of a quota only the fields that it maps are changed.

        The tenant must exist. Raises TenantEnding.
        """
        check_tenant(name)
        audit_fields = {field: value for field, value in fields.items() if field != "label"}  # which may say anything
        entry = AuditEntry(action=action, tenant=name, changed=audit_fields, actor=actor)

        def make(records: Found) -> Wanted:
            before = records.tenant or TenantRecord(name=name)
            _check_not_ending(before)
            changes = dict(fields)
            for quota in changes.keys() & {"quota", "user_quota"}:
                changes[quota] = structs.replace(getattr(before, quota), **changes[quota])
            return Wanted(entry=entry, tenant=structs.replace(before, is_gone=False, **changes))

        return _tenant_of(await self._changes.change(name, (), make))

    async def suspend(self, name: str, actor: Actor) -> TenantRecord:
        """From now on the tenant's requests are refused. Running ones finish."""
        return await self.change(name, {"is_suspended": True}, actor, "tenant.suspend")

    async def resume(self, name: str, actor: Actor) -> TenantRecord:
        return await self.change(name, {"is_suspended": False}, actor, "tenant.resume")

    async def pause(self, name: str, until: float, admission: Admission) -> None:
        """The tenant's requests wait until this Unix time; 0: no more. It is no entry of the audit log.

        A tenant that is there by its keys alone still is. `admission`: of the tenant's request. Raises TenantEnding,
        CallerGone.
        """

        def make(records: Found) -> Wanted:
            before = records.tenant or TenantRecord(name=name, is_gone=True)
            _check_not_ending(before)
            return Wanted(entry=None, tenant=structs.replace(before, paused_until=until))

        await self._changes.change(name, (), make, admission=admission)

    async def delete(self, name: str, actor: Actor) -> int:
        """Deletes a tenant and everything that belongs to it, and returns how many adapters this call has deleted.

        The tenant is refused at once; its things are deleted page by page. If that is interrupted, the same call
        continues it, and until it has ended the tenant's name cannot be used again. The caller has made sure that there
        is such a tenant, whose name may no longer be valid. Raises NoSuchTenant if another call has
        ended it meanwhile.
        """
        tenant_id = ""

        def begin_ending(records: Found) -> Wanted:
            nonlocal tenant_id
            update = self._begin_ending(name, records, actor)
            ending = update.tenant or records.tenant
            assert ending is not None
            tenant_id = ending.tenant_id
            return update

        await self._changes.change(name, (), begin_ending)
        await self._delete_keys(name)
        num_adapters = await self._delete_adapters(name, tenant_id)
        for end in self._ends:
            await end(tenant_id)
        await self._changes.change(name, (), lambda records: self._ended(name, records, actor))
        return num_adapters

    def _begin_ending(self, name: str, records: Found, actor: Actor) -> Wanted:
        before = records.tenant or TenantRecord(name=name)
        entry = AuditEntry(action="tenant.delete", tenant=name, actor=actor)
        if before.is_ending:
            return Wanted(entry=entry)
        return Wanted(entry=entry, tenant=structs.replace(before, is_ending=True, num_ended=before.num_ended + 1))

    def _ended(self, name: str, records: Found, actor: Actor) -> Wanted:
        before = records.tenant
        if before is None or not before.is_ending:
            raise NoSuchTenant(f"the tenant {name} was deleted meanwhile")
        remains = TenantRecord(name=name, is_gone=True, num_ended=before.num_ended)
        return Wanted(entry=AuditEntry(action="tenant.deleted", tenant=name, actor=actor), tenant=remains)

    async def _delete_keys(self, name: str) -> None:
        cursor = "0"
        while True:
            async with answered_within():
                cursor, page = await self._scan_hash(hash=API_KEYS, cursor=cursor, count=_PAGE_SIZE)
            lines = page.split("\n") if page else []
            hashes = [
                key_hash
                for key_hash, record in zip(lines[::2], lines[1::2], strict=True)
                if name in record and decode_key(key_hash, record).tenant == name
            ]
            if hashes:
                await self._store.change(partial(_removal_of_keys, name, hashes), mark_rows(hashes))
            if cursor == "0":
                return

    async def _delete_adapters(self, name: str, tenant_id: str) -> int:
        num_deleted = 0
        while True:
            page = ("ZRANGEBYLEX", NAMES, f"[{name}/", f"({name}0", "LIMIT", 0, _PAGE_SIZE)
            (fields,) = await self._store.read(page)
            rows: list[Command] = [("HGET", table, field) for field in fields for table in (ADAPTERS, VERSION_NOTES)]
            await self._store.change(partial(_removal_of_names, fields), rows)
            num_deleted += len(fields)
            if len(fields) < _PAGE_SIZE:
                break
        leftovers = (STORED + name, UNSWEPT + name, ANSWERS + tenant_id, ANSWER_ORDER + tenant_id, MADE_KEYS + name)
        writes: list[Write] = [("UNLINK", *leftovers), ("HDEL", PINNED, name), ("SREM", UNSWEPT_TENANTS, name)]
        await self._store.change(lambda _: Transaction(writes=writes), [])
        return num_deleted


def _removal_of_keys(tenant: str, hashes: Sequence[str], rows: Snapshot) -> Transaction:
    change, launches = Transaction(), launches_by_hash(rows, hashes)
    for key_hash in hashes:
        delete_key(change, key_hash, tenant, launches.get(key_hash, ()))
    return change


def _removal_of_names(names: Sequence[str], rows: Snapshot) -> Transaction:
    """With the counts and comments of their trials. No text in a record has the quotes that are around a trial's id."""
    change = Transaction()
    for name in names:
        record, notes = (rows["HGET", table, name] for table in (ADAPTERS, VERSION_NOTES))
        change.writes.append(("ZREM", NAMES, name))
        if record is None:
            continue
        for trial in _TRIAL_ID.findall(f"{record} {notes or ''}"):
            change.writes.append(("UNLINK", CANARY_COUNTS + trial, CANARY_COMMENTS + trial, CANARY_STICKY + trial))
            change.writes.append(("HDEL", UPDATED_TRIALS, trial))
        change.writes += [("HDEL", table, name) for table in (ADAPTERS, VERSION_NOTES, PINS)]
        change.writes.append(("ZREM", CANARIES, name))
        version = Numbered(f"{record.partition(' ')[0]} ", event=len(change.events) + 1)
        change.events.append(("delete", name, version))
    return change


def _tenant_of(update: Wanted) -> TenantRecord:
    assert update.tenant is not None
    return update.tenant


def _check_not_ending(tenant: TenantRecord) -> None:
    if tenant.is_ending:
        raise TenantEnding(f"the deletion of {tenant.name} has not ended: repeat it first")
