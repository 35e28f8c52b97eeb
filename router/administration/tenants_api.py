"""/v1/admin/tenants and /v1/admin/audit: what only operators may do with tenants."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ...adapters.names import check_tenant
from ...adapters.registry.administration.administration import Administration
from ...adapters.registry.registry_view import RegistryView
from ...adapters.registry.tenants.records import TenantRecord
from ..bodies.small_body import small_body
from ..openai_api.errors import invalid_value
from ..openai_api.list_page import PAGE_QUERY, ListPage, encoded_list, page_request
from ..route import RouteSpec
from ..tenants.auth import Authenticator
from ..tenants.identity import operators
from .answers import (
    AuditShown,
    Deleted,
    TenantShown,
    as_api_errors,
    json_answer,
    no_tenant,
    shown_entry,
    shown_tenant,
)
from .bodies import TenantBody, TenantChanges, given, quota_of

TENANTS: Final = "/v1/admin/tenants"
AUDIT: Final = "/v1/admin/audit"
_MAX_ENTRIES: Final = 1000  # of the log, in one answer
_ENTRY_ID: Final = re.compile(r"([0-9]{1,20})-([0-9]{1,20})")  # of a Redis stream: two numbers of 64 bits, not both 0
_new: Final = msgspec.json.Decoder(TenantBody)
_changes: Final = msgspec.json.Decoder(TenantChanges)


class TenantsApi:
    """Reads from the router's copy of the registry, after it has come up with all that was changed before."""

    def __init__(self, administration: Administration, view: RegistryView, authenticator: Authenticator) -> None:
        self._tenants, self._audit = administration.tenants, administration.audit
        self._view, self._authenticator = view, authenticator

    def routes(self) -> Sequence[RouteSpec]:
        one = f"{TENANTS}/{{tenant}}"
        found, away = {200: TenantShown}, ("registry_unavailable",)
        of_one = ("tenant_not_found", "tenant_ending", *away)
        return (
            _route(
                "GET", TENANTS, self.list, "List tenants.", {200: ListPage[TenantShown]}, query=PAGE_QUERY, errors=away
            ),
            _route(
                "POST",
                TENANTS,
                self.create,
                "Create a tenant.",
                {201: TenantShown},
                body=TenantBody,
                errors=("tenant_exists", "tenant_ending", *away),
            ),
            _route("GET", one, self.show, "Show a tenant.", found, errors=of_one),
            _route("PATCH", one, self.change, "Change a tenant.", found, body=TenantChanges, errors=of_one),
            _route("DELETE", one, self.delete, "Delete a tenant with all that is its.", {200: Deleted}, errors=of_one),
            _route("POST", f"{one}/suspend", self.suspend, "Refuse a tenant's requests.", found, errors=of_one),
            _route("POST", f"{one}/resume", self.resume, "Accept a tenant's requests again.", found, errors=of_one),
            _route(
                "GET",
                AUDIT,
                self.audit,
                "Show who changed what, the newest change first.",
                {200: ListPage[AuditShown]},
                query={**PAGE_QUERY, "tenant": str},
                errors=away,
            ),
        )

    async def list(self, request: Request) -> Response:
        self._authenticator.check_operator(request)
        wanted = page_request(request)
        with as_api_errors():
            await self._view.catch_up()
        names = sorted(name for name in self._view.keys.tenant_names() if name > (wanted.after or ""))
        page = names[: wanted.limit]
        body = await encoded_list([self._shown(name) for name in page], page, len(names) > len(page))
        return Response(body, media_type="application/json")

    async def create(self, request: Request) -> Response:
        self._authenticator.check_operator(request)
        body = await small_body(request, _new)
        tenant = TenantRecord(
            name=body.name,
            label=body.label,
            weight=body.weight,
            is_background=body.background,
            quota=quota_of(body.quota),
        )
        with as_api_errors(body.name):
            await self._tenants.create(tenant, operators(request))
        return await self._answer(body.name, 201)

    async def show(self, request: Request) -> Response:
        self._authenticator.check_operator(request)
        return json_answer(self._shown(await self._found(request)))

    async def change(self, request: Request) -> Response:
        self._authenticator.check_operator(request)
        body = await small_body(request, _changes)
        fields = given(body)
        if "background" in fields:
            fields["is_background"] = fields.pop("background")
        name = await self._found(request)
        with as_api_errors(name):
            await self._tenants.change(name, fields, operators(request))
        return await self._answer(name)

    async def suspend(self, request: Request) -> Response:
        self._authenticator.check_operator(request)
        name = await self._found(request)
        with as_api_errors(name):
            await self._tenants.suspend(name, operators(request))
        return await self._answer(name)

    async def resume(self, request: Request) -> Response:
        self._authenticator.check_operator(request)
        name = await self._found(request)
        with as_api_errors(name):
            await self._tenants.resume(name, operators(request))
        return await self._answer(name)

    async def delete(self, request: Request) -> Response:
        """200 when nothing of the tenant is left. One that was cut off is repeated."""
        self._authenticator.check_operator(request)
        name = await self._found(request)
        with as_api_errors(name):
            num_adapters = await self._tenants.delete(name, operators(request))
            await self._view.catch_up()
        return json_answer(Deleted(id=name, object="tenant", num_adapters=num_adapters))

    async def audit(self, request: Request) -> Response:
        """The newest entries, or those before the entry `after`; with `tenant` only those about it."""
        self._authenticator.check_operator(request)
        wanted = page_request(request)
        if wanted.after is not None and not _is_entry_id(wanted.after):
            raise invalid_value("after", "it is no id of an entry.")
        tenant = request.query_params.get("tenant", "")
        with as_api_errors():
            if tenant:
                check_tenant(tenant)
            limit = min(wanted.limit, _MAX_ENTRIES)
            entries = await self._audit.read(wanted.after or "", limit + 1, tenant)
        page = [shown_entry(entry) for entry in entries[:limit]]
        body = await encoded_list(page, [entry.id for entry in page], len(entries) > limit)
        return Response(body, media_type="application/json")

    async def _found(self, request: Request) -> str:
        """The name in the path, of a tenant that there is. Raises 404."""
        name: str = request.path_params["tenant"]
        with as_api_errors():
            await self._view.catch_up()
        if not self._view.keys.has_tenant(name):
            raise no_tenant(name[:64])
        return name

    async def _answer(self, name: str, status_code: int = 200) -> Response:
        """What this router knows of the tenant once it has the change."""
        with as_api_errors():
            await self._view.catch_up()
        return json_answer(self._shown(name), status_code)

    def _shown(self, name: str) -> TenantShown:
        return shown_tenant(self._view.tenant(name), len(self._view.keys.keys_of(name)))


def _route(method: str, path: str, handler: Any, summary: str, answers: dict[int, Any], **more: Any) -> RouteSpec:
    return RouteSpec(
        method=method, path=path, handler=handler, scope="operator", summary=summary, answers=answers, **more
    )


def _is_entry_id(text: str) -> bool:
    match = _ENTRY_ID.fullmatch(text)
    return match is not None and 0 < max(int(match[1]), int(match[2])) < 1 << 64
