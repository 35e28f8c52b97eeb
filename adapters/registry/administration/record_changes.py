"""Changes of records of tenants and keys: read a record, change it, and replace it if it is still the one read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
from redis.asyncio import Redis

from ...errors import CallerGone, RegistryUnavailable, TooManyKeys
from ..events import decode_key, decode_tenant
from ..redis_deadline import answered_within
from ..registry_keys import API_KEYS, TENANTS, bind_script
from ..tenants.audit_entry import AuditEntry, encode_entry, log_entry
from ..tenants.records import Admission, KeyRecord, TenantRecord

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
                tenant_record, *others = await pipeline.execute()
            held = dict(zip(hashes, others[0] if hashes else (), strict=True))
            wanted = make(
                Found(
                    tenant=None if tenant_record is None else decode_tenant(tenant_record),
                    keys={one: None if record is None else decode_key(one, record) for one, record in held.items()},
                )
            )
            keys = []
            for key_hash, record in wanted.keys.items():
                keys += [key_hash, held.get(key_hash), _encoded(record)]
            async with answered_within():
                done = await self._change_records(
                    entry=encode_entry(wanted.entry),
                    tenant=tenant,
                    old_record=tenant_record,
                    new_record=_encoded(wanted.tenant),
                    max_keys=MAX_KEYS,
                    ended_user=wanted.ended_user,
                    user="" if wanted.admission is None else wanted.admission.user,
                    incarnation=None if wanted.admission is None else wanted.admission.incarnation,
                    last_event=None if wanted.admission is None else wanted.admission.last_event,
                    keys=keys,
                )
            if done == _TOO_MANY_KEYS:
                raise TooManyKeys(f"{tenant} has {MAX_KEYS} keys already")
            if done == _CALLER_GONE:
                raise CallerGone(f"the tenant {tenant}, or its user, was deleted")
            if done:
                if wanted.entry is not None:
                    log_entry(wanted.entry)
                return wanted
        raise RegistryUnavailable("these records keep changing: try again")


def _encoded(record: TenantRecord | KeyRecord | None) -> str:
    return "" if record is None else msgspec.json.encode(record).decode()
