"""Tenants and keys in a real Redis: their changes, at once and one after another, and deletions that are cut off."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis.asyncio import Redis

from motet.adapters.errors import AdapterInvalid, CallerGone, KeyTaken, NoSuchKey, TenantEnding, TenantExists
from motet.adapters.registry.administration.administration import AuditLog
from motet.adapters.registry.administration.key_registry import KEY_PREFIX, KeyRegistry
from motet.adapters.registry.administration.tenant_registry import TenantRegistry
from motet.adapters.registry.registry import Registry, hash_key
from motet.adapters.registry.registry_keys import ADAPTERS, API_KEYS, LAUNCH_KEYS, NAMES, PREFIX
from motet.adapters.registry.registry_view import RegistryView
from motet.adapters.registry.tenants.records import (
    Actor,
    Admission,
    AuditEntry,
    KeyRecord,
    Quota,
    TenantRecord,
    WrittenEntry,
)
from motet.tests.rigs.given_keys import tenant_of_key

OPERATOR = Actor(kind="operator", request_id="req-1")
NOW = 1_700_000_000.0


@pytest.fixture
def tenants(redis_client: Redis) -> TenantRegistry:
    return TenantRegistry(redis_client, clock=lambda: NOW)


@pytest.fixture
def keys(redis_client: Redis) -> KeyRegistry:
    return KeyRegistry(redis_client, clock=lambda: NOW)


@pytest.fixture
def registry(redis_client: Redis) -> Registry:
    return Registry(redis_client)


@pytest.fixture
async def view(registry: Registry) -> AsyncIterator[RegistryView]:
    view = RegistryView(registry)
    await view.start()
    yield view
    await view.stop()


async def register(registry: Registry, tenant: str, name: str, **given: Any) -> None:
    await registry.names.register(tenant, name, digest="a" * 64, module_ranks={"q_proj": 8}, num_bytes=1, **given)


async def test_a_tenant_is_created_changed_and_suspended(tenants: TenantRegistry, view: RegistryView) -> None:
    wanted = TenantRecord(name="acme", weight=2.0, quota=Quota(adapters=5, stored_bytes=10))
    made = await tenants.create(wanted, OPERATOR)
    assert (made.created_at, made.weight, made.quota.adapters) == (NOW, 2.0, 5)
    with pytest.raises(TenantExists):
        await tenants.create(TenantRecord(name="acme"), OPERATOR)
    with pytest.raises(AdapterInvalid):
        await tenants.create(TenantRecord(name="a/b"), OPERATOR)
    await tenants.change("acme", {"weight": 3.0, "quota": {"adapters": None}}, OPERATOR)
    await tenants.suspend("acme", OPERATOR)
    await view.catch_up()
    known = view.tenant("acme")
    assert (known.weight, known.is_suspended, known.quota) == (3.0, True, Quota(stored_bytes=10))
    assert view.keys.has_tenant("acme") and not view.keys.has_tenant("zoo")
    await tenants.resume("acme", OPERATOR)
    await view.catch_up()
    assert not view.tenant("acme").is_suspended
    again = RegistryView(Registry(view._registry._client))  # what is loaded is what was followed
    await again.start()
    assert again.tenant("acme") == view.tenant("acme")
    await again.stop()


async def test_changes_at_once_are_all_made(tenants: TenantRegistry, redis_client: Redis) -> None:
    await tenants.create(TenantRecord(name="acme"), OPERATOR)
    fields = ["requests_per_minute", "tokens_per_minute", "concurrent_streams", "adapters", "stored_bytes"]
    changes = (tenants.change("acme", {"quota": {name: 7}}, OPERATOR) for name in fields)
    await asyncio.gather(*changes, *(tenants.change("acme", {"weight": 2.0}, OPERATOR) for _ in range(3)))
    last = await tenants.change("acme", {"is_background": True}, OPERATOR)
    assert [getattr(last.quota, name) for name in fields] == [7] * 5 and last.weight == 2.0
    made = await asyncio.gather(
        *(tenants.create(TenantRecord(name="new"), OPERATOR) for _ in range(8)), return_exceptions=True
    )
    assert sorted(isinstance(one, TenantExists) for one in made) == [False] + [True] * 7


async def test_a_key_is_shown_once_and_stored_hashed(
    keys: KeyRegistry, view: RegistryView, redis_client: Redis
) -> None:
    wanted = KeyRecord(key_id="", tenant="acme", scopes=frozenset({"infer"}), label="ci", expires_at=NOW + 60)
    record, key = await keys.create(wanted, OPERATOR)
    assert key.startswith(KEY_PREFIX) and len(key) >= len(KEY_PREFIX) + 43
    await view.catch_up()
    assert view.key(key) == record and record.key_id == hash_key(key)[:16]
    assert view.keys.key_with_id(record.key_id) == (hash_key(key), record)
    assert view.keys.key_with_id("no such") is None
    assert all(str(name).startswith(PREFIX) for name in await redis_client.keys("*"))
    assert key not in str(await redis_client.hgetall(API_KEYS))
    client: Any = redis_client
    assert key not in str([await client.xrange(PREFIX + "audit"), await client.xrange(PREFIX + "events")])


async def test_a_rotated_key_ends_after_the_overlap(keys: KeyRegistry, view: RegistryView) -> None:
    wanted = KeyRecord(key_id="", tenant="acme", scopes=frozenset({"infer", "upload"}), quota=Quota(adapters=3))
    old, old_key = await keys.create(wanted, OPERATOR)
    new, new_key, ending = await keys.rotate(hash_key(old_key), old, 600.0, OPERATOR)
    await view.catch_up()
    assert view.key(old_key) == ending and ending.expires_at == NOW + 600
    assert view.key(new_key) == new and (new.scopes, new.quota, new.expires_at) == (old.scopes, old.quota, None)
    _, _, still = await keys.rotate(hash_key(old_key), ending, 3600.0, OPERATOR)
    assert still.expires_at == NOW + 600  # an overlap makes no key live longer
    await keys.change(hash_key(old_key), old, {"expires_at": NOW}, OPERATOR)
    with pytest.raises(NoSuchKey, match="expired"):
        await keys.rotate(hash_key(old_key), old, 600.0, OPERATOR)
    await keys.delete(hash_key(old_key), old, OPERATOR)
    await view.catch_up()
    assert view.key(old_key) is None
    for change in (
        keys.delete(hash_key(old_key), old, OPERATOR),
        keys.rotate(hash_key(old_key), old, 1.0, OPERATOR),
        keys.change(hash_key(old_key), old, {"label": "x"}, OPERATOR),
    ):
        with pytest.raises(NoSuchKey):
            await change


async def test_configured_keys_go_on_working(
    keys: KeyRegistry, registry: Registry, view: RegistryView, redis_client: Redis
) -> None:
    await registry.set_launch_keys("launch", [("acme", "configured")])
    await redis_client.hset(API_KEYS, hash_key("old"), "zoo")  # as former versions have written it
    again = RegistryView(registry)
    await again.start()
    old, given = again.key("old"), again.key("configured")
    await again.stop()
    assert old is not None and old.tenant == "zoo" and given is not None and given.tenant == "acme"
    assert given.scopes == {"infer", "upload", "metrics"} and again.keys.has_tenant("acme")
    # It may be changed, and the launch that gives it again leaves it so.
    await keys.change(hash_key("configured"), given, {"scopes": frozenset({"infer"})}, OPERATOR)
    await registry.set_launch_keys("launch", [("acme", "configured")])
    kept: Any = redis_client
    assert "infer" in await kept.hget(API_KEYS, hash_key("configured"))
    await view.catch_up()
    changed = view.key("configured")
    assert changed is not None and changed.scopes == {"infer"}
    assert await tenant_of_key(registry, "configured") == "acme"
    assert await registry.tenants_besides("launch") == {"zoo"}
    with pytest.raises(KeyTaken, match="acme's already"):
        await registry.set_launch_keys("other", [("zoo", "configured")])
    await registry.set_launch_keys("launch", ())
    await view.catch_up()
    assert view.key("configured") is None
    view.check_integrity()


async def test_a_deleted_tenant_leaves_nothing(
    tenants: TenantRegistry, keys: KeyRegistry, registry: Registry, view: RegistryView, redis_client: Redis
) -> None:
    for name in ("acme", "acme2", "acm"):
        await tenants.create(TenantRecord(name=name), OPERATOR)
        await register(registry, name, "own")
    made = [await keys.create(KeyRecord(key_id="", tenant="acme", label="acme2"), OPERATOR) for _ in range(3)]
    _, other = await keys.create(KeyRecord(key_id="", tenant="acme2", label='"tenant":"acme"'), OPERATOR)
    await registry.set_launch_keys("launch", [("acme", "configured"), ("acm", "theirs")])
    assert await tenants.delete("acme", OPERATOR) == 1
    await view.catch_up()
    assert [view.key(key) for _, key in made] == [None] * 3 and view.key("configured") is None
    assert view.key(other) is not None and view.key("theirs") is not None
    assert not view.keys.has_tenant("acme") and sorted(view.keys.tenant_names()) == ["acm", "acme2"]
    assert await registry.list_adapters("acme") == [] and await view.resolve("acme", "own") is None
    assert len(await registry.list_adapters("acme2")) == len(await registry.list_adapters("acm")) == 1
    assert await redis_client.scard(LAUNCH_KEYS) == 1
    again = await tenants.create(TenantRecord(name="acme"), OPERATOR)
    assert again.num_ended == 1
    view.check_integrity()


async def test_an_upload_of_a_deleted_tenant_belongs_to_none(tenants: TenantRegistry, registry: Registry) -> None:
    await tenants.create(TenantRecord(name="acme"), OPERATOR)
    await register(registry, "acme", "before", admission=Admission(incarnation=0, last_event=0))
    await tenants.delete("acme", OPERATOR)
    with pytest.raises(CallerGone):
        await register(registry, "acme", "late", admission=Admission(incarnation=0, last_event=0))
    await tenants.create(TenantRecord(name="acme"), OPERATOR)
    with pytest.raises(CallerGone):
        await register(registry, "acme", "late", admission=Admission(incarnation=0, last_event=0))
    await register(registry, "acme", "own", admission=Admission(incarnation=1, last_event=0))
    assert [adapter.name for adapter in await registry.list_adapters("acme")] == ["own"]


async def test_what_is_kept_of_a_tenant_ends_with_its_own_life(redis_client: Redis) -> None:
    ended = []

    async def end(tenant_id: str) -> None:
        ended.append(tenant_id)
        if len(ended) == 2:
            raise CutOff

    tenants = TenantRegistry(redis_client, [end])
    for number in range(2):
        made = await tenants.create(TenantRecord(name="acme"), OPERATOR)
        assert made.num_ended == number
        if number:
            with pytest.raises(CutOff):
                await tenants.delete("acme", OPERATOR)
        await tenants.delete("acme", OPERATOR)
    assert ended == ["acme", "acme~1", "acme~1"]


class CutOff(Exception):  # noqa: N818
    pass


@pytest.mark.parametrize(
    ("moment", "is_done"), [*((moment, False) for moment in range(6)), *((moment, True) for moment in range(-1, 5))]
)
async def test_a_deletion_that_was_cut_off_goes_on(
    moment: int, is_done: bool, registry: Registry, view: RegistryView, redis_client: Redis
) -> None:
    """Whatever was done, the tenant is refused, and no other tenant gets the name before the end."""
    num_names, ended = 500, []

    async def end(tenant: str) -> None:
        ended.append(tenant)

    tenants, keys = TenantRegistry(redis_client, [end]), KeyRegistry(redis_client)
    await tenants.create(TenantRecord(name="acme"), OPERATOR)
    made = [await keys.create(KeyRecord(key_id="", tenant="acme"), OPERATOR) for _ in range(3)]
    record = "1 " + "a" * 64 + ' {"module_ranks": {"q_proj": 8}, "num_bytes": 1, "created_at": 1.0}'
    fields = [f"acme/n{i:05}" for i in range(num_names)]
    await redis_client.hset(ADAPTERS, mapping=dict.fromkeys(fields, record))
    await redis_client.zadd(NAMES, dict.fromkeys(fields, 0))

    num_calls = 0

    def counted(script: Any) -> Any:
        async def call(**given: Any) -> Any:
            nonlocal num_calls
            num_calls += 1
            if num_calls == moment + 2:  # the tenant's mark is the first
                if is_done:  # and only the answer was lost
                    await script(**given)
                raise CutOff
            return await script(**given)

        return call

    cut = TenantRegistry(redis_client, [end])
    for store in (cut._store, cut._changes._store):
        store._transact_when_full = counted(store._transact_when_full)
    with pytest.raises(CutOff):
        await cut.delete("acme", OPERATOR)
    await view.catch_up()
    assert view.tenant("acme").is_ending
    for change in (
        tenants.create(TenantRecord(name="acme"), OPERATOR),
        tenants.change("acme", {"weight": 2.0}, OPERATOR),
        keys.create(KeyRecord(key_id="", tenant="acme"), OPERATOR),
    ):
        with pytest.raises(TenantEnding):
            await change
    await tenants.delete("acme", OPERATOR)
    assert ended[-1:] == ["acme"]
    await view.catch_up()
    assert not view.keys.has_tenant("acme") and view.tenant("acme").num_ended == 1
    assert [view.key(key) for _, key in made] == [None] * 3
    assert await redis_client.hlen(ADAPTERS) == await redis_client.zcard(NAMES) == 0


async def test_every_change_is_in_the_log(
    tenants: TenantRegistry, keys: KeyRegistry, registry: Registry, redis_client: Redis
) -> None:
    log = AuditLog(redis_client)
    assert await log.read("", 10) == []
    await tenants.create(TenantRecord(name="acme"), OPERATOR)
    record, key = await keys.create(KeyRecord(key_id="", tenant="acme", label="a secret label"), OPERATOR)
    tenant_key = Actor(kind="key", id=record.key_id, tenant="acme", request_id="req-2")
    upload = AuditEntry(action="adapter.upload", tenant="acme", target="x", actor=tenant_key)
    await register(registry, "acme", "x", entry=upload)
    await register(registry, "acme", "x", entry=upload)  # changes nothing
    removal = AuditEntry(action="adapter.delete", tenant="acme", target="x", actor=tenant_key)
    await registry.names.delete("acme", "x", removal)
    assert await registry.names.delete("acme", "x", removal) is None
    _, _, _ = await keys.rotate(hash_key(key), record, 10.0, tenant_key)
    await keys.delete(hash_key(key), record, OPERATOR)
    await tenants.suspend("acme", OPERATOR)
    await tenants.create(TenantRecord(name="zoo"), OPERATOR)
    with pytest.raises(TenantExists):
        await tenants.create(TenantRecord(name="zoo"), OPERATOR)
    written = await log.read("", 100)
    assert [one.entry.action for one in reversed(written)] == [
        "tenant.create",
        "key.create",
        "adapter.upload",
        "adapter.delete",
        "key.rotate",
        "key.delete",
        "tenant.suspend",
        "tenant.create",
    ]
    assert [one.result for one in written if one.entry.target == "x"] == ["1", "1"]
    assert {one.entry.actor.id for one in written if one.entry.actor.kind == "key"} == {record.key_id}
    assert key not in str(written) and "secret" not in str(written)
    assert [one.entry.tenant for one in await log.read("", 1)] == ["zoo"]
    assert len(await log.read("", 100, "acme")) == 7 and await log.read("", 100, "none") == []
    pages: list[WrittenEntry] = []
    before = ""
    while page := await log.read(before, 3):
        pages += page
        before = page[-1].id
    assert pages == written


async def test_the_log_is_read_past_others_entries(redis_client: Redis, tenants: TenantRegistry) -> None:
    await tenants.create(TenantRecord(name="quiet"), OPERATOR)
    pipeline = redis_client.pipeline()
    for _ in range(2500):
        pipeline.xadd(PREFIX + "audit", {"tenant": "loud", "entry": "{}", "result": ""})
    await pipeline.execute()
    assert [one.entry.tenant for one in await AuditLog(redis_client).read("", 5, "quiet")] == ["quiet"]


async def test_settings_that_change_are_noted_once(redis_client: Redis) -> None:
    logs = [AuditLog(redis_client) for _ in range(8)]
    first, then = {"max-num-sequences": 64, "name": "base"}, {"max-num-sequences": 32, "name": "base"}
    assert sorted(await asyncio.gather(*(log.note_settings(first) for log in logs))) == [False] * 7 + [True]
    assert sorted(await asyncio.gather(*(log.note_settings(then) for log in logs))) == [False] * 7 + [True]
    assert await logs[0].note_settings(first)  # back again
    written = [one.entry for one in reversed(await logs[0].read("", 10))]
    assert [(entry.action, entry.changed, entry.actor.kind) for entry in written] == [
        ("settings.first", {}, "configuration"),
        ("settings.change", {"max-num-sequences": {"from": 64, "to": 32}}, "configuration"),
        ("settings.change", {"max-num-sequences": {"from": 32, "to": 64}}, "configuration"),
    ]
