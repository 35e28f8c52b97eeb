"""Pins are counted with each change of a name, bounded where they are counted, and known to every router."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import msgspec
import pytest
from redis.asyncio import Redis

from motet.adapters.errors import NoSuchVersion, QuotaExceeded, VersionRefused
from motet.adapters.registry.administration.administration import Administration
from motet.adapters.registry.registry import Registry
from motet.adapters.registry.registry_keys import PINNED, PINS, TENANTS
from motet.adapters.registry.registry_view import RegistryView
from motet.adapters.registry.tenants.records import Actor, Quota, TenantRecord
from motet.adapters.registry.versions.name_state import promoted, rolled_back, with_alias, with_pin
from motet.adapters.registry.versions.rollout import MAX_PINS, MAX_PINS_IN_ALL
from motet.tests.rigs.patience import eventually_in_loop


@pytest.fixture
def registry(redis_client: Redis) -> Registry:
    return Registry(redis_client)


def digest_of(content: int) -> str:
    return f"{content:064x}"


async def put(registry: Registry, name: str, content: int, num_bytes: int, *, activate: bool = True) -> None:
    await registry.names.register(
        "acme",
        name,
        digest=digest_of(content),
        module_ranks={"q_proj": 8},
        num_bytes=num_bytes,
        activate=activate,
    )


async def pin(registry: Registry, name: str, num_gangs: int, most: int | None = None) -> None:
    await registry.names.change("acme", name, lambda state, _: with_pin(state, num_gangs), most_pinned_bytes=most)


async def bound(client: Redis, pinned_bytes: int | None) -> None:
    record = TenantRecord(name="acme", quota=Quota(pinned_bytes=pinned_bytes))
    await client.hset(TENANTS, "acme", msgspec.json.encode(record).decode())


async def pinned(client: Redis) -> str | None:
    found: Any = await client.hget(PINNED, "acme")
    return None if found is None else str(found)


async def test_bytes_count_for_each_gang_and_end_with_the_pin_or_the_name(
    registry: Registry, redis_client: Redis
) -> None:
    await put(registry, "x", 1, 100)
    await put(registry, "y", 2, 30)
    await pin(registry, "x", 2)
    await pin(registry, "y", 1)
    assert await pinned(redis_client) == "2 230"
    await pin(registry, "x", 1)
    assert await pinned(redis_client) == "2 130"
    assert await redis_client.hget(PINS, "acme/x") == f"{digest_of(1)} 1"
    await pin(registry, "y", 0)
    assert await pinned(redis_client) == "1 100"
    with pytest.raises(NoSuchVersion, match="y is not pinned"):
        await pin(registry, "y", 0)
    await registry.names.delete("acme", "x")
    assert await pinned(redis_client) is None
    assert await redis_client.hlen(PINS) == 0


async def test_the_sum_never_passes_the_quota_by_whatever_change(registry: Registry, redis_client: Redis) -> None:
    await bound(redis_client, 250)
    await put(registry, "x", 1, 100)
    await pin(registry, "x", 2)
    with pytest.raises(QuotaExceeded, match="300 bytes of adapters would be pinned, and the quota is 250"):
        await pin(registry, "x", 3)
    with pytest.raises(QuotaExceeded):
        await put(registry, "x", 2, 130)  # its new current version
    await put(registry, "x", 2, 130, activate=False)
    with pytest.raises(QuotaExceeded):
        await registry.names.change("acme", "x", lambda state, now: promoted(state, "2", now))
    assert (await registry.names.get("acme", "x")).current.version == 1
    await put(registry, "x", 3, 10)
    assert await pinned(redis_client) == "1 20"
    await put(registry, "y", 4, 60)
    await pin(registry, "y", 1)
    with pytest.raises(QuotaExceeded):
        await registry.names.change("acme", "x", rolled_back)
    await pin(registry, "y", 0)
    await registry.names.change("acme", "x", rolled_back)
    assert await pinned(redis_client) == "1 200"
    await bound(redis_client, 50)  # what was pinned before stays, and may become less
    await registry.names.change("acme", "x", lambda state, _: with_alias(state, "prod", "1"))
    await pin(registry, "x", 1)
    assert await pinned(redis_client) == "1 100"


async def test_two_that_come_at_once_do_not_both_get_the_last_bytes(registry: Registry, redis_client: Redis) -> None:
    await bound(redis_client, 100)
    for number in range(8):
        await put(registry, f"x{number}", number, 40)
    ends = await asyncio.gather(*(pin(registry, f"x{n}", 1) for n in range(8)), return_exceptions=True)
    assert sum(end is None for end in ends) == 2
    assert await pinned(redis_client) == "2 80"


async def test_a_key_s_bound_holds_beside_the_tenant_s(registry: Registry, redis_client: Redis) -> None:
    await put(registry, "x", 1, 100)
    with pytest.raises(QuotaExceeded, match="quota is 99"):
        await pin(registry, "x", 1, most=99)
    await pin(registry, "x", 1, most=100)


async def test_a_tenant_has_so_many_pins_and_no_more(
    registry: Registry, redis_client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    await put(registry, "x", 1, 100)
    await redis_client.hset(PINNED, "acme", f"{MAX_PINS} 0")
    with pytest.raises(VersionRefused, match="256 of your adapters are pinned"):
        await pin(registry, "x", 1)
    await redis_client.delete(PINNED)
    many: Any = {f"zenith/{number}": "ab 1" for number in range(MAX_PINS_IN_ALL)}
    await redis_client.hset(PINS, mapping=many)
    with pytest.raises(VersionRefused, match="10000 of all tenants' adapters are pinned"):
        await pin(registry, "x", 1)
    assert not (await registry.names.get("acme", "x")).rollout.pinned_gangs


async def test_an_alias_with_the_field_s_name_pins_nothing(registry: Registry, redis_client: Redis) -> None:
    await put(registry, "x", 1, 100)
    await registry.names.change("acme", "x", lambda state, _: with_alias(state, "pinned_gangs", "1"))
    assert await pinned(redis_client) is None
    view = RegistryView(registry)
    await view.start()
    assert view.pins.num_gangs(digest_of(1)) == 0
    await view.stop()


async def test_pins_of_a_deleted_tenant_are_gone(registry: Registry, redis_client: Redis) -> None:
    await put(registry, "x", 1, 100)
    await pin(registry, "x", 2)
    await Administration.of(redis_client).tenants.delete("acme", Actor(kind="operator"))
    assert await pinned(redis_client) is None
    assert await redis_client.hlen(PINS) == 0


def has_pin(view: RegistryView, num_gangs: int) -> bool:
    return view.pins.num_gangs(digest_of(2)) == num_gangs


async def test_every_view_knows_all_pins(registry: Registry) -> None:
    await put(registry, "x", 1, 100)
    await put(registry, "y", 1, 100)
    await pin(registry, "x", 2)
    early, late = RegistryView(registry, capacity=1), RegistryView(registry, capacity=1)
    await early.start()
    assert (early.pins.num_gangs(digest_of(1)), early.pins.take_changed()) == (2, {digest_of(1)})
    await pin(registry, "y", 3)
    await put(registry, "x", 2, 100)
    await late.start()
    for view in (early, late):
        await eventually_in_loop(partial(has_pin, view, 2))
        assert view.pins.num_gangs(digest_of(1)) == 3
    assert early.pins.take_changed() == {digest_of(1), digest_of(2)}
    await registry.names.delete("acme", "y")
    await pin(registry, "x", 0)
    for view in (early, late):
        await eventually_in_loop(partial(has_pin, view, 0))
        assert view.pins.num_gangs(digest_of(1)) == 0
        view.check_integrity()
        await view.stop()
