from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from motet.adapters.adapter import AdapterVersion
from motet.adapters.errors import RegistryUnavailable
from motet.adapters.registry import registry_view
from motet.adapters.registry.events import AdapterSet, KeySet
from motet.adapters.registry.registry import NumberedEvent, Position, Registry, connect, hash_key
from motet.adapters.registry.registry_keys import PREFIX
from motet.adapters.registry.registry_view import RegistryView
from motet.cluster.launch.redis_server import RedisServer
from motet.tests.rigs.given_keys import give_key, take_back_key
from motet.tests.rigs.patience import PATIENCE_S
from motet.tests.rigs.patience import eventually_in_loop as eventually


class GatedRegistry(Registry):
    """Reads no events while `gate` is closed."""

    def __init__(self, client: Redis) -> None:
        super().__init__(client)
        self.gate = asyncio.Event()
        self.gate.set()
        self.num_loads = 0
        self.num_tries = 0
        self.is_held = False  # a reader waits at the gate

    async def read_events(self, after: str, wait_s: float) -> Sequence[NumberedEvent]:
        await self._pass_gate()
        events = await super().read_events(after, min(wait_s, 0.1))
        await self._pass_gate()
        return events

    async def _pass_gate(self) -> None:
        self.is_held = not self.gate.is_set()
        await self.gate.wait()
        self.is_held = False

    async def position(self) -> Position:
        self.num_loads += 1
        return await super().position()

    async def has_event(self, event_id: str, number: int) -> bool:
        self.num_tries += 1
        return await super().has_event(event_id, number)


@pytest.fixture
async def registry(redis_client: Redis) -> GatedRegistry:
    return GatedRegistry(redis_client)


@pytest.fixture
async def view(registry: GatedRegistry) -> AsyncIterator[RegistryView]:
    view = RegistryView(registry)
    await view.start()
    await eventually(lambda: view.is_whole)
    yield view
    await view.stop()


async def register(registry: Registry, name: str = "x", digest: str = "a") -> AdapterVersion:
    adapter, *_ = await registry.names.register(
        "acme", name, digest=digest * 64, module_ranks={"q_proj": 8}, num_bytes=1000
    )
    return adapter


def kept(view: RegistryView, name: str) -> AdapterVersion | None:
    """What a view that keeps everything has under a name of acme's."""
    return view._names.find(("acme", name))[1]


async def test_starts_with_what_is_there_and_follows(registry: GatedRegistry) -> None:
    old = await register(registry, "old")
    await give_key(registry, "acme", "old key")
    view = RegistryView(registry)
    assert not view.connected
    await view.start()
    assert view.connected
    await eventually(lambda: view.is_whole)
    assert await view.resolve("acme", "old") == old
    assert await view.resolve("other", "old") is None
    assert owner_of(view, "old key") == "acme"

    new = await register(registry, "new")
    await give_key(registry, "zoo", "new key")
    await take_back_key(registry, "old key")
    await registry.names.delete("acme", "old")
    await eventually(lambda: kept(view, "old") is None)
    assert await view.list_adapters("acme") == [new]
    assert owner_of(view, "new key") == "zoo"
    assert owner_of(view, "old key") is None
    assert registry.num_loads == 1
    await view.stop()
    assert not view.connected
    assert await view.resolve("acme", "new") == new


