"""Tenants in the registry: created, changed, suspended, deleted with everything that belongs to them."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
from msgspec import structs
from redis.asyncio import Redis

from ...errors import CallerGone, NoSuchTenant, RegistryUnavailable, TenantEnding, TenantExists, TooManyKeys
from ...names import check_tenant
from ..events import decode_key, decode_tenant
from ..redis_deadline import answered_within
from ..registry_keys import ANSWER_ORDER, ANSWERS, API_KEYS, TENANTS, bind_script
from ..tenants.records import Actor, Admission, AuditEntry, KeyRecord, TenantRecord, encode_entry, log_entry

# Changes of records of tenants and keys: read a record, change it, and replace it if it is still the one read.

MAX_KEYS: Final = 1000  # of a tenant, beside those of a configuration
_NUM_TRIES: Final = 32  # a try fails when the record has changed since it was read

_TOO_MANY_KEYS: Final = 2
_CALLER_GONE: Final = 3


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
    ended_user: str = ""  # that is deleted with these keys
    admission: Admission | None = None  # of the request; None: it is not checked


class RecordChanges:
    """Any number of processes may change records at the same time without losing changes."""

    def __init__(self, client: Redis) -> None:
        self._client: Any = client
        self._change_records = bind_script(client, "administration/change_records.lua", allow_oom=True)

    async def change(self, tenant: str, hashes: Sequence[str], make: Callable[[Found], Wanted]) -> Wanted:
        """Applies a change in one script and returns it. `make` is called again whenever the records have changed.

        Passes on what `make` raises, without any change. Raises RegistryUnavailable, after which the change may or
        may not have happened, TooManyKeys if the tenant would have more than MAX_KEYS, and CallerGone.
        """
        for _ in range(_NUM_TRIES):
            async with answered_within():
                pipeline = self._client.pipeline(transaction=False).hget(TENANTS, tenant)
                if hashes:
                    pipeline = pipeline.hmget(API_KEYS, list(hashes))
                tenant_record, *key_replies = await pipeline.execute()
            key_records = dict(zip(hashes, key_replies[0] if hashes else (), strict=True))
            update = make(
                Found(
                    tenant=None if tenant_record is None else decode_tenant(tenant_record),
                    keys={
                        key_hash: None if record is None else decode_key(key_hash, record)
                        for key_hash, record in key_records.items()
                    },
                )
            )
            keys = []
            for key_hash, record in update.keys.items():
                keys += [key_hash, key_records.get(key_hash), _encoded(record)]
            async with answered_within():
                done = await self._change_records(
                    entry=encode_entry(update.entry),
                    tenant=tenant,
                    old_record=tenant_record,
                    new_record=_encoded(update.tenant),
                    max_keys=MAX_KEYS,
                    ended_user=update.ended_user,
                    user="" if update.admission is None else update.admission.user,
                    incarnation=None if update.admission is None else update.admission.incarnation,
                    last_event=None if update.admission is None else update.admission.last_event,
                    keys=keys,
                )
            if done == _TOO_MANY_KEYS:
                raise TooManyKeys(f"{tenant} has {MAX_KEYS} keys already")
            if done == _CALLER_GONE:
                raise CallerGone(f"the tenant {tenant}, or its user, was deleted")
            if done:
                if update.entry is not None:
                    log_entry(update.entry)
                return update
        raise RegistryUnavailable("these records keep changing: try again")


def _encoded(record: TenantRecord | KeyRecord | None) -> str:
    return "" if record is None else msgspec.json.encode(record).decode()


_PAGE_SIZE: Final = 200  # of what is deleted at once: a few milliseconds of Redis's time
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
        self._changes = RecordChanges(client)
        self._ends, self._clock = tuple(ends), clock
        self._delete_page_of_keys = bind_script(client, "administration/delete_keys_of_tenant.lua", allow_oom=True)
        self._delete_page_of_adapters = bind_script(
            client, "administration/delete_adapters_of_tenant.lua", allow_oom=True
        )

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
                cursor = await self._delete_page_of_keys(tenant=name, cursor=cursor, count=_PAGE_SIZE)
            if cursor == "0":
                return

    async def _delete_adapters(self, name: str, tenant_id: str) -> int:
        num_deleted = 0
        while True:
            async with answered_within():
                num: int = await self._delete_page_of_adapters(
                    tenant=name, count=_PAGE_SIZE, answers=ANSWERS + tenant_id, answer_order=ANSWER_ORDER + tenant_id
                )
            num_deleted += num
            if num < _PAGE_SIZE:
                return num_deleted


def _tenant_of(update: Wanted) -> TenantRecord:
    assert update.tenant is not None
    return update.tenant


def _check_not_ending(tenant: TenantRecord) -> None:
    if tenant.is_ending:
        raise TenantEnding(f"the deletion of {tenant.name} has not ended: repeat it first")
