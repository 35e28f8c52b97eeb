"""A view of a registry that has more adapters than it may keep."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from redis.asyncio import Redis

from motet.adapters.adapter import AdapterVersion
from motet.adapters.errors import RegistryUnavailable
from motet.adapters.registry import registry_view
from motet.adapters.registry.events import AdapterSet
from motet.adapters.registry.kept_adapters import MAX_LOOKS, MAX_USES, KeptAdapters, Name
from motet.adapters.registry.registry import Registry, connect
from motet.adapters.registry.registry_view import RegistryView
from motet.cluster.launch.redis_server import RedisServer
from motet.tests.rigs.given_keys import give_key
from motet.tests.rigs.patience import PATIENCE_S
from motet.tests.rigs.patience import eventually_in_loop as eventually

CAPACITY = 4
NUM_ADAPTERS = 50


class CountingRegistry(Registry):
    """Counts what is read of adapters, and answers lookups when `gate` is open."""

    def __init__(self, client: Redis) -> None:
        super().__init__(client)
        self.num_scans = 0
        self.looked_up: list[Sequence[Name]] = []
        self.held: Name | None = None  # only answers with this name wait for the gate
        self.gate = asyncio.Event()
        self.gate.set()

    async def scan_adapters(self) -> AsyncIterator[Sequence[AdapterVersion]]:
        self.num_scans += 1
        async for page in super().scan_adapters():
            yield page

    async def get_many(self, names: Sequence[Name]) -> Sequence[AdapterVersion | None]:
        self.looked_up.append(names)
        found = await super().get_many(names)  # as Redis says now; the answer may take long
        if self.held is None or self.held in names:
            await self.gate.wait()
        return found


async def register(registry: Registry, name: str, digest: str = "a") -> AdapterVersion:
    adapter, *_ = await registry.names.register(
        "acme", name, digest=digest * 64, module_ranks={"q_proj": 8}, num_bytes=1000
    )
    return adapter


@pytest.fixture
async def registry(redis_client: Redis) -> CountingRegistry:
    registry = CountingRegistry(redis_client)
    for i in range(NUM_ADAPTERS):
        await register(registry, f"n{i}")
    return registry


@pytest.fixture
async def view(registry: CountingRegistry) -> AsyncIterator[RegistryView]:
    view = RegistryView(registry, CAPACITY)
    await view.start()
    yield view
    view.check_integrity()
    await view.stop()


async def caught_up(view: RegistryView, registry: Registry) -> None:
    """Returns once the view has applied all events so far."""
    await give_key(registry, "acme", f"key {await registry.num_events()}")
    number = await registry.num_events()
    await eventually(lambda: view._event_number >= number)


async def test_it_starts_without_reading_adapters_and_looks_up_what_is_requested(
    registry: CountingRegistry, view: RegistryView
) -> None:
    await caught_up(view, registry)
    assert (registry.num_scans, registry.looked_up, view.num_kept, view.is_whole) == (0, [], 0, False)
    for _ in range(3):
        assert await view.resolve("acme", "n7") == await registry.get("acme", "n7")
        assert await view.resolve("acme", "none") is None
        assert await view.resolve("other", "n7") is None
    assert registry.looked_up == [[("acme", "n7")], [("acme", "none")], [("other", "n7")]]
    for i in range(NUM_ADAPTERS):
        assert (await view.resolve("acme", f"n{i}")) is not None
    assert view.num_kept == CAPACITY


async def test_lookups_of_one_moment_share_a_command_and_those_of_one_name_an_answer(
    registry: CountingRegistry, view: RegistryView
) -> None:
    registry.gate.clear()
    requested = [asyncio.create_task(view.resolve("acme", "n0")) for _ in range(5)]
    await eventually(lambda: len(registry.looked_up) == 1)
    requested += [asyncio.create_task(view.resolve("acme", f"n{i % 20}")) for i in range(60)]
    requested[3].cancel()  # other waiting requests are not affected
    await asyncio.sleep(0)
    registry.gate.set()
    found = await asyncio.gather(*requested, return_exceptions=True)
    assert isinstance(found[3], asyncio.CancelledError)
    names = [adapter.name for adapter in found if isinstance(adapter, AdapterVersion)]
    assert names == ["n0"] * 4 + [f"n{i % 20}" for i in range(60)]
    assert [len(batch) for batch in registry.looked_up] == [1, 19]


async def test_what_is_kept_follows_the_events(registry: CountingRegistry, view: RegistryView) -> None:
    for name in ("n1", "n2", "new"):
        await view.resolve("acme", name)
    newer = await register(registry, "n1", "b")
    await registry.names.delete("acme", "n2")
    new = await register(registry, "new")
    await register(registry, "n3", "b")  # it was never requested
    await caught_up(view, registry)
    num_lookups = len(registry.looked_up)
    assert await view.resolve("acme", "n1") == newer
    assert await view.resolve("acme", "n2") is None
    assert await view.resolve("acme", "new") == new
    assert len(registry.looked_up) == num_lookups
    assert view.num_kept == 2


@pytest.mark.parametrize("by_stream", [True, False])
async def test_a_change_is_not_lost_to_a_lookup_that_read_before_it(
    registry: CountingRegistry, view: RegistryView, by_stream: bool
) -> None:
    registry.gate.clear()
    requested = [asyncio.create_task(view.resolve("acme", name)) for name in ("n1", "n2", "new")]
    await eventually(lambda: registry.looked_up)
    await asyncio.sleep(0.05)  # the command has read
    newer, new = await register(registry, "n1", "b"), await register(registry, "new")
    deleted = await registry.names.delete("acme", "n2")
    assert deleted is not None
    if by_stream:
        await caught_up(view, registry)
    else:
        view.apply(AdapterSet(newer))
        view.apply(AdapterSet(new))
        view.apply(deleted)
    registry.gate.set()
    found = await asyncio.gather(*requested)
    assert found == [newer, None, new]
    assert [await view.resolve("acme", name) for name in ("n1", "n2", "new")] == [newer, None, new]


async def test_missed_events_are_made_up_for_by_reading_what_is_kept_again(
    registry: CountingRegistry, view: RegistryView, redis_client: Redis
) -> None:
    for name in ("n1", "n2", "n3"):
        await view.resolve("acme", name)
    registry.held = ("acme", "n4")
    registry.gate.clear()
    late = asyncio.create_task(view.resolve("acme", "n4"))
    await eventually(lambda: len(registry.looked_up) == 4)
    await asyncio.sleep(0.05)  # the command has read
    async with redis_client.pipeline(transaction=True) as transaction:  # the view reads none of these events
        await transaction.hset(
            "motet:{registry}:adapters",
            "acme/n1",
            '9 bb {"module_ranks": {"q_proj": 1}, "num_bytes": 1, "created_at": 1.0}',
        )
        await transaction.hset(
            "motet:{registry}:adapters",
            "acme/n4",
            '9 bb {"module_ranks": {"q_proj": 1}, "num_bytes": 1, "created_at": 1.0}',
        )
        await transaction.hdel("motet:{registry}:adapters", "acme/n2")
        await transaction.incrby("motet:{registry}:event_number", 5)
        await transaction.execute()
    await register(registry, "n5", "b")
    await caught_up(view, registry)
    registry.gate.set()
    await asyncio.gather(late, return_exceptions=True)  # its client may have got a timeout
    await eventually(lambda: view._lookups._task is None)
    found = [await view.resolve("acme", name) for name in ("n1", "n2", "n3", "n4")]
    assert [adapter and adapter.version for adapter in found] == [9, None, 1, 9]
    assert registry.num_scans == 0


async def test_an_outage_serves_what_is_kept_and_says_so_of_the_rest(tmp_path: Path) -> None:
    server = RedisServer(tmp_path / "redis")
    client = connect(await asyncio.to_thread(server.start), PATIENCE_S)
    registry = CountingRegistry(client)
    for i in range(NUM_ADAPTERS):
        await register(registry, f"n{i}")
    await give_key(registry, "acme", "k")
    view = RegistryView(registry, CAPACITY)
    await view.start()
    kept = await view.resolve("acme", "n1")
    assert await view.resolve("acme", "none") is None
    await asyncio.to_thread(server.stop)
    for _ in range(2):  # the outage is noticed by the lookup, then by the view
        with pytest.raises(RegistryUnavailable, match="try again"):
            await view.resolve("acme", "n2")
        await eventually(lambda: not view.connected)
    with pytest.raises(RegistryUnavailable):
        await view.list_adapters("acme")
    assert await view.resolve("acme", "n1") == kept
    assert await view.resolve("acme", "none") is None
    record = view.key("k")
    assert record is not None and record.tenant == "acme" and view.key("no key") is None

    num_lookups = len(registry.looked_up)
    server = RedisServer(tmp_path / "redis")
    await asyncio.to_thread(server.start)
    other = connect(server.url)
    newer = await register(Registry(other), "n1", "b")
    await eventually(lambda: view.connected)
    await caught_up(view, Registry(other))
    assert await view.resolve("acme", "n1") == newer
    assert len(registry.looked_up) == num_lookups, "the events were there: nothing had to be read again"
    assert await view.resolve("acme", "n2") is not None
    await view.stop()
    await client.aclose()
    await other.aclose()
    await asyncio.to_thread(server.stop)


async def test_a_registry_that_says_nothing_is_given_up_soon(
    registry: CountingRegistry, view: RegistryView, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.gate.clear()
    monkeypatch.setattr(registry_view, "_LOOKUP_S", 1.0)
    with pytest.raises(RegistryUnavailable, match="no answer within 1 s"):
        await view.resolve("acme", "n1")
    monkeypatch.undo()
    registry.gate.set()
    assert await view.resolve("acme", "n1") is not None


async def test_a_registry_that_grows_past_the_bound_is_looked_up_from_then_on(redis_client: Redis) -> None:
    registry = CountingRegistry(redis_client)
    view = RegistryView(registry, CAPACITY)
    await view.start()
    await eventually(lambda: view.is_whole)
    for i in range(CAPACITY):
        await register(registry, f"n{i}")
    await caught_up(view, registry)
    assert view.is_whole and await view.resolve("acme", "n9") is None
    await register(registry, "n9")
    await caught_up(view, registry)
    assert not view.is_whole
    for i in (0, 1, 2, 3, 9):
        assert await view.resolve("acme", f"n{i}") is not None
    assert await view.resolve("acme", "none") is None
    await view.stop()


def version(number: int, name: str = "x") -> AdapterVersion:
    return AdapterVersion("acme", name, number, "a" * 64, {"q_proj": 8}, 1, 1.0)


def test_what_is_used_most_stays_while_others_are_requested_once() -> None:
    kept = KeptAdapters(100)
    used = [f"used{i}" for i in range(50)]
    for name in used:
        kept.keep(("acme", name), version(1, name))
    for i in range(5_000):
        kept.keep(("acme", f"once{i}"), version(1, f"once{i}"))
        assert kept.find(("acme", used[i % 50]))[0], i
        kept.check_integrity()


def test_room_is_made_in_a_bounded_time_however_much_all_are_used() -> None:
    kept = KeptAdapters(2 * MAX_LOOKS)
    for i in range(kept.capacity):
        kept.keep(("acme", str(i)), version(1, str(i)))
        for _ in range(MAX_USES + 3):
            kept.find(("acme", str(i)))
    kept.keep(("acme", "new"), version(1, "new"))
    assert len(kept) == kept.capacity
    assert sum(entry.uses for entry in kept._entries.values()) >= MAX_USES * (kept.capacity - 1) - MAX_LOOKS


def test_a_page_that_is_older_than_an_event_changes_nothing() -> None:
    kept = KeptAdapters(10, filling=True)
    kept.set(version(2, "set"))
    kept.delete(("acme", "deleted"), (0, 5))
    assert kept.find(("acme", "else")) == (False, None)
    assert kept.add_page([version(1, "set"), version(5, "deleted"), version(1, "else")])
    kept.end_filling()
    assert kept.whole
    assert kept.find(("acme", "set")) == (True, version(2, "set"))
    assert kept.find(("acme", "deleted")) == (True, None)
    assert kept.find(("acme", "unknown")) == (True, None)


def test_filling_ends_where_there_are_too_many() -> None:
    kept = KeptAdapters(3, filling=True)
    assert not kept.add_page([version(1, str(i)) for i in range(5)])
    kept.end_filling()
    assert not kept.whole and len(kept) == 3
    kept.check_integrity()


async def test_requests_are_served_while_it_fills_and_changes_meanwhile_are_kept(registry: CountingRegistry) -> None:
    pages = asyncio.Event()

    class SlowRegistry(CountingRegistry):
        async def scan_adapters(self) -> AsyncIterator[Sequence[AdapterVersion]]:
            async for page in super().scan_adapters():
                await pages.wait()
                yield page

    slow = SlowRegistry(registry._client)
    view = RegistryView(slow, 1000)
    await view.start()
    assert (await view.resolve("acme", "n1")) is not None
    assert await view.resolve("acme", "none") is None
    newer = await register(registry, "n2", "b")
    await registry.names.delete("acme", "n3")
    await caught_up(view, registry)
    assert not view.is_whole
    pages.set()
    await eventually(lambda: view.is_whole)
    assert view.num_kept == NUM_ADAPTERS - 1
    assert await view.resolve("acme", "n2") == newer
    assert await view.resolve("acme", "n3") is None
    assert slow.looked_up == [[("acme", "n1")], [("acme", "none")]]
    view.check_integrity()
    await view.stop()


def test_a_deletion_that_comes_late_does_not_hide_a_newer_version() -> None:
    kept = KeptAdapters(1)
    kept.keep(("acme", "x"), version(3))
    kept.delete(("acme", "x"), (0, 2))
    kept.keep(("acme", "y"), version(1, "y"))  # x goes
    assert kept.find(("acme", "x")) == (False, None)


def test_unknown_names_do_not_end_the_filling() -> None:
    """Else requests for many of them during the filling would make every later name be looked up."""
    kept = KeptAdapters(10, filling=True)
    kept.delete(("acme", "gone"), (0, 3))
    for number in range(100_000):
        kept.keep(("hostile", f"n{number}"), None)
    kept.check_integrity()
    assert kept.add_page([version(2, "gone"), version(1)]), "it fills no more"
    assert kept.find(("acme", "gone")) == (True, None)
    kept.end_filling()
    assert kept.whole
    assert kept.find(("hostile", "n1")) == (True, None)
    for number in range(100_000):
        kept.delete(("hostile", f"n{number}"), (0, 1))
    kept.check_integrity()