async def test_own_changes_are_seen_at_once_and_not_undone_by_the_stream(
    registry: GatedRegistry, view: RegistryView
) -> None:
    outdated: list[str] = []
    view.on_outdated = outdated.append
    registry.gate.clear()
    first = await register(registry, digest="a")
    view.apply(AdapterSet(first))
    second = await register(registry, digest="b")
    view.apply(AdapterSet(second))
    view.apply(AdapterSet(first))  # late
    assert await view.resolve("acme", "x") == second
    deleted = await registry.names.delete("acme", "x")
    assert deleted is not None
    view.apply(deleted)
    view.apply(AdapterSet(second))  # late
    assert await view.resolve("acme", "x") is None
    third = await register(registry, digest="a")
    view.apply(AdapterSet(third))
    view.apply(deleted)  # late
    assert await view.resolve("acme", "x") == third
    assert outdated == ["a" * 64, "b" * 64]
    view.apply(KeySet(hash_key("k"), "acme"))
    assert owner_of(view, "k") == "acme"

    seen = []
    registry.gate.set()
    await register(registry, "last")
    while kept(view, "last") is None:
        seen.append(kept(view, "x"))
        await asyncio.sleep(0)
    assert all(adapter == third for adapter in seen)
    assert await view.resolve("acme", "x") == third
    assert outdated == ["a" * 64, "b" * 64], "an event that comes again outdates nothing"


async def test_changes_made_while_it_loads_are_kept(registry: GatedRegistry) -> None:
    """Whether they come before the page that holds them is read, or after it, and whichever router made them."""
    for name in ("replaced", "deleted"):
        await register(registry, name)
    await give_key(registry, "acme", "old key")
    made: dict[str, AdapterVersion] = {}

    class SlowRegistry(GatedRegistry):
        async def scan_adapters(self) -> AsyncIterator[Sequence[AdapterVersion]]:
            made["early"] = await register(registry, "early")
            async for page in super().scan_adapters():
                yield page
            made["late"] = await register(registry, "late")
            made["replaced"] = await register(registry, "replaced", "b")
            await registry.names.delete("acme", "deleted")
            made["own"] = await register(registry, "own")
            slow_view.apply(AdapterSet(made["own"]))

        async def scan_keys(self) -> AsyncIterator[Sequence[tuple[str, str]]]:
            async for page in super().scan_keys():
                yield page
            await take_back_key(registry, "old key")
            await give_key(registry, "acme", "new key")

    slow = SlowRegistry(registry._client)
    slow_view = RegistryView(slow)
    await slow_view.start()
    await eventually(lambda: slow_view.is_whole)
    for name, adapter in made.items():
        assert await slow_view.resolve("acme", name) == adapter
    assert await slow_view.resolve("acme", "deleted") is None
    assert owner_of(slow_view, "old key") is None
    assert owner_of(slow_view, "new key") == "acme"
    slow_view.check_integrity()
    await slow_view.stop()


async def test_events_trimmed_before_they_were_read_are_not_missed(
    registry: GatedRegistry, view: RegistryView, redis_client: Redis
) -> None:
    registry.gate.clear()
    await eventually(lambda: registry.is_held)  # the read that was under way is over
    adapters = [await register(registry, name) for name in "abc"]
    await give_key(registry, "acme", "k")
    await redis_client.xtrim(PREFIX + "events", maxlen=1, approximate=False)
    registry.gate.set()
    await eventually(lambda: owner_of(view, "k") == "acme")
    assert await view.list_adapters("acme") == adapters
    assert registry.num_loads == 2
    assert view.connected


async def test_a_registry_that_lost_everything_is_loaded_anew(
    registry: GatedRegistry, view: RegistryView, redis_client: Redis
) -> None:
    await register(registry, "old")
    await give_key(registry, "acme", "k")
    await eventually(lambda: owner_of(view, "k") == "acme")
    await redis_client.flushall()
    await register(registry, "new")
    await eventually(lambda: kept(view, "new") is not None)
    assert await view.resolve("acme", "old") is None
    assert owner_of(view, "k") is None


async def test_events_with_ids_below_the_last_known_one_are_not_missed(
    registry: GatedRegistry, view: RegistryView, redis_client: Redis
) -> None:
    """As of a server that has lost everything and whose clock is behind, or has not ticked since."""
    digest = b"\xab" * 32
    event: dict[Any, Any] = {"number": 1, "kind": "key", "field": digest.hex(), "value": "acme"}
    await redis_client.xadd(PREFIX + "events", event, "9" * 15)
    await redis_client.set(PREFIX + "event_number", 1)
    await eventually(lambda: view.keys.key(digest) is not None)
    await redis_client.flushall()
    await register(registry, "new")
    await give_key(registry, "acme", "k")
    await eventually(lambda: kept(view, "new") is not None and owner_of(view, "k") == "acme")
    assert view.keys.key(digest) is None


