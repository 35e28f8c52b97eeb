"""/v1/admin/tenants and /v1/admin/audit: what only operators may do with tenants."""

from __future__ import annotations

import re
from functools import partial
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from ...adapters.errors import AdapterInvalid
from ...adapters.names import check_tenant
from ...adapters.registry.administration.administration import Administration
from ...adapters.registry.registry_view import RegistryView
from ...adapters.registry.tenants.records import TenantRecord
from ..openai_api.errors import invalid_value
from ..openai_api.list_page import PAGE_QUERY, ListPage, list_answer, page_request
from ..route import route
from ..tenants.identity import operators
from .answers import AuditShown, Deleted, TenantShown, shown_entry, shown_tenant
from .bodies import TenantBody, TenantChanges, given, quota_of
from .named_tenant import TENANTS, named_tenant

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
        wanted = page_request(request)
        await self._view.catch_up()
        names = sorted(name for name in self._view.keys.tenant_names() if name > (wanted.after or ""))
        page = names[: wanted.limit]
        return await list_answer(map(self._shown, page), page, len(names) > len(page))

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
        return self._shown(await named_tenant(request, self._view))

    @_route("PATCH", _TENANT, summary="Change a tenant.")
    async def change(self, request: Request, body: TenantChanges) -> TenantShown:
        fields = given(body)
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
        wanted = page_request(request)
        if wanted.after is not None and not _is_entry_id(wanted.after):
            raise invalid_value("after", "it is not the id of an entry.")
        tenant, user = (request.query_params.get(name, "") for name in ("tenant", "user"))
        if user and not tenant:
            raise invalid_value("user", "it is a tenant's: name the tenant too.")
        if tenant:
            _check_name(tenant)
        limit = min(wanted.limit, _MAX_ENTRIES)
        entries = await self._audit.read(wanted.after or "", limit + 1, tenant, user)
        page = entries[:limit]
        return await list_answer(map(shown_entry, page), [entry.id for entry in page], len(entries) > limit)

    async def _changed(self, name: str) -> TenantShown:
        """What this router knows of the tenant once it has the change."""
        await self._view.catch_up()
        return self._shown(name)

    def _shown(self, name: str) -> TenantShown:
        return shown_tenant(self._view.tenant(name), self._view.keys.num_keys_of(name))


def _check_name(name: str) -> None:
    try:
        check_tenant(name)
    except AdapterInvalid as error:
        raise invalid_value("name", f"{error}.") from error


def _is_entry_id(text: str) -> bool:
    match = _ENTRY_ID.fullmatch(text)
    return match is not None and 0 < max(int(match[1]), int(match[2])) < 1 << 64
