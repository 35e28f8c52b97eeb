"""The API of tenants, their users and limits: /v1/admin/tenants, /v1/admin/audit, /v1/users and /v1/limits."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Final, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ...adapters.errors import AdapterInvalid, NoSuchUser
from ...adapters.names import FULL_SIGHT, Sight, check_tenant, check_user, private_name, user_place
from ...adapters.registry.administration.administration import Administration
from ...adapters.registry.registry_view import RegistryView
from ...adapters.registry.tenants.records import Actor, StorageUse, TenantRecord, user_owner
from ...adapters.upload import UploadService
from ..batches.batches import Batches
from ..http.auth import Identity, operators
from ..http.errors import ApiError, invalid_value
from ..http.list_page import PAGE_QUERY, ListPage, list_answer, page_request
from ..http.route import route
from ..tenancy.grants import Kind, Level, Owner, quotas_of
from ..tenancy.quotas import Quotas
from .administration_schema import (
    TENANTS,
    AuditShown,
    BatchesCancelled,
    Deleted,
    TenantBody,
    TenantChanges,
    TenantShown,
    UserShown,
    fields_of,
    named_tenant,
    quota_of,
    shown_entry,
    shown_tenant,
)

_TENANT: Final = f"{TENANTS}/{{tenant}}"
AUDIT: Final = "/v1/admin/audit"
_MAX_ENTRIES: Final = 1000  # of the log, in one answer
_ENTRY_ID: Final = re.compile(r"([0-9]{1,20})-([0-9]{1,20})")  # of a Redis stream: two numbers of 64 bits, not both 0
_ONE: Final = ("tenant_not_found", "tenant_ending", "registry_unavailable")
_route: Final = partial(route, scope="operator", no_store=True, errors=_ONE)


class TenantsApi:
    """Reads from the router's copy of the registry, after it has come up with all that was changed before."""

    def __init__(self, administration: Administration, view: RegistryView) -> None:
        self._tenants, self._audit = administration.tenants, administration.audit
        self._view = view

    @_route(
        "GET",
        TENANTS,
        summary="List tenants.",
        query=PAGE_QUERY,
        answers={200: ListPage[TenantShown]},
        errors=("registry_unavailable",),
    )
    async def list(self, request: Request) -> Response:
        page_query = page_request(request)
        await self._view.catch_up()
        names = sorted(name for name in self._view.keys.tenant_names() if name > (page_query.after or ""))
        page = names[: page_query.limit]
        return await list_answer(map(self._view_of, page), page, len(names) > len(page))

    @_route(
        "POST",
        TENANTS,
        summary="Create a tenant.",
        status=201,
        errors=("tenant_exists", "tenant_ending", "registry_unavailable"),
    )
    async def create(self, request: Request, body: TenantBody) -> TenantShown:
        _check_name(body.name)
        tenant = TenantRecord(
            name=body.name,
            label=body.label,
            weight=body.weight,
            is_background=body.background,
            quota=quota_of(body.quota),
            user_quota=quota_of(body.user_quota),
        )
        await self._tenants.create(tenant, operators(request))
        return await self._changed(body.name)

    @_route("GET", _TENANT, summary="Show a tenant.")
    async def show(self, request: Request) -> TenantShown:
        return self._view_of(await named_tenant(request, self._view))

    @_route("PATCH", _TENANT, summary="Change a tenant.")
    async def change(self, request: Request, body: TenantChanges) -> TenantShown:
        fields = fields_of(body)
        if "background" in fields:
            fields["is_background"] = fields.pop("background")
        name = await named_tenant(request, self._view)
        await self._tenants.change(name, fields, operators(request))
        return await self._changed(name)

    @_route("DELETE", _TENANT, summary="Delete a tenant and everything that belongs to it.")
    async def delete(self, request: Request) -> Deleted:
        """200 when nothing of the tenant is left. One that was cut off is repeated."""
        name = await named_tenant(request, self._view)
        num_adapters = await self._tenants.delete(name, operators(request))
        await self._view.catch_up()
        return Deleted(id=name, object="tenant", num_adapters=num_adapters)

    @_route("POST", f"{_TENANT}/suspend", summary="Refuse a tenant's requests.")
    async def suspend(self, request: Request) -> TenantShown:
        name = await named_tenant(request, self._view)
        await self._tenants.suspend(name, operators(request))
        return await self._changed(name)

    @_route("POST", f"{_TENANT}/resume", summary="Accept a tenant's requests again.")
    async def resume(self, request: Request) -> TenantShown:
        name = await named_tenant(request, self._view)
        await self._tenants.resume(name, operators(request))
        return await self._changed(name)

    @_route(
        "GET",
        AUDIT,
        summary="Show who changed what, the newest change first.",
        query={**PAGE_QUERY, "tenant": str, "user": str},
        answers={200: ListPage[AuditShown]},
        errors=("registry_unavailable",),
    )
    async def audit(self, request: Request) -> Response:
        """The newest entries, or those before the entry `after`; with `tenant` only those about it, with `user` of
        those only what this user did.
        """
        page_query = page_request(request)
        if page_query.after is not None and not _is_entry_id(page_query.after):
            raise invalid_value("after", "it is not the id of an entry.")
        tenant, user = (request.query_params.get(name, "") for name in ("tenant", "user"))
        if user and not tenant:
            raise invalid_value("user", "it is a tenant's: name the tenant too.")
        if tenant:
            _check_name(tenant)
        limit = min(page_query.limit, _MAX_ENTRIES)
        entries = await self._audit.read(page_query.after or "", limit + 1, tenant, user)
        page = entries[:limit]
        return await list_answer(map(shown_entry, page), [entry.id for entry in page], len(entries) > limit)

    async def _changed(self, name: str) -> TenantShown:
        """What this router knows of the tenant once it has the change."""
        await self._view.catch_up()
        return self._view_of(name)

    def _view_of(self, name: str) -> TenantShown:
        return shown_tenant(self._view.tenant(name), self._view.keys.num_keys_of(name))


