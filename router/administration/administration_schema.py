"""Requests and answers of the API of tenants, keys and the audit log, as data."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType, structs
from starlette.requests import Request

from ...adapters.errors import NoSuchTenant
from ...adapters.registry.registry_view import RegistryView
from ...adapters.registry.tenants.records import KeyRecord, Quota, Scope, TenantRecord, WrittenEntry

# The tenant that an operator's request names in its path.

TENANTS: Final = "/v1/admin/tenants"


async def named_tenant(request: Request, view: RegistryView) -> str:
    """Its name, once the view has caught up with all earlier changes. Raises NoSuchTenant."""
    name: str = request.path_params["tenant"]
    await view.catch_up()
    if not view.keys.has_tenant(name):
        raise NoSuchTenant(f"the tenant {name[:64]!r} does not exist")
    return name


# What requests say that change tenants and keys. Fields that are not listed are refused.

_MOST = 1 << 53  # what every JSON reader keeps exactly
_TEN_YEARS_S = 10 * 365 * 86_400
Bound = Annotated[int, Meta(ge=0, le=_MOST)] | None  # null: none
Weight = Annotated[float, Meta(ge=0.001, le=1000)]
UserName = Annotated[str, Meta(min_length=1, max_length=64)]
Label = Annotated[str, Meta(max_length=200)]
Lifetime = Annotated[float, Meta(gt=0, le=_TEN_YEARS_S)]  # seconds from now on
Scopes = Annotated[list[Scope], Meta(min_length=1, max_length=8)]


class UserQuotaBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of each user of a tenant. Missing fields are not changed."""

    requests_per_minute: Bound | UnsetType = UNSET
    tokens_per_minute: Bound | UnsetType = UNSET
    concurrent_streams: Bound | UnsetType = UNSET
    uploads_per_minute: Bound | UnsetType = UNSET
    adapters: Bound | UnsetType = UNSET
    stored_bytes: Bound | UnsetType = UNSET


