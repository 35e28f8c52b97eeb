"""API keys: /v1/admin/… for operators, and /v1/keys for a tenant's key with the scope admin."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Final

from msgspec import structs
from starlette.requests import Request
from starlette.responses import Response

from ...adapters.errors import AdapterInvalid, NoSuchKey, RegistryUnavailable
from ...adapters.names import check_user
from ...adapters.registry.administration.administration import Administration
from ...adapters.registry.registry_view import RegistryView
from ...adapters.registry.tenants.records import ALL_OF_A_TENANT, Actor, Admission, KeyRecord, Quota
from ..http.auth import Identity, operators
from ..http.errors import ApiError, invalid_value
from ..http.list_page import PAGE_QUERY, ListPage, list_answer, page_request
from ..http.route import route
from .administration_schema import (
    TENANTS,
    Deleted,
    KeyBody,
    KeyChanges,
    KeyMade,
    KeyRotated,
    KeyShown,
    RotationBody,
    fields_of,
    made_key,
    named_tenant,
    quota_of,
    rotated_key,
    shown_key,
)

# What a key may give to keys that it makes: no more than it has itself.


def within(record: KeyRecord, body: KeyBody, maker: KeyRecord) -> KeyRecord:
    """`record` with what the maker's own bounds leave of it, where `body` leaves that open.

    Raises 403 for scopes that the maker lacks and for a maker that has a quota, 400 if no scope is left.
    """
    _check_unbounded(maker)
    if body.scopes is None:
        record = structs.replace(record, scopes=record.scopes & maker.scopes)
        if not record.scopes:
            raise invalid_value("scopes", "this key may give admin only: name it.")
    _check_scopes(record, maker)
    expires_at = maker.expires_at
    if expires_at is not None and record.expires_at is not None:
        expires_at = min(expires_at, record.expires_at)
    return structs.replace(record, expires_at=record.expires_at if expires_at is None else expires_at)


def check_not_beyond(key: KeyRecord, maker: KeyRecord) -> None:
    """Raises 403 if the key may do what its maker may not: then the maker gets no new one in its place."""
    _check_unbounded(maker)
    _check_scopes(key, maker)
    if maker.expires_at is not None and (key.expires_at is None or key.expires_at > maker.expires_at):
        message = "This API key ends earlier than the one to be replaced."
        raise ApiError(403, message, code="missing_scope")


def _check_unbounded(maker: KeyRecord) -> None:
    """Each key has its own quota, so a key with a quota may not make keys: each would be a fresh quota."""
    if maker.quota != Quota():
        message = "This API key has a quota, so it can neither make nor rotate keys: use one without a quota."
        raise ApiError(403, message, code="missing_scope")


def _check_scopes(key: KeyRecord, maker: KeyRecord) -> None:
    lacking = sorted(key.scopes - maker.scopes)
    if lacking:
        message = f"This API key lacks the scope {lacking[0]}, and cannot give it to another one."
        raise ApiError(403, message, code="missing_scope")


OWN_KEYS: Final = "/v1/keys"
_OF_TENANT: Final = f"{TENANTS}/{{tenant}}/keys"
_KEY: Final = "/v1/admin/keys/{key_id}"
_OWN_KEY: Final = f"{OWN_KEYS}/{{key_id}}"
_QUERY: Final = {**PAGE_QUERY, "user": str}
_ONE: Final = ("key_not_found", "tenant_ending", "registry_unavailable")
_MAKING: Final = ("too_many_keys", "tenant_not_found", "tenant_ending", "registry_unavailable")
_ROTATING: Final = ("too_many_keys", *_ONE)
_operator_route: Final = partial(route, scope="operator", no_store=True, errors=_ONE)
_own_route: Final = partial(route, scope="admin", no_store=True, errors=_ONE)


class KeysApi:
    """Reads from the router's copy of the registry, after it has caught up with all earlier changes."""

    def __init__(
        self, administration: Administration, view: RegistryView, clock: Callable[[], float] = time.time
    ) -> None:
        self._keys, self._view, self._clock = administration.keys, view, clock

    @_operator_route(
        "GET",
        _OF_TENANT,
        summary="List a tenant's keys.",
        query=_QUERY,
        answers={200: ListPage[KeyShown]},
        errors=("tenant_not_found", "registry_unavailable"),
    )
    async def list_of_tenant(self, request: Request) -> Response:
        return await self._list(request, await named_tenant(request, self._view))

    @_operator_route("POST", _OF_TENANT, summary="Make a key of a tenant.", status=201, errors=_MAKING)
    async def create_for_tenant(self, request: Request, body: KeyBody) -> KeyMade:
        return await self._create(self._new_record(await named_tenant(request, self._view), body), operators(request))

    @_operator_route("GET", _KEY, summary="Show a key.")
    async def show(self, request: Request) -> KeyShown:
        _, key = await self._key(request)
        return shown_key(key)

    @_operator_route("PATCH", _KEY, summary="Change a key.")
    async def change(self, request: Request, body: KeyChanges) -> KeyShown:
        fields = fields_of(body)
        if "scopes" in fields:
            fields["scopes"] = frozenset(fields["scopes"])
        if "expires_in_s" in fields:
            lifetime_s = fields.pop("expires_in_s")
            fields["expires_at"] = None if lifetime_s is None else self._clock() + lifetime_s
        key_hash, key = await self._key(request)
        changed = await self._keys.change(key_hash, key, fields, operators(request))
        await self._view.catch_up()
        return shown_key(changed)

    @_operator_route("DELETE", _KEY, summary="Delete a key.")
    async def delete(self, request: Request) -> Deleted:
        return await self._delete(*await self._key(request), operators(request))

    @_operator_route("POST", f"{_KEY}/rotate", summary="Replace a key by a new one.", status=201, errors=_ROTATING)
    async def rotate(self, request: Request, body: RotationBody) -> KeyRotated:
        return await self._rotate(*await self._key(request), body.overlap_s, operators(request))

    @_own_route(
        "GET",
        OWN_KEYS,
        summary="List the keys of your tenant.",
        query=_QUERY,
        answers={200: ListPage[KeyShown]},
        errors=("registry_unavailable",),
    )
    async def list_own(self, request: Request, identity: Identity) -> Response:
        return await self._list(request, identity.name)

    @_own_route("POST", OWN_KEYS, summary="Make a key of your tenant.", status=201, errors=_MAKING)
    async def create_own(self, request: Request, identity: Identity, body: KeyBody) -> KeyMade:
        record = within(self._new_record(identity.name, body), body, identity.key)
        return await self._create(record, identity.actor(request), identity.admission)

    @_own_route("GET", _OWN_KEY, summary="Show a key of your tenant.")
    async def show_own(self, request: Request, identity: Identity) -> KeyShown:
        _, key = await self._key(request, identity)
        return shown_key(key)

    @_own_route("DELETE", _OWN_KEY, summary="Delete a key of your tenant.")
    async def delete_own(self, request: Request, identity: Identity) -> Deleted:
        return await self._delete(*await self._key(request, identity), identity.actor(request), identity.admission)

    @_own_route("POST", f"{_OWN_KEY}/rotate", summary="Replace a key of your tenant.", status=201, errors=_ROTATING)
    async def rotate_own(self, request: Request, identity: Identity, body: RotationBody) -> KeyRotated:
        key_hash, key = await self._key(request, identity)
        check_not_beyond(key, identity.key)
        return await self._rotate(key_hash, key, body.overlap_s, identity.actor(request), identity.admission)

    async def _list(self, request: Request, tenant: str) -> Response:
        page_query = page_request(request)
        await self._view.catch_up()
        user = request.query_params.get("user")
        behind = self._view.keys.keys_of(tenant, page_query.after or "")
        keys = list(islice((key for key in behind if user in (None, key.user)), page_query.limit + 1))
        page = keys[: page_query.limit]
        return await list_answer(map(shown_key, page), [key.key_id for key in page], len(keys) > len(page))

    def _new_record(self, tenant: str, body: KeyBody) -> KeyRecord:
        return KeyRecord(
            key_id="",
            tenant=tenant,
            scopes=ALL_OF_A_TENANT if body.scopes is None else frozenset(body.scopes),
            label=body.label,
            expires_at=None if body.expires_in_s is None else self._clock() + body.expires_in_s,
            quota=quota_of(body.quota),
            user="" if body.user is None else _user(body.user),
        )

    async def _create(self, record: KeyRecord, actor: Actor, admission: Admission | None = None) -> KeyMade:
        await self._view.catch_up()
        new_record, key = await self._keys.create(record, actor, admission)
        await self._settle()
        return made_key(new_record, key)

    async def _rotate(
        self, key_hash: str, key: KeyRecord, overlap_s: float, actor: Actor, admission: Admission | None = None
    ) -> KeyRotated:
        new_record, new_key, old = await self._keys.rotate(key_hash, key, overlap_s, actor, admission)
        await self._settle()
        return rotated_key(new_record, new_key, old)

    async def _delete(self, key_hash: str, key: KeyRecord, actor: Actor, admission: Admission | None = None) -> Deleted:
        await self._keys.delete(key_hash, key, actor, admission)
        await self._view.catch_up()
        return Deleted(id=key.key_id, object="api_key")

    async def _key(self, request: Request, identity: Identity | None = None) -> tuple[str, KeyRecord]:
        """Hash and record of the key in the path, of the tenant that asks; None: of any. Raises NoSuchKey."""
        await self._view.catch_up()
        entry = self._view.keys.key_with_id(request.path_params["key_id"])
        if entry is None or (identity is not None and entry[1].tenant != identity.name):
            raise NoSuchKey("there is no such key")
        return entry

    async def _settle(self) -> None:
        """Waits until this router accepts the new key. If Redis fails meanwhile the key is sent all the same, because
        it is shown only once.
        """
        with suppress(RegistryUnavailable):
            await self._view.catch_up()


def _user(name: str) -> str:
    try:
        check_user(name)
    except AdapterInvalid as error:
        raise invalid_value("user", f"{error}.") from error
    return name