@pytest.mark.parametrize("capacity", [2, 1000])
async def test_a_random_history_ends_in_the_same_state_and_versions_never_go_back(
    registry: GatedRegistry, redis_client: Redis, capacity: int
) -> None:
    chooser = random.Random(7)
    names = "vwxyz"
    latest: dict[str, int] = {}
    view = RegistryView(registry, capacity)
    await view.start()
    for step in range(400):
        name = chooser.choice(names)
        match chooser.randrange(10):
            case 0:
                deleted = await registry.names.delete("acme", name)
                if deleted is not None and chooser.random() < 0.5:
                    view.apply(deleted)
            case 1:
                await redis_client.xtrim(PREFIX + "events", maxlen=chooser.randrange(3), approximate=False)
            case 2:
                await asyncio.sleep(0.002)
            case 3 | 4:
                known = await view.resolve("acme", name)
                if known is not None:
                    assert known.version >= latest.get(name, 0), step
                    latest[name] = known.version
            case _:
                adapter = await register(registry, name, chooser.choice("abcdef"))
                if chooser.random() < 0.5:
                    view.apply(AdapterSet(adapter))
        view.check_integrity()
        assert view.num_kept <= capacity
    await give_key(registry, "acme", "the end")
    await eventually(lambda: owner_of(view, "the end") == "acme")
    for name in names:
        assert await view.resolve("acme", name) == await registry.get("acme", name)
    assert await view.list_adapters("acme") == await registry.list_adapters("acme")
    await view.stop()


async def test_an_outage_is_served_from_memory_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = RedisServer(tmp_path / "redis")
    client = connect(server.start(), PATIENCE_S)
    registry = GatedRegistry(client)
    adapter = await register(registry)
    view = RegistryView(registry)
    await view.start()
    await eventually(lambda: view.is_whole)
    caplog.set_level(logging.INFO, logger="motet.adapters.registry.registry_view")

    await asyncio.to_thread(server.stop)
    await eventually(lambda: not view.connected)
    assert await view.resolve("acme", "x") == adapter
    await eventually(lambda: registry.num_tries > 3)  # several tries
    server = RedisServer(tmp_path / "redis")
    client_of_another_router = connect(await asyncio.to_thread(server.start), PATIENCE_S)
    newer = await register(Registry(client_of_another_router), digest="b")
    await eventually(lambda: kept(view, "x") == newer)
    assert view.connected
    levels = [record.levelno for record in caplog.records if record.name == "motet.adapters.registry.registry_view"]
    assert levels == [logging.WARNING, logging.INFO]

    await view.stop()
    await client.aclose()
    await client_of_another_router.aclose()
    await asyncio.to_thread(server.stop)


async def test_the_first_load_needs_the_registry() -> None:
    view = RegistryView(Registry(connect("redis://127.0.0.1:1")))
    with pytest.raises(RegistryUnavailable):
        await view.start()
    await view.stop()


async def test_an_event_from_the_future_does_not_end_the_view(
    registry: GatedRegistry, view: RegistryView, redis_client: Redis
) -> None:
    fields: dict[Any, Any] = {"number": 1, "kind": "unknown", "field": "f", "value": "v"}
    await redis_client.incr(PREFIX + "event_number")
    await redis_client.xadd(PREFIX + "events", fields)
    await eventually(lambda: not view.connected or registry.num_loads > 1)
    adapter = await register(registry)
    await eventually(lambda: kept(view, "x") == adapter)


