"""Records of tenants, API keys and audit entries, and the bounds of their storage, as plain data."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final, Literal

import msgspec

from ...errors import QuotaExceeded

_INCARNATION: Final = "~"  # which no tenant's name has
Scope = Literal["infer", "upload", "admin", "metrics"]
ALL_OF_A_TENANT: frozenset[Scope] = frozenset({"infer", "upload", "metrics"})  # the default


class Quota(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, gc=False):
    """The most that a tenant or a key may have. None: there is no bound."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # prompt and completion
    concurrent_streams: int | None = None  # answers that are made at once
    uploads_per_minute: int | None = None  # of adapters, those that are refused included
    adapters: int | None = None
    stored_bytes: int | None = None  # of uploaded tensors and their pages, all that is on disk
    pinned_bytes: int | None = None  # of pinned adapters, for each gang that keeps them


class TenantRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A tenant. A tenant without a record has the defaults."""

    name: str
    label: str = ""  # free text of operators
    created_at: float = 0.0  # Unix time, seconds; 0: it came with a configured key
    is_suspended: bool = False
    is_ending: bool = False  # its deletion has begun and has not ended
    is_gone: bool = False  # it was deleted
    num_ended: int = 0  # tenants that had this name before and were deleted, one that is ending included
    weight: float = 1.0  # its share of what gangs compute, beside those of other tenants
    is_background: bool = False  # its requests yield to all others
    paused_until: float = 0.0  # Unix time, seconds, until which its requests wait; 0: it has not paused them
    quota: Quota = Quota()
    user_quota: Quota = Quota()  # of each of its users

    @property
    def incarnation(self) -> int:
        """How many tenants had this name before; it does not change while this one is being deleted."""
        return self.num_ended - self.is_ending

    @property
    def tenant_id(self) -> str:
        """Differs from that of every other tenant that ever has this name. Things are counted and kept by it, so that
        the next tenant of the name gets nothing of this one. Can be a file's name.
        """
        return make_tenant_id(self.name, self.incarnation)


def make_tenant_id(name: str, incarnation: int) -> str:
    """The first tenant of a name has the name itself."""
    return f"{name}{_INCARNATION}{incarnation}" if incarnation else name


def parse_tenant_id(tenant_id: str) -> tuple[str, int]:
    """The tenant's name and incarnation."""
    name, _, incarnation = tenant_id.partition(_INCARNATION)
    return name, int(incarnation or 0)