class QuotaBody(UserQuotaBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Missing fields are not changed."""

    pinned_bytes: Bound | UnsetType = UNSET


class TenantBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/admin/tenants."""

    name: Annotated[str, Meta(min_length=1, max_length=64)]
    label: Label = ""
    weight: Weight = 1.0
    background: bool = False
    quota: QuotaBody = QuotaBody()
    user_quota: UserQuotaBody = UserQuotaBody()  # of each of its users


class TenantChanges(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """PATCH /v1/admin/tenants/{tenant}."""

    label: Label | UnsetType = UNSET
    weight: Weight | UnsetType = UNSET
    background: bool | UnsetType = UNSET
    quota: QuotaBody | UnsetType = UNSET
    user_quota: UserQuotaBody | UnsetType = UNSET


class KeyBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST …/keys."""

    scopes: Scopes | None = None  # None: infer, upload and metrics, as far as the caller may give them
    label: Label = ""
    expires_in_s: Lifetime | None = None  # None: it does not expire, or with the key that makes it
    quota: QuotaBody = QuotaBody()
    user: UserName | None = None  # of the tenant, whose key it is; None: the tenant's own


class KeyChanges(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """PATCH /v1/admin/keys/{key_id}."""

    scopes: Scopes | UnsetType = UNSET
    label: Label | UnsetType = UNSET
    expires_in_s: Lifetime | UnsetType | None = UNSET  # null: it does not expire
    quota: QuotaBody | UnsetType = UNSET


class RotationBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST …/rotate."""

    overlap_s: Annotated[float, Meta(ge=0, le=30 * 86_400)] = (
        86_400.0  # how long the old key is good beside the new one
    )


def fields_of(body: msgspec.Struct) -> dict[str, Any]:
    """The fields that the body has, with those of its quota as a mapping."""
    fields = {name: getattr(body, name) for name in body.__struct_fields__}
    present = {name: value for name, value in fields.items() if value is not UNSET}
    return {name: fields_of(value) if isinstance(value, UserQuotaBody) else value for name, value in present.items()}


def quota_of(body: UserQuotaBody) -> Quota:
    return Quota(**fields_of(body))


# Tenants, keys and entries of the audit log as their API shows them.


class UserQuotaShown(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of each user of a tenant. null: no limit."""

    requests_per_minute: int | None
    tokens_per_minute: int | None
    concurrent_streams: int | None
    uploads_per_minute: int | None
    adapters: int | None
    stored_bytes: int | None


class QuotaShown(UserQuotaShown, frozen=True, kw_only=True):
    """null: there is no bound."""

    pinned_bytes: int | None


class TenantShown(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    object: Literal["tenant"] = "tenant"
    label: str
    state: Literal["active", "suspended", "ending"]  # ending: its deletion was begun, and has to be repeated
    created_at: int | None  # Unix seconds; null: it came with a configured key
    weight: float
    background: bool
    quota: QuotaShown
    user_quota: UserQuotaShown
    num_keys: int


class KeyShown(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["api_key"] = "api_key"
    tenant: str
    scopes: list[Scope]
    label: str
    user: str | None  # of the tenant, whose key it is; null: the tenant's own
    created_at: int | None  # Unix seconds; null: it was configured
    expires_at: float | None  # Unix seconds; null: never
    quota: QuotaShown


class KeyMade(KeyShown, frozen=True, kw_only=True):
    key: str  # shown once only


class KeyRotated(KeyMade, frozen=True, kw_only=True):
    replaces: KeyShown  # the old key, which ends when it says


class Deleted(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["tenant", "api_key", "user"]
    deleted: Literal[True] = True
    num_adapters: int | msgspec.UnsetType = msgspec.UNSET  # that went with a tenant or user, in this call
    num_keys: int | msgspec.UnsetType = msgspec.UNSET  # that went with a user


class BatchesCancelled(msgspec.Struct, frozen=True, kw_only=True):
    user: str
    object: Literal["batches"] = "batches"
    num_batches: int  # that have not ended yet: their lines under way are answered


class UserShown(msgspec.Struct, frozen=True, kw_only=True):
    """A user with a key or a private adapter."""

    name: str
    object: Literal["user"] = "user"
    num_keys: int
    adapters: int  # that have a version of his, private or the tenant's
    stored_bytes: int  # of his versions, what is still to be swept included


class ActorShown(msgspec.Struct, frozen=True, kw_only=True):
    kind: Literal["operator", "key", "token", "configuration", "judge"]
    id: str | None  # of a key; the subject of a token
    tenant: str | None
    user: str | None  # of the tenant


class AuditShown(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["audit_entry"] = "audit_entry"
    at: float  # Unix seconds, by Redis' clock
    actor: ActorShown
    action: str
    tenant: str | None  # null: it is everybody's
    target: str | None  # id of a key, name of an adapter; null: the tenant itself
    changed: dict[str, Any]
    result: str | None
    request_id: str


def shown_tenant(tenant: TenantRecord, num_keys: int) -> TenantShown:
    return TenantShown(
        name=tenant.name,
        label=tenant.label,
        state="ending" if tenant.is_ending else "suspended" if tenant.is_suspended else "active",
        created_at=int(tenant.created_at) or None,
        weight=tenant.weight,
        background=tenant.is_background,
        quota=_quota(tenant.quota),
        user_quota=_user_quota(tenant.user_quota),
        num_keys=num_keys,
    )


def shown_key(key: KeyRecord) -> KeyShown:
    return KeyShown(**_key_fields(key))


def made_key(key: KeyRecord, secret: str) -> KeyMade:
    return KeyMade(**_key_fields(key), key=secret)


def rotated_key(key: KeyRecord, secret: str, old: KeyRecord) -> KeyRotated:
    return KeyRotated(**_key_fields(key), key=secret, replaces=shown_key(old))


def shown_entry(written: WrittenEntry) -> AuditShown:
    entry = written.entry
    actor = entry.actor
    return AuditShown(
        id=written.id,
        at=written.at,
        actor=ActorShown(kind=actor.kind, id=actor.id or None, tenant=actor.tenant or None, user=actor.user or None),
        action=entry.action,
        tenant=entry.tenant or None,
        target=entry.target or None,
        changed=entry.changed,
        result=written.result or None,
        request_id=actor.request_id,
    )


def _key_fields(key: KeyRecord) -> dict[str, Any]:
    return {
        "id": key.key_id,
        "tenant": key.tenant,
        "scopes": sorted(key.scopes),
        "label": key.label,
        "user": key.user or None,
        "created_at": int(key.created_at) or None,
        "expires_at": key.expires_at,
        "quota": _quota(key.quota),
    }


def _quota(quota: Quota) -> QuotaShown:
    return QuotaShown(**structs.asdict(quota))


def _user_quota(quota: Quota) -> UserQuotaShown:
    fields = structs.asdict(quota)
    return UserQuotaShown(**{name: fields[name] for name in UserQuotaShown.__struct_fields__})
