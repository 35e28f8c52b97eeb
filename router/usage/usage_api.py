"""/v1/usage: what a tenant has used; /v1/admin/usage: the same of all tenants, for the operators."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from datetime import UTC, date, datetime, timedelta
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ...adapters.registry.ledger.entry import Group
from ...adapters.registry.ledger.ledger import Ledger, Sum
from ...adapters.registry.registry_view import RegistryView
from ...adapters.registry.tenants.records import TenantRecord, parse_tenant_id
from ..loop_share import LoopShare
from ..route import Answer, route
from ..tenants.identity import Identity
from .csv_answer import CsvAnswer
from .held_sums import HeldSums
from .prices import Prices
from .usage_query import UsageQuery, usage_query
from .usage_rows import UsageList, UsageSums, csv_head, csv_line
from .usage_turns import UsageTurns

_OPERATORS: Final = ""  # which is not a valid name of a tenant
_QUERY: Final = {"by": str, "from": str, "to": str, "format": str, "limit": int, "after": int}
_CSV: Final = {"text/csv": "The same, with `format=csv`."}
_ERRORS: Final = ("registry_unavailable", "too_many_requests")
_PRIVATE: Final = Group("(private)", "(private)", 0, "", "(private)")  # stands for all users' private adapters
_CSV_LINES: Final = 100  # in a chunk


class UsageApi:
    def __init__(self, view: RegistryView, ledger: Ledger, prices: Prices | None) -> None:
        """`prices`: None: amounts are not shown."""
        self._view, self._ledger, self._prices = view, ledger, prices
        self._turns, self._held = UsageTurns(), HeldSums()

    @route(
        "GET",
        "/v1/usage",
        scope="metrics",
        summary="What the tenant has used, by hour, day, adapter, key or user.",
        query=_QUERY,
        answers={200: UsageList},
        texts=_CSV,
        errors=_ERRORS,
    )
    async def show(self, request: Request, identity: Identity) -> Answer:
        """Only the tenant's own usage; with the key of a user who is not an administrator, only that user's."""
        query = usage_query(request.query_params, datetime.now(UTC), for_operators=False)
        return await self._answer(identity.tenant.tenant_id, query, lambda: _one(identity.tenant), _shown_to(identity))

    @route(
        "GET",
        "/v1/admin/usage",
        scope="operator",
        summary="What all tenants have used, for the operators.",
        query={**_QUERY, "tenant": str},
        answers={200: UsageList},
        texts=_CSV,
        errors=_ERRORS,
    )
    async def show_all(self, request: Request) -> Answer:
        """Tenants that there are: what a deleted one used is in the archive alone."""
        query = usage_query(request.query_params, datetime.now(UTC), for_operators=True)
        if query.tenant is not None:
            tenant = self._view.tenant(query.tenant)
            return await self._answer(_OPERATORS, query, lambda: _one(tenant))
        return await self._answer(_OPERATORS, query, self._tenants)

    async def _tenants(self) -> AsyncIterator[TenantRecord]:
        for tenant_id in await self._ledger.tenant_ids():
            tenant = self._view.tenant(parse_tenant_id(tenant_id)[0])
            if tenant.tenant_id == tenant_id:
                yield tenant

    async def _answer(
        self,
        caller: str,
        query: UsageQuery,
        tenants: Callable[[], AsyncIterator[TenantRecord]],
        shown: Callable[[Group], Group | None] = lambda group: group,
    ) -> Answer:
        async with AsyncExitStack() as turn:
            await turn.enter_async_context(self._turns.turn(caller))
            hold = turn.enter_context(self._held.answer(is_csv=query.is_csv))
            found, share = UsageSums(query, self._prices, shown), LoopShare()
            async for tenant in tenants():
                for pages in self._reads(tenant.tenant_id, query):
                    await self._add(found, tenant.name, pages, hold, share)
            if query.is_csv:
                return CsvAnswer(_csv(found, query.limit), turn.pop_all())
            has_more, rows = False, list[msgspec.Raw]()
            async for row in found.rows(share):
                if len(rows) == query.limit:
                    has_more = True
                    break
                rows.append(msgspec.Raw(msgspec.json.encode(row)))
            body = msgspec.json.encode(found.list_of(rows, has_more=has_more))
            return Response(body, media_type="application/json")

    async def _add(
        self,
        found: UsageSums,
        tenant: str,
        pages: AsyncIterator[list[Sum]],
        hold: Callable[[int], None],
        share: LoopShare,
    ) -> None:
        async with self._turns.reading:
            async for page in pages:
                found.add(tenant, page)
                hold(found.num_sums)
                await share.pause()

    def _reads(self, tenant_id: str, query: UsageQuery) -> Iterator[AsyncIterator[list[Sum]]]:
        """Sums of the days of each month, or of the hours of each day."""
        last = (query.end - timedelta(seconds=1)).date()
        if query.needs_hours:
            for number in range((last - query.start.date()).days + 1):
                yield self._ledger.hours(tenant_id, query.start.date() + timedelta(days=number))
            return
        month = query.start.date().replace(day=1)
        while month <= last:
            yield self._ledger.days(tenant_id, month)
            month = date(month.year + month.month // 12, month.month % 12 + 1, 1)


def _shown_to(identity: Identity) -> Callable[[Group], Group | None]:
    """The part of the tenant's usage that the caller may see.

    A user sees its own; a key without a user no private adapters.
    """
    if identity.is_admin:
        return lambda group: group
    if identity.user:
        return lambda group: group if group.user == identity.user else None
    return lambda group: group if identity.sight.sees(group.adapter) else _PRIVATE


async def _one(tenant: TenantRecord) -> AsyncIterator[TenantRecord]:
    yield tenant


async def _csv(found: UsageSums, limit: int | None) -> AsyncIterator[bytes]:
    """Some kilobytes at a time."""
    lines, num_rows = [csv_head()], 0
    async for row in found.rows(LoopShare()):
        if num_rows == limit:
            break
        num_rows += 1
        lines.append(csv_line(row, found.currency))
        if len(lines) == _CSV_LINES:
            yield "".join(lines).encode()
            lines.clear()
    yield "".join(lines).encode()
