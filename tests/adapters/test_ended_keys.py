"""How many keys a tenant may have, however they are made, and that those which have ended leave the registry."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis.asyncio import Redis

from motet.adapters.errors import TooManyKeys
from motet.adapters.registry.administration import key_registry, tenant_registry
from motet.adapters.registry.administration.key_registry import KEPT_S, PAGE_SIZE, EndedKeys, KeyRegistry
from motet.adapters.registry.administration.tenant_registry import TenantRegistry
from motet.adapters.registry.registry import Registry, hash_key
from motet.adapters.registry.registry_keys import API_KEYS, KEY_ENDS, MADE_KEYS
from motet.adapters.registry.registry_view import RegistryView
from motet.adapters.registry.tenants.records import Actor, KeyRecord, TenantRecord
from motet.tests.rigs.patience import eventually_in_loop

OPERATOR = Actor(kind="operator")
LONG_AGO = time.time() - KEPT_S - 60


@pytest.fixture
def keys(redis_client: Redis) -> KeyRegistry:
    return KeyRegistry(redis_client)


@pytest.fixture
async def view(redis_client: Redis) -> AsyncIterator[RegistryView]:
    view = RegistryView(Registry(redis_client))
    await view.start()
    yield view
    await view.stop()


async def made(keys: KeyRegistry, tenant: str = "acme", expires_at: float | None = None) -> tuple[KeyRecord, str]:
    return await keys.create(KeyRecord(key_id="", tenant=tenant, expires_at=expires_at), OPERATOR)


async def test_no_way_leads_past_the_bound(
    keys: KeyRegistry, redis_client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not rotation, not many requests at once; and what is deleted makes room."""
    monkeypatch.setattr(tenant_registry, "MAX_KEYS", 5)
    await Registry(redis_client).set_launch_keys("launch", [("acme", "configured")])  # counts for nothing
    tried = await asyncio.gather(*(made(keys) for _ in range(9)), return_exceptions=True)
    good = [one for one in tried if not isinstance(one, BaseException)]
    assert len(good) == 5 and sum(isinstance(one, TooManyKeys) for one in tried) == 4
    record, key = good[0]
    for _ in range(3):
        with pytest.raises(TooManyKeys):
            await keys.rotate(hash_key(key), record, 0.0, OPERATOR)
    assert await redis_client.hlen(API_KEYS) == 6  # and the old one has not ended either
    assert (await keys.change(hash_key(key), record, {"label": "x"}, OPERATOR)).expires_at is None
    await keys.delete(hash_key(good[1][1]), good[1][0], OPERATOR)
    await keys.rotate(hash_key(key), record, 0.0, OPERATOR)
    with pytest.raises(TooManyKeys):
        await made(keys)
    await made(keys, "zoo")


async def test_deleted_tenants_and_keys_count_for_nothing(
    keys: KeyRegistry, redis_client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tenant_registry, "MAX_KEYS", 2)
    tenants = TenantRegistry(redis_client)
    for _ in range(3):
        await tenants.create(TenantRecord(name="acme"), OPERATOR)
        record, key = await made(keys, expires_at=time.time() + 3600)
        await made(keys)
        await keys.delete(hash_key(key), record, OPERATOR)
        await made(keys)
        await tenants.delete("acme", OPERATOR)
    assert await redis_client.exists(MADE_KEYS + "acme") == 0
    assert await EndedKeys(redis_client).forget() is False


async def test_keys_that_ended_long_ago_are_forgotten(
    keys: KeyRegistry, view: RegistryView, redis_client: Redis
) -> None:
    now = time.time()
    _, gone = await made(keys, expires_at=LONG_AGO)
    _, ended = await made(keys, expires_at=now - KEPT_S + 3600)
    _, endless = await made(keys)
    record, longer = await made(keys, expires_at=LONG_AGO)
    await keys.change(hash_key(longer), record, {"expires_at": None}, OPERATOR)
    again, later = await made(keys, expires_at=LONG_AGO)
    await keys.change(hash_key(later), again, {"expires_at": now + 60}, OPERATOR)
    await EndedKeys(redis_client).forget()
    await view.catch_up()
    kept = [key for key in (gone, ended, endless, longer, later) if view.key(key) is not None]
    assert kept == [ended, endless, longer, later]
    assert await redis_client.scard(MADE_KEYS + "acme") == 4
    assert await redis_client.zcard(KEY_ENDS) == 2
    view.check_integrity()


async def test_a_configured_key_that_ended_does_not_come_back(
    keys: KeyRegistry, view: RegistryView, redis_client: Redis
) -> None:
    """Were it forgotten, the next launch that gives it would give it anew, without an end."""
    registry = Registry(redis_client)
    await registry.set_launch_keys("launch", [("acme", "configured")])
    await view.catch_up()
    given = view.key("configured")
    assert given is not None
    await keys.change(hash_key("configured"), given, {"expires_at": LONG_AGO}, OPERATOR)
    assert await EndedKeys(redis_client).forget() is False
    await registry.set_launch_keys("launch", [("acme", "configured")])
    await view.catch_up()
    known = view.key("configured")
    assert known is not None and known.expires_at == LONG_AGO
    await registry.set_launch_keys("launch", [])
    assert await redis_client.hlen(API_KEYS) == 0


async def test_each_turn_is_short_and_all_go(
    keys: KeyRegistry, view: RegistryView, redis_client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_keys = 2 * PAGE_SIZE + 50
    for number in range(-num_keys, 0):
        await made(keys, expires_at=LONG_AGO + number)
    _, living = await made(keys)
    num_events = await view._registry.num_events()
    ended = EndedKeys(redis_client)
    assert await ended.forget() is True
    assert await view._registry.num_events() == num_events + PAGE_SIZE
    monkeypatch.setattr(key_registry, "_BETWEEN_PAGES_S", 0.01)
    several: list[Any] = [ended, EndedKeys(redis_client)]
    for one in several:
        one.start()
    await eventually_in_loop(lambda: view.keys.num_keys == 1)
    for one in several:
        await one.stop()
    assert view.key(living) is not None
    assert await redis_client.zcard(KEY_ENDS) == 0 and await redis_client.scard(MADE_KEYS + "acme") == 1
    view.check_integrity()