async def test_routers_share_the_key_of_event_ids(
    registry: GatedRegistry, view: RegistryView, redis_client: Redis
) -> None:
    await give_key(registry, "acme", "older")
    await eventually(lambda: owner_of(view, "older") == "acme")
    other = RegistryView(Registry(redis_client))
    await other.start()
    shared = view.stream_keys[0]
    assert other.stream_keys[0] == shared
    assert len(shared) == 32
    await other.stop()
    await redis_client.flushdb()  # Redis lost its data: a router that had the key gives it back
    await give_key(registry, "acme", "key")
    await eventually(lambda: owner_of(view, "key") == "acme")
    late = RegistryView(Registry(redis_client))
    await late.start()
    assert late.stream_keys[0] == shared
    await late.stop()


async def test_a_router_knows_the_key_of_before_as_well(
    registry: GatedRegistry, view: RegistryView, redis_client: Redis
) -> None:
    before = view.stream_keys[0]
    await give_key(registry, "acme", "older")
    await eventually(lambda: owner_of(view, "older") == "acme")
    await redis_client.flushdb()
    await registry.share_stream_key(b"x" * 32)  # another router was quicker
    await give_key(registry, "acme", "key")
    await eventually(lambda: view.stream_keys == (b"x" * 32, before))


def owner_of(view: RegistryView, key: str) -> str | None:
    """The tenant that the view knows the key of."""
    record = view.key(key)
    return None if record is None else record.tenant


@pytest.fixture
async def two_views(
    registry: GatedRegistry, view: RegistryView, redis_client: Redis
) -> AsyncIterator[tuple[RegistryView, RegistryView]]:
    """Those of two routers; the second one's events have no gate."""
    other = RegistryView(Registry(redis_client))
    for one in (view, other):
        one.num_routers = lambda: 2
    await other.start()
    yield view, other
    await other.stop()


async def test_a_change_is_spread_once_every_router_has_it(
    registry: GatedRegistry, two_views: tuple[RegistryView, RegistryView], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry_view, "_SPREAD_S", PATIENCE_S)
    late, prompt = two_views
    for version in range(1, 4):
        registry.gate.clear()
        await register(registry, digest="abc"[version - 1])
        spreading = asyncio.create_task(prompt.spread())
        number = await registry.num_events()
        while await registry.num_routers_at(number) < 1:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert not spreading.done()
        registry.gate.set()
        await spreading
        held = kept(late, "x")
        assert held is not None and held.version == version


async def test_a_router_that_hangs_keeps_no_change_from_being_answered(
    registry: GatedRegistry, two_views: tuple[RegistryView, RegistryView], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry_view, "_SPREAD_S", 0.05)
    registry.gate.clear()
    await register(registry)
    await two_views[1].spread()
    assert kept(two_views[0], "x") is None
    registry.gate.set()


async def test_a_lost_cancellation_keeps_no_change_from_being_answered(
    registry: GatedRegistry, two_views: tuple[RegistryView, RegistryView], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry_view, "_SPREAD_S", 0.05)
    tries = iter([True, False])

    async def num_routers_at(event_number: int) -> int:
        assert next(tries), "it looks again after its time"
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(PATIENCE_S)
        return 0

    monkeypatch.setattr(two_views[1]._registry, "num_routers_at", num_routers_at)
    await two_views[1].spread()


async def test_a_change_is_spread_at_once_where_there_is_one_router(registry: GatedRegistry) -> None:
    view = RegistryView(registry)  # it does not even follow
    await register(registry)
    await view.spread()


async def test_a_router_that_loads_again_says_where_it_is(
    registry: GatedRegistry, two_views: tuple[RegistryView, RegistryView], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry_view, "_SPREAD_S", PATIENCE_S)
    late, prompt = two_views
    late._event_number -= 1  # as if it had missed an event
    await register(registry)
    await prompt.spread()
    assert registry.num_loads == 2
    assert kept(late, "x") is not None