class Admission(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """When a request was admitted: its writes are refused if its tenant or its user was deleted since."""

    incarnation: int  # of the tenant
    last_event: int  # number of the registry's last event that the router had then
    user: str = ""  # whose key or token the request has


class KeyRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """An API key, without the key itself."""

    key_id: str  # may be shown
    tenant: str
    scopes: frozenset[Scope] = ALL_OF_A_TENANT
    label: str = ""  # free text
    user: str = ""  # of the tenant, whose key it is; empty: the tenant's own
    created_at: float = 0.0  # Unix time, seconds; 0: it was configured
    expires_at: float | None = None  # Unix time, seconds; None: never
    quota: Quota = Quota()  # beside its tenant's


# How much a tenant and its keys may keep: adapters, bytes of them, and bytes that stay in host memory.


@dataclass(frozen=True, slots=True)
class StorageBound:
    """The most that may be stored by a tenant, with one of its keys, or of a user's. None: any amount."""

    owner: str  # id of the key, or ~user; empty: of the tenant
    adapters: int | None
    stored_bytes: int | None

    @property
    def is_open(self) -> bool:
        return self.adapters is None and self.stored_bytes is None


@dataclass(frozen=True, slots=True)
class StorageUse:
    """Adapters are counted by name; bytes are those of versions, also ones that wait for a sweep, and of files."""

    adapters: int = 0
    stored_bytes: int = 0


def storage_bounds(tenant: TenantRecord, key: KeyRecord, user: str) -> tuple[StorageBound, ...]:
    """The bounds of the tenant, of the key, and of the adapter's `user`; empty: it has no user."""
    of_user = StorageBound(user_owner(user), tenant.user_quota.adapters, tenant.user_quota.stored_bytes)
    return (
        StorageBound("", tenant.quota.adapters, tenant.quota.stored_bytes),
        StorageBound(key.key_id, key.quota.adapters, key.quota.stored_bytes),
        *((of_user,) if user else ()),
    )


def user_owner(user: str) -> str:
    """As which a user's share is counted."""
    return f"~{user}"


def check_storage(bound: StorageBound, use: StorageUse, more: StorageUse) -> None:
    """Raises QuotaExceeded if `more` on top of `use` is over the bound. What adds nothing is always right.

    `more` may be negative: old versions go as new ones come.
    """
    whose = "this tenant's" if not bound.owner else "this user's" if bound.owner.startswith("~") else "this key's"
    adapters, num_bytes = use.adapters + more.adapters, use.stored_bytes + more.stored_bytes
    if bound.adapters is not None and more.adapters > 0 and adapters > bound.adapters:
        raise QuotaExceeded(
            f"{use.adapters} adapters are stored, and {whose} quota is {bound.adapters}: delete one, or ask for more"
        )
    if bound.stored_bytes is not None and more.stored_bytes > 0 and num_bytes > bound.stored_bytes:
        raise QuotaExceeded(
            f"{use.stored_bytes} bytes are stored, and {more.stored_bytes} more are over {whose} quota of "
            f"{bound.stored_bytes}: delete files, or adapters, which count until they have left the disk (within two "
            "hours), or ask for more"
        )


def check_pinned(bound: int | None, new_total: int) -> None:
    """Raises QuotaExceeded if no more than `bound` bytes of adapters may be pinned, and `new_total` would be."""
    if bound is not None and new_total > bound:
        raise QuotaExceeded(
            f"{new_total} bytes of adapters would be pinned, and the quota is {bound}: unpin one, or ask for more"
        )


# Entries of the audit log: who changed what. They never hold a key, nor anything that a client generated with one.

LOGGER: Final = "motet.adapters.audit"
ActorKind = Literal["operator", "key", "token", "configuration", "judge"]
_log = logging.getLogger(LOGGER)


class Actor(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The originator of a change."""

    kind: ActorKind
    id: str = ""  # of the key, or the subject of the token; empty: the operators
    tenant: str = ""  # whose key or token it is; empty: the operators'
    user: str = ""  # of the tenant, whose key or token it is
    request_id: str = ""


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One change that was requested and done."""

    action: str  # such as "key.create"
    tenant: str  # whose things have changed; empty: all tenants
    target: str = ""  # id of a key, name of an adapter; empty: the tenant itself
    changed: dict[str, object] = {}  # fields and new values; of settings and versions: {"from": …, "to": …} each
    actor: Actor


class WrittenEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An entry as the log has it."""

    id: str  # later entries have later ids
    at: float  # Unix time of Redis, seconds
    result: str = ""  # such as the version that an upload has made
    entry: AuditEntry


def encode_entry(entry: AuditEntry | None) -> str:
    """For a script, which writes it with the change; None: nothing is written."""
    return "" if entry is None else msgspec.json.encode(entry).decode()


def decode_entry(entry_id: str, entry: str, result: str) -> WrittenEntry:
    milliseconds, _, _ = entry_id.partition("-")
    audit_entry = msgspec.json.decode(entry, type=AuditEntry)
    return WrittenEntry(id=entry_id, at=int(milliseconds) / 1000, result=result, entry=audit_entry)


def log_entry(entry: AuditEntry, result: str = "") -> None:
    """One line in this process's log, which is kept where logs are, for as long as they are."""
    actor = entry.actor
    fields = {
        "action": entry.action,
        "tenant": entry.tenant,
        "target": entry.target,
        "result": result,
        "actor": actor.kind,
        "actor_id": actor.id,
        "user": actor.user,
        "request_id": actor.request_id,
    }
    _log.info("audit", extra={"fields": {name: value for name, value in fields.items() if value}})
