"""The audit log in a real Redis: whose entries are dropped first, and the order in which all are read."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec import msgpack
from redis.asyncio import Redis

from motet.adapters.registry.administration.administration import AuditLog
from motet.adapters.registry.registry_keys import AUDIT, AUDIT_ORDER, PREFIX, TENANTS_AUDIT
from motet.adapters.registry.store import Snapshot, Store, Transaction, packed
from motet.adapters.registry.tenants.records import Actor, ActorKind, AuditEntry, WrittenEntry

NUM_OPERATOR_ENTRIES = 100_000  # that are kept
NUM_TENANT_ENTRIES = 1_000


async def noted(client: Redis, tenant: str, kind: ActorKind, count: int = 1) -> None:
    """Appends the same entry so often, thousands at once."""
    actor = Actor(kind=kind, tenant="" if kind == "operator" else tenant)
    entry = AuditEntry(action="adapter.upload", tenant=tenant, target="x", actor=actor)
    *nothing, (order, row) = msgpack.decode(packed(Transaction(entry=entry), Snapshot((), ())))
    for first in range(0, count, 5_000):
        rows = ([*row[:-1], str(number + 1)] for number in range(first, min(count, first + 5_000)))
        change = msgpack.encode([*nothing, [order, *rows]])
        await Store(client)._transact_when_full(slot=PREFIX, change=change)


def reported(entries: Sequence[WrittenEntry]) -> list[tuple[str, str, str]]:
    return [(one.entry.tenant, one.entry.actor.kind, one.result) for one in entries]


@pytest.mark.parametrize("kind", ["key", "token", "judge"])
async def test_a_tenant_pushes_out_its_own_entries_alone(kind: ActorKind, redis_client: Redis) -> None:
    log, most = AuditLog(redis_client), NUM_TENANT_ENTRIES
    await noted(redis_client, "quiet", "operator")
    await noted(redis_client, "loud", "operator")
    await noted(redis_client, "quiet", "key")
    await noted(redis_client, "loud", kind, 5 * most)
    assert reported(await log.read("", 10, "quiet")) == [("quiet", "key", "1"), ("quiet", "operator", "1")]
    loud = [("loud", kind, str(number)) for number in range(5 * most, 4 * most, -1)]
    assert reported(await log.read("", 10 * most, "loud")) == [*loud, ("loud", "operator", "1")]
    everything = reported(await log.read("", 10 * most))
    assert everything == [*loud, ("quiet", "key", "1"), ("loud", "operator", "1"), ("quiet", "operator", "1")]
    assert await redis_client.xlen(AUDIT_ORDER) == most + 3


async def test_operators_have_a_bound_of_their_own(redis_client: Redis) -> None:
    await noted(redis_client, "acme", "key")
    await noted(redis_client, "acme", "operator", 3)
    for _ in range(10):
        await noted(redis_client, "zoo", "operator", NUM_OPERATOR_ENTRIES // 10)
    assert await redis_client.xlen(AUDIT) == NUM_OPERATOR_ENTRIES
    assert await redis_client.xlen(AUDIT_ORDER) == NUM_OPERATOR_ENTRIES + 1
    assert reported(await AuditLog(redis_client).read("", 5, "acme")) == [("acme", "key", "1")]


async def test_pages_go_on_where_the_last_one_ended(redis_client: Redis) -> None:
    """Whosever entries lie side by side, all of one millisecond: each comes once, in the order in which they came."""
    tenants = ["acme", "zoo", "acme2"]
    turns: list[tuple[str, ActorKind]] = [(tenant, kind) for tenant in tenants for kind in ("key", "operator")]
    for tenant, kind in [*turns, *turns[::-1], *turns[::2]]:
        await noted(redis_client, tenant, kind, 7)
    log = AuditLog(redis_client)
    for tenant in ("", *tenants):
        whole = await log.read("", 1000, tenant)
        assert len({one.id for one in whole}) == len(whole) == (105 if not tenant else 35)
        assert {one.entry.tenant for one in whole} == ({tenant} if tenant else set(tenants))
        pages: list[WrittenEntry] = []
        while page := await log.read(pages[-1].id if pages else "", 4, tenant):
            assert len(page) <= 4
            pages += page
        assert pages == whole
    assert await redis_client.xlen(TENANTS_AUDIT + "acme") == 21
