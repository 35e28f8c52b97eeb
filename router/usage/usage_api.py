"""/v1/usage: what a tenant has used; /v1/admin/usage: the same of all tenants, for the operators."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager
from datetime import UTC, date, datetime, timedelta
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ...adapters.registry.ledger.entry import Group
from ...adapters.registry.ledger.ledger import Ledger, Sum
from ...adapters.registry.registry_view import RegistryView
from ...adapters.registry.tenants.records import TenantRecord, parse_tenant_id
from ..bodies.body_reader import Turns
from ..http.auth import Identity
from ..http.errors import RETRY_AFTER_S, ApiError
from ..http.loop_turns import LoopShare
from ..http.route import Answer, route
from .usage_rows import Prices, UsageList, UsageQuery, UsageSums, csv_head, csv_line, usage_query

# A long CSV as an answer: streamed, no faster than its client reads.

LONGEST_S: Final = 300.0  # after which a client that reads too slowly is cut off: what the answer is made of is held


class CsvAnswer:
    """An `Answer` of endpoint.py. It must be called once."""

    status_code = 200

    def __init__(self, parts: AsyncIterator[bytes], resources: AsyncExitStack) -> None:
        """`resources`: is closed when the answer has ended, however it ends."""
        self._parts, self._resources = parts, resources
        self.raw_headers: list[tuple[bytes, bytes]] = [(b"content-type", b"text/csv; charset=utf-8")]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._resources:
            try:
                async with asyncio.timeout(LONGEST_S):
                    await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                    async for part in self._parts:
                        await send({"type": "http.response.body", "body": part, "more_body": True})
                    await send({"type": "http.response.body", "body": b""})
            except TimeoutError:
                pass  # the server closes the connection of an answer that has not ended: no client takes it for whole


# How many sums all answers for usage hold in a router's memory together: no more than there is room for.

MAX_HELD: Final = 2_000_000  # some 800 MB
MAX_HELD_FOR_CSV: Final = 1_500_000  # the rest is left to others while clients read their CSV slowly
_RETRY_AFTER_S: Final = 10


class HeldSums:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self.num_held = 0

    @contextmanager
    def answer(self, *, is_csv: bool) -> Iterator[Callable[[int], None]]:
        """What is called with how many sums the answer holds by now; they are given back when the block ends.

        It raises a 429 if there is no room for more. What it was called with is counted before it is checked, so that
        a page of the ledger may be over what there is room for.
        """
        num_counted = 0

        def hold(num_sums: int) -> None:
            nonlocal num_counted
            grown = num_sums - num_counted
            num_counted = num_sums
            self.num_held += grown
            if grown and self.num_held > (MAX_HELD_FOR_CSV if is_csv else MAX_HELD):
                message = "Other answers for usage take the memory that is for them: ask again later, or for less time."
                raise ApiError(429, message, code="too_many_requests", headers={"Retry-After": str(_RETRY_AFTER_S)})

        try:
            yield hold
        finally:
            self.num_held -= num_counted


# Which queries for usage run now: those of one caller one after the other, and few of all callers at once.
#
# A query may read a great many sums, and holds its answer in memory until its client has it.

MAX_OF_CALLER: Final = 8  # that run or wait; a page with several charts sends one for each
MAX_READING: Final = 4  # of all callers, that read at once


class UsageTurns:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self._queries = Turns(1)
        # Held for one month or day of a tenant, so that long queries do not block others.
        self.reading = asyncio.Semaphore(MAX_READING)

    def turn(self, caller: str) -> AbstractAsyncContextManager[None]:
        """Waits until no other query of the caller runs. Raises a 429 if too many wait already."""
        if self._queries.num_here(caller) >= MAX_OF_CALLER:
            message = f"{MAX_OF_CALLER} of your queries for usage are under way: try again when one has been answered."
            raise ApiError(429, message, code="too_many_requests", headers={"Retry-After": str(RETRY_AFTER_S)})
        return self._queries.of(caller)


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
        self._turns, self._sums = UsageTurns(), HeldSums()

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
        return await self._answer(
            identity.tenant.tenant_id, query, lambda: _single(identity.tenant), _shown_to(identity)
        )

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
            return await self._answer(_OPERATORS, query, lambda: _single(tenant))
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
        view: Callable[[Group], Group | None] = lambda group: group,
    ) -> Answer:
        async with AsyncExitStack() as turn:
            await turn.enter_async_context(self._turns.turn(caller))
            hold = turn.enter_context(self._sums.answer(is_csv=query.is_csv))
            totals, share = UsageSums(query, self._prices, view), LoopShare()
            async for tenant in tenants():
                for pages in self._reads(tenant.tenant_id, query):
                    await self._add(totals, tenant.name, pages, hold, share)
            if query.is_csv:
                return CsvAnswer(_csv(totals, query.limit), turn.pop_all())
            has_more, rows = False, list[msgspec.Raw]()
            async for row in totals.rows(share):
                if len(rows) == query.limit:
                    has_more = True
                    break
                rows.append(msgspec.Raw(msgspec.json.encode(row)))
            body = msgspec.json.encode(totals.list_of(rows, has_more=has_more))
            return Response(body, media_type="application/json")

    async def _add(
        self,
        totals: UsageSums,
        tenant: str,
        pages: AsyncIterator[list[Sum]],
        hold: Callable[[int], None],
        share: LoopShare,
    ) -> None:
        async with self._turns.reading:
            async for page in pages:
                totals.add(tenant, page)
                hold(totals.num_sums)
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


async def _single(tenant: TenantRecord) -> AsyncIterator[TenantRecord]:
    yield tenant


async def _csv(totals: UsageSums, limit: int | None) -> AsyncIterator[bytes]:
    """Some kilobytes at a time."""
    lines, num_rows = [csv_head()], 0
    async for row in totals.rows(LoopShare()):
        if num_rows == limit:
            break
        num_rows += 1
        lines.append(csv_line(row, totals.currency))
        if len(lines) == _CSV_LINES:
            yield "".join(lines).encode()
            lines.clear()
    yield "".join(lines).encode()
