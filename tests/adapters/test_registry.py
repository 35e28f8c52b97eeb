from __future__ import annotations

import asyncio
from typing import Any

import pytest
from redis.asyncio import Redis

from motet import __version__
from motet.adapters.adapter import AdapterVersion, BaseIdentity
from motet.adapters.errors import AdapterInvalid, KeyTaken, OtherBase, RegistryUnavailable
from motet.adapters.registry.events import AdapterDeleted, AdapterSet, KeySet
from motet.adapters.registry.registry import (
    LAYOUT_NUMBER,
    PAGE_SIZE,
    OtherLayout,
    Position,
    Registry,
    connect,
    hash_key,
)
from motet.adapters.registry.registry_keys import LAYOUT, PREFIX
from motet.tests.rigs.given_keys import give_key, take_back_key, tenant_of_key
from motet.tests.rigs.patience import PATIENCE_S


@pytest.fixture
def registry(redis_client: Redis) -> Registry:
    return Registry(redis_client, clock=lambda: 1234567890.125)


def facts(digest: str = "a", rank: int = 8) -> dict[str, Any]:
    return {"digest": digest * 64, "module_ranks": {"q_proj": rank, "v_proj": 4}, "num_bytes": 1000}


async def keys_of(registry: Registry) -> dict[str, str]:
    return {key_hash: tenant async for page in registry.scan_keys() for key_hash, tenant in page}


async def test_register_get_list_delete(registry: Registry) -> None:
    adapter, _, created = await registry.names.register("acme", "pirate", **facts())
    assert created
    assert adapter == AdapterVersion("acme", "pirate", 1, "a" * 64, {"q_proj": 8, "v_proj": 4}, 1000, 1234567890.125)
    assert await registry.get("acme", "pirate") == adapter
    assert await registry.list_adapters("acme") == [adapter]
    assert "a" * 64 in await registry.digests()
    assert await registry.names.delete("acme", "pirate") == AdapterDeleted("acme", "pirate", 1, revision=2)
    assert await registry.names.delete("acme", "pirate") is None
    assert await registry.get("acme", "pirate") is None
    assert await registry.list_adapters("acme") == []
    assert len(await registry.digests()) == 0


async def test_versions_count_up_and_the_same_digest_is_the_same_version(registry: Registry) -> None:
    first = await registry.names.register("acme", "x", **facts("a"))
    again = await registry.names.register("acme", "x", **facts("a"))
    assert (first[2], again) == (True, (*first[:2], False))
    assert (await registry.names.register("acme", "x", **facts("b")))[0].version == 2
    assert (await registry.names.register("acme", "x", **facts("a")))[0].version == 3
    await registry.names.delete("acme", "x")
    adapter, _, created = await registry.names.register("acme", "x", **facts("a"))
    assert (adapter.version, created) == (4, True)


async def test_many_at_once_get_versions_of_their_own(registry: Registry) -> None:
    async def register(number: int) -> tuple[AdapterVersion, AdapterVersion, bool]:
        return await registry.names.register("acme", "x", **facts("0123456789abcdef"[number % 16]))

    answers = await asyncio.gather(*(register(number) for number in range(16)))
    assert sorted(adapter.version for adapter, *_ in answers) == list(range(1, 17))
    same = await asyncio.gather(*(registry.names.register("acme", "y", **facts()) for _ in range(16)))
    assert sorted(created for *_, created in same) == [False] * 15 + [True]
    assert {adapter.version for adapter, *_ in same} == {1}


async def test_tenants_do_not_see_each_other(registry: Registry) -> None:
    for tenant in ("acme", "acme.", "acme-2", "acme0", "a", "ACME", "z"):
        await registry.names.register(tenant, "shared", **facts())
        await registry.names.register(tenant, f"own-{tenant}", **facts())
    for tenant in ("acme", "acme.", "acme-2", "acme0", "a", "ACME", "z"):
        assert {(adapter.tenant, adapter.name) for adapter in await registry.list_adapters(tenant)} == {
            (tenant, "shared"),
            (tenant, f"own-{tenant}"),
        }
    assert await registry.get("acme", "own-a") is None
    assert await registry.names.delete("acme", "own-a") is None
    assert await registry.get("a", "own-a") is not None


