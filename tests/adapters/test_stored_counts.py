"""What tenants and keys have stored: counted with each change, bounded where it is counted, counted anew."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio import Redis

from motet.adapters.adapter import AdapterVersion
from motet.adapters.errors import QuotaExceeded
from motet.adapters.registry.administration.tenant_registry import TenantRegistry
from motet.adapters.registry.registry import Registry
from motet.adapters.registry.registry_keys import STORED, STORED_IS_COUNTED, UNSWEPT, UNSWEPT_TENANTS
from motet.adapters.registry.tenants.records import (
    Actor,
    StorageBound,
    StorageUse,
    check_pinned,
    check_storage,
    user_owner,
)
from motet.adapters.registry.versions.name_state import VersionNote, with_alias
from motet.adapters.registry.versions.rollout import MAX_VERSIONS, versions_of


@pytest.fixture
def registry(redis_client: Redis) -> Registry:
    return Registry(redis_client)


async def put(
    registry: Registry,
    name: str,
    content: int,
    num_bytes: int,
    *,
    key: str = "k1",
    tenant: str = "acme",
    user: str = "",
    bounds: tuple[StorageBound, ...] = (),
) -> None:
    await registry.names.register(
        tenant,
        name,
        digest=f"{content:064x}",
        module_ranks={"q_proj": 8},
        num_bytes=num_bytes,
        note=VersionNote("", key, user),
        bounds=bounds,
    )


async def release_all(registry: Registry) -> None:
    """As a sweep does once all of it is gone."""
    async for tenant, page in registry.stored.unswept():
        await registry.stored.release(tenant, page)


async def test_names_and_bytes_of_all_versions_are_counted_for_tenant_and_key(registry: Registry) -> None:
    await put(registry, "x", 1, 100)
    await put(registry, "x", 1, 100)  # the same content
    await put(registry, "x", 2, 30, key="k2")
    await put(registry, "y", 1, 100)
    await put(registry, "x", 9, 5000, tenant="zenith")
    assert await registry.stored.of("acme", "k1") == (StorageUse(2, 230), StorageUse(2, 200))
    assert (await registry.stored.of("acme", "k2"))[1] == StorageUse(1, 30)
    await registry.names.delete("acme", "x")
    assert await registry.stored.of("acme", "k1") == (StorageUse(1, 230), StorageUse(1, 200))
    assert (await registry.stored.of("acme", "k2"))[1] == StorageUse(0, 30)
    await registry.names.delete("acme", "y")
    assert await registry.stored.of("acme", "k1") == (StorageUse(0, 130), StorageUse(0, 100))
    await release_all(registry)
    assert await registry.stored.of("acme", "k1") == (StorageUse(), StorageUse())
    assert await registry.stored.of("acme", "k2") == (StorageUse(), StorageUse())
    assert (await registry.stored.of("zenith", "k1"))[0] == StorageUse(1, 5000)


async def test_what_is_a_users_is_counted_for_him_over_his_keys_until_it_is_swept(registry: Registry) -> None:
    await put(registry, "x", 1, 100, key="k1", user="ann")
    await put(registry, "x", 2, 30, key="k2", user="ann")
    await put(registry, "~ann/x", 3, 5, key="", user="ann")
    await put(registry, "y", 1, 100, key="k3", user="bob")

    async def of(user: str) -> StorageUse:
        return (await registry.stored.of("acme", user_owner(user)))[1]

    assert (await of("ann"), await of("bob")) == (StorageUse(2, 135), StorageUse(1, 100))
    await registry.names.delete("acme", "x")
    await registry.names.delete("acme", "~ann/x")
    assert await of("ann") == StorageUse(0, 135)
    await put(registry, "z", 3, 5, key="k3", user="bob")  # takes over what was to be swept
    assert (await of("ann"), await of("bob")) == (StorageUse(0, 130), StorageUse(2, 105))
    with pytest.raises(QuotaExceeded, match="over this user's quota of 110"):
        await put(registry, "z", 4, 6, key="k4", user="bob", bounds=(StorageBound(user_owner("bob"), None, 110),))
    await release_all(registry)
    assert (await of("ann"), await of("bob")) == (StorageUse(), StorageUse(2, 105))
    assert (await registry.stored.of("acme", "k1"))[1] == StorageUse()


async def test_what_was_unswept_before_there_were_users_is_read(registry: Registry, redis_client: Redis) -> None:
    await put(registry, "x", 1, 100)
    await registry.names.delete("acme", "x")
    entry = await redis_client.hget(UNSWEPT + "acme", f"{1:064x}")
    assert str(entry).split(" ")[1:] == ["100", "k1"]  # as it was written then
    await release_all(registry)
    assert await registry.stored.of("acme", "k1") == (StorageUse(), StorageUse())


async def test_content_of_several_versions_waits_for_its_sweep_as_the_last_one_s(
    registry: Registry, redis_client: Redis
) -> None:
    for content, key in ((1, "k1"), (2, "k2"), (1, "k3"), (3, "k4")):
        await put(registry, "x", content, 10, key=key)
    await registry.names.delete("acme", "x")
    assert await redis_client.hget(UNSWEPT + "acme", f"{1:064x}") == "5 10 k3"


async def test_versions_that_go_count_until_they_are_swept(registry: Registry) -> None:
    for content in range(MAX_VERSIONS + 5):
        await put(registry, "x", content, 10)
    assert (await registry.stored.of("acme", ""))[0] == StorageUse(1, 10 * (MAX_VERSIONS + 5))
    await release_all(registry)
    assert (await registry.stored.of("acme", ""))[0] == StorageUse(1, 10 * MAX_VERSIONS)
    await registry.names.change("acme", "x", lambda state, now: with_alias(state, "prod", "12"))
    assert (await registry.stored.of("acme", ""))[0] == StorageUse(1, 10 * MAX_VERSIONS)


@pytest.mark.parametrize("of_key", [False, True])
async def test_parallel_uploads_do_not_exceed_a_quota_together(registry: Registry, of_key: bool) -> None:
    bounds = (StorageBound("k1" if of_key else "", 5, 1000), StorageBound("k9", 2, None))
    results = await asyncio.gather(
        *(put(registry, f"n{number}", number, 10, bounds=bounds) for number in range(20)), return_exceptions=True
    )
    refused = [result for result in results if result is not None]
    assert len(refused) == 15
    assert all(isinstance(error, QuotaExceeded) and "5 adapters are stored" in str(error) for error in refused)
    assert len(await registry.list_adapters("acme")) == 5
    results = await asyncio.gather(
        *(put(registry, "n0" if number == 0 else "big", 100 + number, 600, bounds=bounds) for number in range(1)),
        *(put(registry, f"n{number}", 200 + number, 600, bounds=bounds) for number in range(5)),
        return_exceptions=True,
    )
    assert sum(result is None for result in results) <= 1
    assert (await registry.stored.of("acme", "k1"))[1 if of_key else 0].stored_bytes <= 1000


async def test_a_refused_upload_leaves_nothing_in_the_registry(registry: Registry) -> None:
    before = await registry.num_events()
    with pytest.raises(QuotaExceeded, match="5 more are over this tenant's quota of 4"):
        await put(registry, "x", 1, 5, bounds=(StorageBound("", None, 4),))
    assert await registry.get("acme", "x") is None
    assert await registry.list_adapters("acme") == []
    assert await registry.num_events() == before
    assert (await registry.stored.of("acme", ""))[0] == StorageUse()
    await put(registry, "x", 1, 4, bounds=(StorageBound("", None, 4),))


async def test_who_is_over_a_quota_that_was_lowered_may_do_what_adds_nothing(registry: Registry) -> None:
    await put(registry, "x", 1, 100)
    lowered = (StorageBound("", 0, 50),)
    await put(registry, "x", 1, 100, bounds=lowered)  # the same content
    await registry.names.change("acme", "x", lambda state, now: with_alias(state, "prod", "1"))
    with pytest.raises(QuotaExceeded):
        await put(registry, "x", 2, 1, bounds=lowered)


async def test_a_recount_says_what_the_counts_said(registry: Registry, redis_client: Redis) -> None:
    for number in range(12):
        await put(
            registry, f"n{number % 4}", number, 7 * number, key=f"k{number % 3}", user=("", "ann", "bob")[number % 3]
        )
        await put(registry, f"n{number % 5}", number, number, tenant=f"t{number % 2}")
    await registry.names.delete("acme", "n1")
    tenants = ["acme", "t0", "t1"]
    counted = {tenant: await redis_client.hgetall(STORED + tenant) for tenant in tenants}
    await redis_client.hset(STORED + "acme", mapping={"": "99 99", "gone": "3 3"})
    await redis_client.delete(STORED + "t0")
    assert await registry.stored.recount() == 3
    assert {tenant: await redis_client.hgetall(STORED + tenant) for tenant in tenants} == counted
    assert str(counted["acme"][""]).startswith("3 ")


async def test_a_tenant_that_is_gone_leaves_no_counts(registry: Registry, redis_client: Redis) -> None:
    await put(registry, "x", 1, 100)
    await put(registry, "y", 2, 100)
    await registry.names.delete("acme", "y")
    await TenantRegistry(redis_client).delete("acme", Actor(kind="operator"))
    assert not await redis_client.exists(STORED + "acme", UNSWEPT + "acme", UNSWEPT_TENANTS)


async def test_what_was_lost_again_since_it_was_read_stays(registry: Registry) -> None:
    await put(registry, "x", 1, 100)
    await registry.names.delete("acme", "x")
    pages = [entry async for entry in registry.stored.unswept()]
    await put(registry, "x", 1, 100)
    await registry.names.delete("acme", "x")
    for tenant, page in pages:
        await registry.stored.release(tenant, page)
    assert (await registry.stored.of("acme", ""))[0] == StorageUse(0, 100)
    assert await registry.stored.unswept_bytes("acme", f"{1:064x}") == 100
    await release_all(registry)
    assert (await registry.stored.of("acme", ""))[0] == StorageUse()


async def test_counts_are_those_of_what_names_have_and_of_what_they_lost(
    registry: Registry, redis_client: Redis
) -> None:
    """Random changes of names of a tenant, whose versions share contents, against a plain model of them."""
    chooser = random.Random(3)
    lost: set[int] = set()
    before: set[int] = set()
    for _ in range(300):
        name = f"n{chooser.randrange(3)}"
        mine = {int(one.digest, 16) for one in await versions(registry, name)}
        choice = chooser.random()
        if choice < 0.7:
            content = chooser.randrange(1, 25)
            await put(registry, name, content, content, key="")
        elif choice < 0.9:
            await registry.names.delete("acme", name)
        else:
            await release_all(registry)
            lost.clear()
        left = {int(one.digest, 16) for one in await versions(registry, name)}
        lost = (lost | (mine - left)) - (left - mine)
        names = [await versions(registry, f"n{number}") for number in range(3)]
        expected = sum(one.num_bytes for own in names for one in own) + sum(lost)
        counted = (await registry.stored.of("acme", ""))[0]
        assert counted == StorageUse(sum(map(bool, names)), expected)
        before |= lost
    assert len(before) > 5
    counts = await redis_client.hgetall(STORED + "acme")
    await registry.stored.recount()
    assert await redis_client.hgetall(STORED + "acme") == counts


async def versions(registry: Registry, name: str) -> list[AdapterVersion]:
    current = await registry.get("acme", name)
    return [] if current is None else [*versions_of(current)]


async def test_a_registry_older_than_the_counts_is_counted_once(registry: Registry, redis_client: Redis) -> None:
    await put(registry, "x", 1, 100)
    await redis_client.delete(STORED + "acme")
    assert await registry.stored.count_once()
    assert (await registry.stored.of("acme", ""))[0] == StorageUse(1, 100)
    await redis_client.delete(STORED + "acme")
    assert not await registry.stored.count_once()
    assert await redis_client.exists(STORED_IS_COUNTED)


amounts = st.integers(0, 100)


@given(st.none() | amounts, st.none() | amounts, amounts, amounts, st.integers(-50, 50), st.integers(-50, 50))
def test_what_is_admitted_is_within_the_bound_or_adds_nothing(
    most: int | None, most_bytes: int | None, has: int, has_bytes: int, more: int, more_bytes: int
) -> None:
    try:
        check_storage(StorageBound("", most, most_bytes), StorageUse(has, has_bytes), StorageUse(more, more_bytes))
        assert most is None or more <= 0 or has + more <= most
        assert most_bytes is None or more_bytes <= 0 or has_bytes + more_bytes <= most_bytes
    except QuotaExceeded:
        assert (most is not None and has + more > most) or (
            most_bytes is not None and has_bytes + more_bytes > most_bytes
        )


def test_pinned_bytes() -> None:
    check_pinned(10, 10)
    check_pinned(None, 1 << 60)
    with pytest.raises(QuotaExceeded, match="11 bytes of adapters would be pinned"):
        check_pinned(10, 11)
