"""GET /v1/limits: the quotas of a tenant, of its user and of its key, and what is left of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
from starlette.requests import Request

from ...adapters.registry.tenants.records import StorageUse, user_owner
from ...adapters.upload import UploadService
from ..http.auth import Identity
from ..http.route import route
from ..tenancy.grants import Kind, Level, Owner, quotas_of
from ..tenancy.quotas import Quotas


class LimitStatus(msgspec.Struct, frozen=True, kw_only=True):
    limit: int | None  # None: there is none
    remaining: int | None
    reset_s: float | None = None  # until all of it is left again, if nothing is requested; None: it is not a rate


class OwnersLimits(msgspec.Struct, frozen=True, kw_only=True):
    requests_per_minute: LimitStatus
    tokens_per_minute: LimitStatus
    concurrent_streams: LimitStatus
    uploads_per_minute: LimitStatus
    adapters: LimitStatus
    stored_bytes: LimitStatus
    pinned_bytes: int | None  # the most there may be; None: no quota


class LimitsAnswer(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["limits"] = "limits"
    tenant: OwnersLimits
    user: OwnersLimits | None  # null: the key has no user
    key: OwnersLimits
    is_fleet_wide: bool  # False: Redis is away, and this is what the router that answers knew last


_NO_LIMIT = LimitStatus(limit=None, remaining=None)


class LimitsApi:
    def __init__(self, quotas: Quotas | None, uploads: UploadService) -> None:
        self._quotas, self._uploads = quotas, uploads

    @route(
        "GET",
        "/v1/limits",
        scope="metrics",
        summary="The quotas of the tenant, of its user and of its key, and what is left of them.",
        answers={200: LimitsAnswer},
        errors=("registry_unavailable",),
    )
    async def show(self, request: Request, identity: Identity) -> LimitsAnswer:
        levels, is_fleet_wide = ((), True) if self._quotas is None else await self._quotas.look(identity)
        stored = await self._uploads.stored(identity.name, identity.key.key_id)
        of_user = None
        if identity.user:
            of_user = (await self._uploads.stored(identity.name, user_owner(identity.user)))[1]
        return LimitsAnswer(
            tenant=_of("tenant", identity, levels, stored[0]),
            user=None if of_user is None else _of("user", identity, levels, of_user),
            key=_of("key", identity, levels, stored[1]),
            is_fleet_wide=is_fleet_wide,
        )


def _of(owner: Owner, identity: Identity, levels: Sequence[Level], stored: StorageUse) -> OwnersLimits:
    quota = next(quota for whose, quota, _ in quotas_of(identity) if whose == owner)

    def limit_of(kind: Kind) -> LimitStatus:
        for level in levels:
            if (level.limit.kind, level.limit.owner) == (kind, owner):
                reset_s = round(level.full_in_s, 3) if level.limit.is_rate else None
                return LimitStatus(limit=level.limit.limit, remaining=level.num_left, reset_s=reset_s)
        return _NO_LIMIT

    return OwnersLimits(
        requests_per_minute=limit_of("requests"),
        tokens_per_minute=limit_of("tokens"),
        concurrent_streams=limit_of("streams"),
        uploads_per_minute=limit_of("uploads"),
        adapters=_counted(quota.adapters, stored.adapters),
        stored_bytes=_counted(quota.stored_bytes, stored.stored_bytes),
        pinned_bytes=quota.pinned_bytes,
    )


def _counted(limit: int | None, count: int) -> LimitStatus:
    return _NO_LIMIT if limit is None else LimitStatus(limit=limit, remaining=max(0, limit - count))