async def test_lists_are_sorted_by_name(registry: Registry) -> None:
    for name in ("b", "a.1", "B", "0", "a"):
        await registry.names.register("acme", name, **facts())
    assert [adapter.name for adapter in await registry.list_adapters("acme")] == ["0", "B", "a", "a.1", "b"]


async def test_a_list_is_read_in_pages(registry: Registry) -> None:
    names = sorted(f"n{i}" for i in range(25))
    for name in names:
        await registry.names.register("acme", name, digest="a" * 64, module_ranks={"q_proj": 8}, num_bytes=1)
    for tenant in ("acm", "acme0", "acmf"):
        await registry.names.register(tenant, "n1", digest="a" * 64, module_ranks={"q_proj": 8}, num_bytes=1)
    found: list[str] = []
    while page := await registry.list_adapters("acme", found[-1] if found else "", 10):
        assert len(page) <= 10
        found += [adapter.name for adapter in page]
        await registry.names.delete("acme", found[-1])  # a list goes on behind a name that is gone
    assert found == names
    assert await registry.list_adapters("acme", "zzz") == []
    with pytest.raises(ValueError, match="limit = 0"):
        await registry.list_adapters("acme", "", 0)


async def test_a_list_longer_than_a_page_comes_in_pages(registry: Registry, redis_client: Redis) -> None:
    record = "1 " + "a" * 64 + ' {"module_ranks": {"q_proj": 8}, "num_bytes": 1, "created_at": 1.0}'
    fields = [f"acme/n{i:05}" for i in range(2 * PAGE_SIZE)]
    await redis_client.hset(PREFIX + "adapters", mapping=dict.fromkeys(fields, record))
    await redis_client.zadd(PREFIX + "names", dict.fromkeys(fields, 0))
    first = await registry.list_adapters("acme")
    rest = await registry.list_adapters("acme", first[-1].name)
    assert len(first) == PAGE_SIZE
    assert [f"acme/{adapter.name}" for adapter in (*first, *rest)] == fields


@pytest.mark.parametrize("tenant", ["a/b", "", "a\n", "{x}"])
async def test_names_cannot_break_out(tenant: str, registry: Registry) -> None:
    with pytest.raises(AdapterInvalid):
        await registry.names.register(tenant, "x", **facts())
    with pytest.raises(AdapterInvalid):
        await registry.names.register("acme", f"{tenant}/x", **facts())
    with pytest.raises(AdapterInvalid):
        await registry.list_adapters(tenant)
    with pytest.raises(AdapterInvalid):
        await give_key(registry, tenant, "secret")


async def test_keys_belong_to_tenants_and_are_stored_hashed(registry: Registry, redis_client: Redis) -> None:
    await give_key(registry, "acme", "secret-1")
    await give_key(registry, "acme", "secret-2")
    await give_key(registry, "zoo", "secret-3")
    assert await tenant_of_key(registry, "secret-2") == "acme"
    assert await tenant_of_key(registry, "secret-3") == "zoo"
    assert await tenant_of_key(registry, hash_key("secret-3")) is None
    assert await tenant_of_key(registry, "") is None
    with pytest.raises(KeyTaken, match="given for zoo is acme's already") as taken:
        await give_key(registry, "zoo", "secret-2")
    assert "secret" not in str(taken.value)
    assert await tenant_of_key(registry, "secret-2") == "acme"
    await take_back_key(registry, "secret-3")
    assert await tenant_of_key(registry, "secret-3") is None
    await give_key(registry, "acme", "secret-3")  # free again
    await registry.set_launch_keys("launch-1", [("acme", "secret-4")])
    for key in await redis_client.keys("*"):
        assert str(key).startswith(PREFIX)
        assert "secret" not in str(await _content(redis_client, str(key)))


