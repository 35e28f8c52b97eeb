"""What requests say that change tenants and keys. Fields that are not listed are refused."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from ...adapters.registry.tenants.records import Quota, Scope

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


def given(body: msgspec.Struct) -> dict[str, Any]:
    """The fields that the body has, with those of its quota as a mapping."""
    fields = {name: getattr(body, name) for name in body.__struct_fields__}
    present = {name: value for name, value in fields.items() if value is not UNSET}
    return {name: given(value) if isinstance(value, UserQuotaBody) else value for name, value in present.items()}


def quota_of(body: UserQuotaBody) -> Quota:
    return Quota(**given(body))
