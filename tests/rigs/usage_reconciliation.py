"""Compares a ledger with what clients received."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from redis.asyncio import Redis

from motet.adapters.registry.ledger.entry import NUMBERS, Entry, Stage, merged
from motet.adapters.registry.ledger.ledger import Ledger


@dataclass(frozen=True)
class Received:
    """One answer as its client knows it."""

    id: str
    tenant: str
    received_end: bool
    num_prompt_tokens: int
    num_output_tokens: int  # that came to the client; if it received the end: of the usage that it got
    num_cached_tokens: int = 0


async def ledger_entries(client: Redis, tenant_ids: Iterable[str], tenant: str | None = None) -> dict[str, Entry]:
    """What the ledger says of each id now, by its entries. `tenant`: None: each id is its tenant's name."""
    ledger, found = Ledger(client, kept_days=3), dict[str, Entry]()
    today = datetime.now(UTC).date()
    for tenant_id in tenant_ids:
        for day in (today - timedelta(days=1), today):
            async for page in ledger.entries_of(tenant_id, day):
                for entry in page:
                    assert entry.tenant_id == tenant_id and entry.tenant == (tenant or tenant_id)
                    found[entry.id] = merged(found[entry.id], entry) if entry.id in found else entry
    return found


async def reconcile(client: Redis, received: Iterable[Received], generated: Mapping[str, int] = {}) -> None:
    """Raises AssertionError unless each answer is in the ledger once, with what its client received.

    Of an answer whose client did not receive the end at least what came to it must be there, and no more than
    `generated` for its id, if that is known; of one whose router was killed, what the router last wrote of it. One of
    which nothing came may be absent. And the sums must be those of the entries.
    """
    reported = {one.id: one for one in received}
    tenants = {one.tenant for one in reported.values()}
    entries = await ledger_entries(client, tenants)
    for one in reported.values():
        entry = entries.get(one.id)
        if entry is None:
            assert not (one.received_end or one.num_output_tokens), f"{one} is not in the ledger"
            continue
        assert (entry.tenant, entry.requests, entry.prompt_tokens) == (one.tenant, 1, one.num_prompt_tokens), one
        if one.received_end:
            assert entry.stage is Stage.COMPLETE, entry
            known = (one.num_output_tokens, one.num_cached_tokens)
            assert (entry.output_tokens, entry.cached_tokens) == known, (one, entry)
        else:
            assert entry.output_tokens <= generated.get(one.id, entry.output_tokens), (one, entry)
            if entry.stage is not Stage.UNDER_WAY:  # else its router was killed, up to a second after it wrote this
                assert one.num_output_tokens <= entry.output_tokens, (one, entry)
    assert entries.keys() <= reported.keys(), "the ledger has answers without a request"
    for tenant in tenants:
        expected: Counter[str] = Counter()
        for entry in entries.values():
            if entry.tenant == tenant:
                expected.update(dict(zip(NUMBERS, entry.numbers, strict=True)))
        assert await sums_of(client, tenant, "days") == expected, tenant
        assert await sums_of(client, tenant, "hours") == expected, tenant


async def sums_of(client: Redis, tenant: str, kind: str) -> Counter[str]:
    """All that the ledger has summed for a tenant since yesterday."""
    ledger, found = Ledger(client, kept_days=3), Counter[str](dict.fromkeys(NUMBERS, 0))
    now = datetime.now(UTC)
    days = {now.date(), (now - timedelta(days=1)).date()}
    if kind == "hours":
        pages = [page for day in days async for page in ledger.hours(tenant, day)]
    else:
        months = {day.replace(day=1) for day in days}
        pages = [page for month in months async for page in ledger.days(tenant, month)]
    for one in (one for page in pages for one in page):
        found.update(dict(zip(NUMBERS, one.numbers, strict=True)))
    return found