async def _content(client: Any, key: str) -> Any:
    kind = await client.type(key)
    if kind == "hash":
        return await client.hgetall(key)
    if kind == "set":
        return await client.smembers(key)
    if kind == "zset":
        return await client.zrange(key, 0, -1)
    if kind == "stream":
        return await client.xrange(key)
    assert kind == "string"
    return await client.get(key)


async def test_a_launch_takes_back_what_it_gives_no_more(registry: Registry) -> None:
    start = (await registry.position()).event_id
    await registry.set_launch_keys("launch-1", [("acme", "old"), ("zoo", "kept")])
    await registry.set_launch_keys("launch-1", [("acme", "new"), ("zoo", "kept")])
    assert await tenant_of_key(registry, "old") is None
    assert await tenant_of_key(registry, "new") == "acme"
    assert await tenant_of_key(registry, "kept") == "zoo"
    events = [entry.event for entry in await registry.read_events(start, 0.01)]
    assert events == [
        KeySet(hash_key("old"), "acme"),
        KeySet(hash_key("kept"), "zoo"),
        KeySet(hash_key("new"), "acme"),
        KeySet(hash_key("old"), None),
    ]
    await registry.set_launch_keys("launch-1", [])
    assert await keys_of(registry) == {}


async def test_many_keys_of_a_launch_are_changed_in_pages(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("motet.adapters.registry.registry._KEYS_SIZE", 7)
    keys = [(f"t{i % 5}", f"key {i}") for i in range(40)]
    await give_key(registry, "zoo", "taken")
    with pytest.raises(KeyTaken, match="given for acme is zoo's"):
        await registry.set_launch_keys("launch-1", [*keys, ("acme", "taken")])
    with pytest.raises(KeyTaken):
        await registry.set_launch_keys("launch-1", [("acme", "x"), *keys, ("zoo", "x")])
    assert await keys_of(registry) == {hash_key("taken"): "zoo"}, "a launch that is refused changes nothing"
    await registry.set_launch_keys("launch-1", [*keys, keys[0]])
    await registry.set_launch_keys("launch-2", keys[:10])
    expected = {hash_key(key): tenant for tenant, key in keys} | {hash_key("taken"): "zoo"}
    assert await keys_of(registry) == expected
    await registry.set_launch_keys("launch-1", keys[30:])
    kept = {hash_key(key) for _, key in [*keys[:10], *keys[30:]]} | {hash_key("taken")}
    assert set(await keys_of(registry)) == kept


async def test_launches_that_share_a_registry_leave_each_others_keys(registry: Registry) -> None:
    await give_key(registry, "acme", "for good")
    await registry.set_launch_keys("launch-1", [("acme", "mine"), ("acme", "shared"), ("acme", "for good")])
    await registry.set_launch_keys("launch-2", [("acme", "yours"), ("acme", "shared")])
    await registry.set_launch_keys("launch-1", [])
    assert await tenant_of_key(registry, "mine") is None
    for key in ("yours", "shared", "for good"):
        assert await tenant_of_key(registry, key) == "acme"
    await registry.set_launch_keys("launch-2", [])
    assert await tenant_of_key(registry, "shared") is None
    assert await tenant_of_key(registry, "for good") == "acme"


async def test_a_launch_cannot_take_another_tenants_key(registry: Registry) -> None:
    await give_key(registry, "acme", "x")
    await registry.set_launch_keys("launch-1", [("acme", "y")])
    before = await registry.position(), await keys_of(registry)
    for owner, taken in (("launch-2", "x"), ("launch-2", "y"), ("launch-1", "y")):
        with pytest.raises(KeyTaken, match="given for zoo is acme's already"):
            await registry.set_launch_keys(owner, [("zoo", "new"), ("zoo", taken)])
    assert (await registry.position(), await keys_of(registry)) == before


async def test_a_registry_belongs_to_one_base(registry: Registry) -> None:
    mine, renamed, other = BaseIdentity("a" * 64, "mine"), BaseIdentity("a" * 64, "x"), BaseIdentity("b" * 64, "other")
    await registry.claim_base(mine, "go away", if_empty=False)
    await registry.claim_base(renamed, "go away", if_empty=False)
    with pytest.raises(OtherBase, match=r"mine.*other.*trained again.*go away"):
        await registry.claim_base(other, "go away", if_empty=False)
    await registry.claim_base(other, "go away", if_empty=True)
    await registry.names.register("acme", "x", **facts())
    with pytest.raises(OtherBase):
        await registry.claim_base(mine, "go away", if_empty=True)


async def test_a_registry_whose_layout_is_later_is_refused(registry: Registry, redis_client: Redis) -> None:
    await registry.claim_layout()
    assert await redis_client.get(LAYOUT) == f"{LAYOUT_NUMBER} {__version__}"
    await redis_client.set(LAYOUT, f"{LAYOUT_NUMBER} 0.0.1")
    await registry.claim_layout()
    assert await redis_client.get(LAYOUT) == f"{LAYOUT_NUMBER} 0.0.1"
    await redis_client.set(LAYOUT, f"{LAYOUT_NUMBER + 1} 77.3.0")
    with pytest.raises(
        OtherLayout, match=rf"layout {LAYOUT_NUMBER + 1}, which needs motet 77\.3\.0 or later.*layout 1"
    ):
        await registry.claim_layout()


async def test_changes_are_reported_in_order_and_only_once(registry: Registry) -> None:
    start = await registry.position()
    assert start == Position("0-0", 0, num_adapters=0)
    adapter, *_ = await registry.names.register("acme", "x", **facts())
    await registry.names.register("acme", "x", **facts())
    await registry.names.delete("acme", "x")
    await registry.names.delete("acme", "x")
    for _ in range(2):
        await give_key(registry, "acme", "secret")
    await take_back_key(registry, "secret")
    events = await registry.read_events(start.event_id, 0.01)
    assert [entry.event for entry in events] == [
        AdapterSet(adapter),
        AdapterDeleted("acme", "x", 1, 2),
        KeySet(hash_key("secret"), "acme"),
        KeySet(hash_key("secret"), None),
    ]
    assert [entry.number for entry in events] == [1, 2, 3, 4]
    assert await registry.read_events(events[-1].event_id, 0.01) == []
    assert await registry.position() == Position(events[-1].event_id, 4, num_adapters=0)
    assert await registry.has_event(events[-1].event_id, 4)
    assert not await registry.has_event(events[-1].event_id, 3)
    assert not await registry.has_event("1-1", 4)


async def test_waits_for_an_event(registry: Registry, redis_client: Redis, redis_url: str) -> None:
    client = connect(redis_url, timeout_s=2 * PATIENCE_S)
    waiting = asyncio.create_task(Registry(client).read_events("0-0", PATIENCE_S))
    while (await redis_client.info("clients"))["blocked_clients"] == 0:
        assert not waiting.done()
    await registry.names.register("acme", "x", **facts())
    assert len(await waiting) == 1
    await client.aclose()


async def test_pages_hold_everything(registry: Registry) -> None:
    tenants = [f"t{i:03}" for i in range(200)]  # more than Redis keeps in one piece
    adapters = [(await registry.names.register(tenant, name, **facts()))[0] for tenant in tenants for name in "xyz"]
    for tenant in tenants:
        await give_key(registry, tenant, f"secret of {tenant}")
    found = [adapter async for page in registry.scan_adapters() for adapter in page]
    assert sorted(found, key=lambda adapter: (adapter.tenant, adapter.name)) == adapters
    assert await keys_of(registry) == {hash_key(f"secret of {tenant}"): tenant for tenant in tenants}
    names = [(adapter.tenant, adapter.name) for adapter in adapters[:300:7]]
    assert await registry.get_many([*names, ("t000", "none")]) == [*adapters[:300:7], None]
    assert (await registry.position()).num_adapters == 600


async def test_digests_of_a_large_registry_are_a_small_set(registry: Registry, redis_client: Redis) -> None:
    digests = [hash_key(str(i)) for i in range(3000)]
    records: dict[Any, Any] = {f"acme/n{i}": f'{i} {digest} {{"a": "1 b"}}' for i, digest in enumerate(digests)}
    await redis_client.hset(PREFIX + "adapters", mapping=records)
    found = await registry.digests()
    assert all(digest in found for digest in digests)
    assert not any(hash_key(f"no {i}") in found for i in range(3000))
    assert len(found) == 3000


async def test_tenants_that_have_an_adapter_of_a_name(registry: Registry, redis_client: Redis) -> None:
    tenants = ["a", "a-", "a-b", "a.b", "a0", "aa", "b", "b-0"]
    names = {f"{tenant}/{name}": 0 for tenant in tenants for name in ("k", "x", "z")}
    names |= {f"t{i:05}/other": 0 for i in range(PAGE_SIZE + 5)}
    await redis_client.zadd(PREFIX + "names", names)
    await redis_client.zrem(PREFIX + "names", "aa/x")
    assert sorted(await registry.tenants_with("x")) == sorted(set(tenants) - {"aa"})
    assert len(await registry.tenants_with("other")) == PAGE_SIZE + 5
    assert await registry.tenants_with("none") == []


async def test_one_sweep_holds_a_store(registry: Registry) -> None:
    assert await registry.hold_sweep("store", "mine", 60)
    assert await registry.hold_sweep("store", "mine", 60)
    assert not await registry.hold_sweep("store", "another's", 60)
    assert await registry.hold_sweep("another store", "another's", 60)
    assert await registry.hold_sweep("store", "mine", 0)
    await asyncio.sleep(0.02)
    assert await registry.hold_sweep("store", "another's", 60)


async def test_without_redis_every_call_is_unavailable() -> None:
    registry = Registry(connect("redis://127.0.0.1:1", timeout_s=0.5))
    calls = [
        registry.ping(),
        registry.names.register("acme", "x", **facts()),
        registry.get("acme", "x"),
        registry.list_adapters("acme"),
        registry.names.delete("acme", "x"),
        registry.digests(),
        registry.set_launch_keys("launch-1", [("acme", "x")]),
        registry.claim_base(BaseIdentity("a", "x"), "go away", if_empty=True),
        registry.position(),
        registry.has_event("0-0", 1),
        registry.get_many([("acme", "x")]),
        anext(registry.scan_adapters()),
        anext(registry.scan_keys()),
        registry.tenants_with("x"),
        registry.hold_sweep("store", "mine", 1),
        registry.read_events("0-0", 0.01),
    ]
    for call in calls:
        with pytest.raises(RegistryUnavailable, match="try again"):
            await call


async def test_a_server_that_accepts_and_says_nothing_is_unavailable() -> None:
    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(mute, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    client = connect(f"redis://127.0.0.1:{port}", timeout_s=30.0)
    with pytest.raises(RegistryUnavailable):  # the registry's own limit holds, whatever the client's
        await Registry(client, timeout_s=0.2).names.register("acme", "x", **facts())
    await client.aclose()
    server.close()


async def test_a_client_that_does_not_decode_is_refused(redis_url: str) -> None:
    client = Redis.from_url(redis_url)
    with pytest.raises(ValueError, match="decodes"):
        Registry(client)
    await client.aclose()


async def test_memory_is_what_redis_reports(registry: Registry, redis_client: Redis) -> None:
    await redis_client.config_set("maxmemory", "512mb")
    try:
        used_bytes, max_bytes = await registry.memory()
    finally:
        await redis_client.config_set("maxmemory", "0")
    assert 100_000 < used_bytes < max_bytes == 512 << 20
