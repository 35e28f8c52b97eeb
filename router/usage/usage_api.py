"""/v1/usage: what a tenant has used; /v1/admin/usage: the same of all tenants, for the operators."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from datetime import UTC, date, datetime, timedelta

from starlette.requests import Request
from starlette.responses import Response

from ...adapters.errors import RegistryUnavailable
from ...adapters.ledger.ledger import Ledger, Sum
from ..loop_share import LoopShare
from ..openai_api.errors import unavailable
from ..route import RouteSpec
from ..tenants.auth import Door
from .prices import Prices
from .usage_query import UsageQuery, usage_query
from .usage_rows import UsageList, UsageSums, as_csv, encoded


class UsageApi:
    def __init__(self, door: Door, ledger: Ledger, prices: Prices | None) -> None:
        """`prices`: None: amounts are not told."""
        self._door, self._ledger, self._prices = door, ledger, prices

    def routes(self) -> Sequence[RouteSpec]:
        query: dict[str, object] = {"by": str, "from": str, "to": str, "format": str, "limit": int, "after": int}
        return (
            RouteSpec(
                method="GET",
                path="/v1/usage",
                handler=self.show,
                scope="metrics",
                summary="What the tenant has used, by hour, day, adapter or key.",
                answers={200: UsageList},
                texts={"text/csv": "The same, with `format=csv`."},
                errors=("registry_unavailable",),
                query=query,
            ),
            RouteSpec(
                method="GET",
                path="/v1/admin/usage",
                handler=self.show_all,
                scope="operator",
                summary="What all tenants have used, for the operators.",
                answers={200: UsageList},
                texts={"text/csv": "The same, with `format=csv`."},
                errors=("registry_unavailable",),
                query={**query, "tenant": str},
            ),
        )

    async def show(self, request: Request) -> Response:
        """A tenant hears of itself alone."""
        tenant = self._door.identify(request, "metrics").name
        query = usage_query(request.query_params, datetime.now(UTC), for_operators=False)
        return await self._answer([tenant], query)

    async def show_all(self, request: Request) -> Response:
        self._door.check_operator(request)
        query = usage_query(request.query_params, datetime.now(UTC), for_operators=True)
        try:
            tenants = await self._ledger.tenants() if query.tenant is None else [query.tenant]
        except RegistryUnavailable as error:
            raise _unavailable(error) from error
        return await self._answer(tenants, query)

    async def _answer(self, tenants: Sequence[str], query: UsageQuery) -> Response:
        found, share = UsageSums(query, self._prices), LoopShare()
        try:
            for tenant in tenants:
                async for sums in self._sums(tenant, query):
                    found.add(tenant, sums)
                    await share.pause()
        except RegistryUnavailable as error:
            raise _unavailable(error) from error
        if query.is_csv:
            return Response(as_csv(found.list()), media_type="text/csv")
        return Response(encoded(found.list()), media_type="application/json")

    async def _sums(self, tenant: str, query: UsageQuery) -> AsyncIterator[list[Sum]]:
        last = (query.end - timedelta(seconds=1)).date()
        if query.needs_hours:
            for number in range((last - query.start.date()).days + 1):
                yield await self._ledger.hours(tenant, query.start.date() + timedelta(days=number))
            return
        month = query.start.date().replace(day=1)
        while month <= last:
            yield await self._ledger.days(tenant, month)
            month = date(month.year + month.month // 12, month.month % 12 + 1, 1)


def _unavailable(error: RegistryUnavailable) -> Exception:
    return unavailable(f"Usage cannot be read now, try again: {error}", "registry_unavailable")