def _check_name(name: str) -> None:
    try:
        check_tenant(name)
    except AdapterInvalid as error:
        raise invalid_value("name", f"{error}.") from error


def _is_entry_id(text: str) -> bool:
    match = _ENTRY_ID.fullmatch(text)
    return match is not None and 0 < max(int(match[1]), int(match[2])) < 1 << 64


# Users of a tenant: /v1/admin/tenants/{tenant}/users for operators, /v1/users for a tenant's administrators.
#
# Users are not created: each name with a key or a private adapter is a user.

_OWN: Final = "/v1/users"
_OF_TENANT: Final = f"{TENANTS}/{{tenant}}/users"
_PAGE_SIZE: Final = 100  # users in an answer, each of which is looked up, and adapters that are deleted in a row
_operator_route: Final = partial(route, scope="operator", no_store=True)
_own_route: Final = partial(route, scope="admin", no_store=True)


class UsersApi:
    """Reads keys from the router's copy of the registry, after it has caught up with all earlier changes."""

    def __init__(
        self,
        administration: Administration,
        view: RegistryView,
        uploads: UploadService,
        batches: Batches | None = None,
    ) -> None:
        """`batches`: with files and stored responses; None: there are none."""
        self._keys, self._view, self._uploads = administration.keys, view, uploads
        self._batches = batches

    @_operator_route(
        "GET",
        _OF_TENANT,
        summary="List a tenant's users who have a key or a private adapter.",
        query=PAGE_QUERY,
        answers={200: ListPage[UserShown]},
        errors=("tenant_not_found", "registry_unavailable"),
    )
    async def list_of_tenant(self, request: Request) -> Response:
        """At most 100 at once."""
        return await self._list(request, await named_tenant(request, self._view))

    @_own_route(
        "GET",
        _OWN,
        summary="List your tenant's users who have a key or a private adapter.",
        query=PAGE_QUERY,
        answers={200: ListPage[UserShown]},
        errors=("registry_unavailable",),
    )
    async def list_own(self, request: Request, identity: Identity) -> Response:
        """At most 100 at once."""
        await self._view.catch_up()
        return await self._list(request, identity.name)

    @_operator_route(
        "DELETE",
        f"{_OF_TENANT}/{{user}}",
        summary="Delete a tenant's user with keys, private adapters, files, responses, batches.",
        errors=("tenant_not_found", "user_not_found", "file_in_use", "registry_unavailable"),
    )
    async def delete(self, request: Request) -> Deleted:
        tenant = await named_tenant(request, self._view)
        return await self._delete(tenant, request.path_params["user"], operators(request))

    @_own_route(
        "DELETE",
        f"{_OWN}/{{user}}",
        summary="Delete a user of your tenant with keys, private adapters and stored work.",
        errors=("user_not_found", "file_in_use", "registry_unavailable"),
    )
    async def delete_own(self, request: Request, identity: Identity) -> Deleted:
        await self._view.catch_up()
        return await self._delete(identity.name, request.path_params["user"], identity.actor(request))

    @_operator_route(
        "POST",
        f"{_OF_TENANT}/{{user}}/batches/cancel",
        summary="Cancel all batches of a tenant's user.",
        errors=("tenant_not_found", "batch_not_found", "registry_unavailable"),
    )
    async def cancel_batches(self, request: Request) -> BatchesCancelled:
        """Also those that were made with a token, which stays valid for its batch."""
        tenant = await named_tenant(request, self._view)
        return await self._cancel_batches(tenant, request.path_params["user"], operators(request))

    @_own_route(
        "POST",
        f"{_OWN}/{{user}}/batches/cancel",
        summary="Cancel all batches of a user of your tenant.",
        errors=("batch_not_found", "registry_unavailable"),
    )
    async def cancel_batches_own(self, request: Request, identity: Identity) -> BatchesCancelled:
        """Also those that were made with a token, which stays valid for its batch."""
        return await self._cancel_batches(identity.name, request.path_params["user"], identity.actor(request))

    async def _cancel_batches(self, tenant: str, user: str, actor: Actor) -> BatchesCancelled:
        num = 0 if self._batches is None else await self._batches.cancel_of_user(self._view.tenant(tenant), user, actor)
        if not num:
            raise ApiError(404, "This user has no batch that has not ended.", param="user", code="batch_not_found")
        return BatchesCancelled(user=user, num_batches=num)

    async def _list(self, request: Request, tenant: str) -> Response:
        page_query = page_request(request)
        limit, after = min(page_query.limit, _PAGE_SIZE), page_query.after or ""
        num_keys = Counter(key.user for key in self._view.keys.keys_of(tenant) if key.user)
        user_names = {user for user in num_keys if not after or user_place(user) > user_place(after)}
        user_names.update(await self._uploads.owners(tenant, after, limit + 1))
        users = sorted(user_names, key=user_place)
        rows = []
        for user in users[:limit]:
            _, use = await self._uploads.stored(tenant, user_owner(user))
            rows.append(
                UserShown(name=user, num_keys=num_keys[user], adapters=use.adapters, stored_bytes=use.stored_bytes)
            )
        return await list_answer(rows, users[:limit], len(users) > limit)

    async def _delete(self, tenant: str, user: str, actor: Actor) -> Deleted:
        """First the keys go, so that nothing further comes with them, nor of what is under way."""
        try:
            check_user(user)
        except AdapterInvalid as error:
            raise NoSuchUser("there is no such user") from error
        keys = self._view.keys.keys_of_user(tenant, user)
        private = partial(self._uploads.list_page, tenant, private_name(user, ""), sight=Sight(user))
        if not keys:  # nothing that is under way arrives after the look at what there is
            await self._keys.delete_of_user(tenant, user, (), None)
            await self._view.catch_up()
            keys = self._view.keys.keys_of_user(tenant, user)
            if not keys and not await private(limit=1) and not await self._deleted_work(tenant, user):
                raise NoSuchUser("there is no such user")
        num_keys = num_adapters = 0
        while True:
            num_keys += await self._keys.delete_of_user(tenant, user, [key_hash for key_hash, _ in keys], actor)
            await self._view.catch_up()
            if not (keys := self._view.keys.keys_of_user(tenant, user)):  # else made since they were listed
                break
        while page := await private(limit=_PAGE_SIZE):
            for adapter in page:
                num_adapters += await self._uploads.delete(tenant, adapter.name, None, FULL_SIGHT) is not None
        await self._deleted_work(tenant, user)
        await self._view.catch_up()
        return Deleted(id=user, object="user", num_keys=num_keys, num_adapters=num_adapters)

    async def _deleted_work(self, tenant: str, user: str) -> int:
        return 0 if self._batches is None else await self._batches.delete_of_user(self._view.tenant(tenant), user)


# GET /v1/limits: the quotas of a tenant, of its user and of its key, and what is left of them.


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
