"""API keys: /v1/admin/… for operators, and /v1/keys for a tenant's key with the scope admin."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ...adapters.errors import RegistryUnavailable
from ...adapters.registry.administration.administration import Administration
from ...adapters.registry.registry_view import RegistryView
from ...adapters.registry.tenants.audit_entry import Actor
from ...adapters.registry.tenants.records import ALL_OF_A_TENANT, KeyRecord
from ..bodies.small_body import small_body
from ..openai_api.list_page import PAGE_QUERY, ListPage, encoded_list, page_request
from ..route import RouteSpec
from ..tenants.auth import Authenticator
from ..tenants.identity import Identity, operators
from .answers import (
    Deleted,
    KeyMade,
    KeyRotated,
    KeyShown,
    as_api_errors,
    json_answer,
    made_key,
    no_key,
    no_tenant,
    rotated_key,
    shown_key,
)
from .bodies import KeyBody, KeyChanges, RotationBody, given, quota_of
from .key_rules import check_not_beyond, within
from .tenants_api import TENANTS

ADMIN_KEYS: Final = "/v1/admin/keys"
OWN_KEYS: Final = "/v1/keys"
_new: Final = msgspec.json.Decoder(KeyBody)
_changes: Final = msgspec.json.Decoder(KeyChanges)
_rotation: Final = msgspec.json.Decoder(RotationBody)


class KeysApi:
    """Reads from the router's copy of the registry, after it has come up with all that was changed before."""

    def __init__(
        self,
        administration: Administration,
        view: RegistryView,
        authenticator: Authenticator,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._keys, self._view, self._authenticator, self._clock = administration.keys, view, authenticator, clock

    def routes(self) -> Sequence[RouteSpec]:
        of_tenant, one, own = f"{TENANTS}/{{tenant}}/keys", f"{ADMIN_KEYS}/{{key_id}}", f"{OWN_KEYS}/{{key_id}}"
        away = ("registry_unavailable",)
        of_one, of_tenants = (
            {"errors": ("key_not_found", "tenant_ending", *away)},
            {"errors": ("tenant_not_found", *away)},
        )
        making = ("too_many_keys", "tenant_not_found", "tenant_ending", *away)
        turning = ("too_many_keys", *of_one["errors"])
        made, turned, found, gone = {201: KeyMade}, {201: KeyRotated}, {200: KeyShown}, {200: Deleted}
        listed = {200: ListPage[KeyShown]}
        by_operator: dict[str, Any] = {"scope": "operator"}
        by_tenant: dict[str, Any] = {"scope": "admin"}
        rows: Sequence[tuple[str, str, Any, str, dict[int, Any], dict[str, Any]]] = (
            (
                "GET",
                of_tenant,
                self.list_of_tenant,
                "List a tenant's keys.",
                listed,
                {"query": PAGE_QUERY, **of_tenants},
            ),
            (
                "POST",
                of_tenant,
                self.create_for_tenant,
                "Make a key of a tenant.",
                made,
                {"body": KeyBody, "errors": making},
            ),
            ("GET", one, self.show, "Show a key.", found, of_one),
            ("PATCH", one, self.change, "Change a key.", found, {"body": KeyChanges, **of_one}),
            ("DELETE", one, self.delete, "Delete a key.", gone, of_one),
            (
                "POST",
                f"{one}/rotate",
                self.rotate,
                "Replace a key by a new one.",
                turned,
                {"body": RotationBody, "errors": turning},
            ),
        )
        own_rows: Sequence[tuple[str, str, Any, str, dict[int, Any], dict[str, Any]]] = (
            (
                "GET",
                OWN_KEYS,
                self.list_own,
                "List the keys of your tenant.",
                listed,
                {"query": PAGE_QUERY, "errors": away},
            ),
            (
                "POST",
                OWN_KEYS,
                self.create_own,
                "Make a key of your tenant.",
                made,
                {"body": KeyBody, "errors": making},
            ),
            ("GET", own, self.show_own, "Show a key of your tenant.", found, of_one),
            ("DELETE", own, self.delete_own, "Delete a key of your tenant.", gone, of_one),
            (
                "POST",
                f"{own}/rotate",
                self.rotate_own,
                "Replace a key of your tenant.",
                turned,
                {"body": RotationBody, "errors": turning},
            ),
        )
        return [
            RouteSpec(method=method, path=path, handler=handler, summary=summary, answers=answers, **who, **more)
            for who, group in ((by_operator, rows), (by_tenant, own_rows))
            for method, path, handler, summary, answers, more in group
        ]

    async def list_of_tenant(self, request: Request) -> Response:
        self._authenticator.check_operator(request)
        return await self._list(request, await self._tenant(request))

    async def create_for_tenant(self, request: Request) -> Response:
        self._authenticator.check_operator(request)
        body = await small_body(request, _new)
        tenant = await self._tenant(request)
        return await self._create(self._wanted(tenant, body), operators(request))

    async def show(self, request: Request) -> Response:
        self._authenticator.check_operator(request)
        return json_answer(shown_key((await self._key(request))[1]))

    async def change(self, request: Request) -> Response:
        self._authenticator.check_operator(request)
        body = await small_body(request, _changes)
        fields = given(body)
        if "scopes" in fields:
            fields["scopes"] = frozenset(fields["scopes"])
        if "expires_in_s" in fields:
            lifetime_s = fields.pop("expires_in_s")
            fields["expires_at"] = None if lifetime_s is None else self._clock() + lifetime_s
        key_hash, key = await self._key(request)
        with as_api_errors():
            changed = await self._keys.change(key_hash, key, fields, operators(request))
            await self._view.catch_up()
        return json_answer(shown_key(changed))

    async def delete(self, request: Request) -> Response:
        self._authenticator.check_operator(request)
        return await self._delete(*await self._key(request), operators(request))

    async def rotate(self, request: Request) -> Response:
        self._authenticator.check_operator(request)
        overlap_s = (await small_body(request, _rotation)).overlap_s
        return await self._rotate(*await self._key(request), overlap_s, operators(request))

    async def list_own(self, request: Request) -> Response:
        return await self._list(request, self._authenticator.identify(request, "admin").name)

    async def create_own(self, request: Request) -> Response:
        identity = self._authenticator.identify(request, "admin")
        body = await small_body(request, _new)
        wanted = within(self._wanted(identity.name, body), body, identity.key)
        return await self._create(wanted, identity.actor(request))

    async def show_own(self, request: Request) -> Response:
        identity = self._authenticator.identify(request, "admin")
        return json_answer(shown_key((await self._key(request, identity))[1]))

    async def delete_own(self, request: Request) -> Response:
        identity = self._authenticator.identify(request, "admin")
        return await self._delete(*await self._key(request, identity), identity.actor(request))

    async def rotate_own(self, request: Request) -> Response:
        identity = self._authenticator.identify(request, "admin")
        overlap_s = (await small_body(request, _rotation)).overlap_s
        key_hash, key = await self._key(request, identity)
        check_not_beyond(key, identity.key)
        return await self._rotate(key_hash, key, overlap_s, identity.actor(request))

    async def _list(self, request: Request, tenant: str) -> Response:
        wanted = page_request(request)
        await self._catch_up()
        keys = [key for key in self._view.keys.keys_of(tenant) if key.key_id > (wanted.after or "")]
        page = keys[: wanted.limit]
        ids = [key.key_id for key in page]
        body = await encoded_list([shown_key(key) for key in page], ids, len(keys) > len(page))
        return Response(body, media_type="application/json")

    def _wanted(self, tenant: str, body: KeyBody) -> KeyRecord:
        return KeyRecord(
            key_id="",
            tenant=tenant,
            scopes=ALL_OF_A_TENANT if body.scopes is None else frozenset(body.scopes),
            label=body.label,
            expires_at=None if body.expires_in_s is None else self._clock() + body.expires_in_s,
            quota=quota_of(body.quota),
        )

    async def _create(self, wanted: KeyRecord, actor: Actor) -> Response:
        await self._catch_up()
        with as_api_errors():
            made, key = await self._keys.create(wanted, actor)
        await self._settle()
        return json_answer(made_key(made, key), 201)

    async def _rotate(self, key_hash: str, key: KeyRecord, overlap_s: float, actor: Actor) -> Response:
        with as_api_errors():
            made, new_key, old = await self._keys.rotate(key_hash, key, overlap_s, actor)
        await self._settle()
        return json_answer(rotated_key(made, new_key, old), 201)

    async def _delete(self, key_hash: str, key: KeyRecord, actor: Actor) -> Response:
        with as_api_errors():
            await self._keys.delete(key_hash, key, actor)
            await self._view.catch_up()
        return json_answer(Deleted(id=key.key_id, object="api_key"))

    async def _tenant(self, request: Request) -> str:
        """The name in the path, of a tenant that there is. Raises 404."""
        name: str = request.path_params["tenant"]
        await self._catch_up()
        if not self._view.keys.has_tenant(name):
            raise no_tenant(name[:64])
        return name

    async def _key(self, request: Request, identity: Identity | None = None) -> tuple[str, KeyRecord]:
        """Hash and record of the key in the path, of the tenant that asks; None: of any. Raises 404."""
        await self._catch_up()
        found = self._view.keys.key_with_id(request.path_params["key_id"])
        if found is None or (identity is not None and found[1].tenant != identity.name):
            raise no_key()
        return found

    async def _settle(self) -> None:
        """Waits until this router lets the new key in. If that takes long, the key is told all the same: only once."""
        with suppress(RegistryUnavailable):
            await self._view.catch_up()

    async def _catch_up(self) -> None:
        with as_api_errors():
            await self._view.catch_up()
