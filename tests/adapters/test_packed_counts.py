"""Quotas count what lies on disk and in host memory, and get back exactly what was counted."""

from __future__ import annotations

import random
from functools import partial

import pytest
from redis.asyncio import Redis

from motet.adapters.errors import NoSuchVersion, QuotaExceeded
from motet.adapters.registry.registry import Registry
from motet.adapters.registry.registry_keys import ADAPTERS, NAMES, PINNED, STORED, VERSIONS
from motet.adapters.registry.tenants.records import StorageBound, StorageUse
from motet.adapters.registry.versions.name_state import NameState, VersionNote, with_alias, with_pin
from motet.adapters.registry.versions.rollout import rollout_of, versions_of

KEYS = ("k1", "k2")


@pytest.fixture
def registry(redis_client: Redis) -> Registry:
    return Registry(redis_client)


async def put(registry: Registry, name: str, content: int, num_bytes: int, packed_bytes: int, key: str = "k1") -> None:
    await registry.names.register(
        "acme",
        name,
        digest=f"{content:064x}",
        module_ranks={"q_proj": 8},
        num_bytes=num_bytes,
        packed_bytes=packed_bytes,
        note=VersionNote("", key),
    )


async def put_old_record(client: Redis, name: str, num_bytes: int) -> None:
    """As it was written before pages were recorded, with its count."""
    record = f'1 {"a" * 64} {{"module_ranks": {{"q_proj": 8}}, "num_bytes": {num_bytes}, "created_at": 1.5}}'
    await client.hset(ADAPTERS, f"acme/{name}", record)
    await client.hset(VERSIONS, f"acme/{name}", "1")
    await client.zadd(NAMES, {f"acme/{name}": 0})
    await client.hset(STORED + "acme", "", f"1 {num_bytes}")


def pin_of(num_gangs: int, state: NameState, _: float) -> NameState:
    return with_pin(state, num_gangs)


async def expected(registry: Registry) -> tuple[StorageUse, str | None]:
    """What the records say the tenant has stored and pinned, with what is to be swept."""
    names = num_bytes = pins = pinned = 0
    for current in await registry.list_adapters("acme"):
        names += 1
        num_bytes += sum(one.num_bytes + one.packed_bytes for one in versions_of(current))
        num_gangs = rollout_of(current).pinned_gangs
        pins += num_gangs > 0
        pinned += num_gangs * (current.packed_bytes or current.num_bytes)
    async for _, page in registry.stored.unswept():
        num_bytes += sum(one.num_bytes for one in page)
    return StorageUse(names, num_bytes), f"{pins} {pinned}" if pins else None


@pytest.mark.parametrize("seed", range(3))
async def test_counts_are_what_the_records_say_and_nothing_is_left(
    registry: Registry, redis_client: Redis, seed: int
) -> None:
    rng = random.Random(seed)
    await put_old_record(redis_client, "n0", 1000)
    for step in range(80):
        name, pick = f"n{rng.randrange(3)}", rng.random()
        try:
            if pick < 0.6:  # 0: as a record of an old version that is written again
                packed_bytes = rng.choice((0, rng.randrange(1, 1 << 40)))
                await put(registry, name, rng.randrange(30), rng.randrange(1, 1 << 20), packed_bytes, rng.choice(KEYS))
            elif pick < 0.8:
                num_gangs = rng.randrange(3)
                await registry.names.change("acme", name, partial(pin_of, num_gangs))
            elif pick < 0.9:
                await registry.names.change("acme", name, lambda state, _: with_alias(state, "prod", "1"))
            else:
                await registry.names.delete("acme", name)
        except NoSuchVersion:
            continue
        use, pinned = await expected(registry)
        assert (await registry.stored.of("acme", ""))[0] == use, f"step {step}"
        assert await redis_client.hget(PINNED, "acme") == pinned, f"step {step}"
    counted = await redis_client.hgetall(STORED + "acme")
    await registry.stored.recount()
    assert await redis_client.hgetall(STORED + "acme") == counted
    for number in range(3):
        await registry.names.delete("acme", f"n{number}")
    async for tenant, page in registry.stored.unswept():
        await registry.stored.release(tenant, page)
    assert await redis_client.hgetall(STORED + "acme") == {}
    assert await redis_client.hget(PINNED, "acme") is None


async def test_the_first_upload_counts_its_pages(registry: Registry) -> None:
    bound = (StorageBound("", None, 1000),)
    with pytest.raises(QuotaExceeded, match="1010 more are over this tenant's quota of 1000"):
        await registry.names.register(
            "acme", "x", digest="b" * 64, module_ranks={"q_proj": 8}, num_bytes=10, packed_bytes=1000, bounds=bound
        )
    await put(registry, "x", 1, 10, 990)
    await registry.names.change("acme", "x", lambda state, _: with_pin(state, 2), most_pinned_bytes=1980)
    with pytest.raises(QuotaExceeded, match="2970 bytes of adapters would be pinned"):
        await registry.names.change("acme", "x", lambda state, _: with_pin(state, 3), most_pinned_bytes=2000)
