"""What a replica has started is stopped in the reverse order, also when its start fails half-way."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from redis.asyncio import Redis

from motet.adapters.registry.administration.key_registry import EndedKeys
from motet.adapters.registry.registry_view import RegistryView
from motet.cluster.config import MotetConfig
from motet.cluster.exposition.node_page import ProcessPage
from motet.cluster.launch_secrets import LaunchSecrets
from motet.cluster.replicas import ingress
from motet.cluster.replicas.ingress import RouterReplica
from motet.cluster.replicas.launch_keeper import LaunchKeeper
from motet.cluster.replicas.replica_start import RunningParts
from motet.router.fleet.dispatch import FleetDispatcher
from motet.router.fleet.pin_keeper import PinKeeper
from motet.router.loop_watchdog import LoopWatchdog
from motet.router.tenancy.quotas import Quotas
from motet.router.text.text import TextService
from motet.router.usage.usage import UsageService
from motet.router.versions.canary_book import CanaryBook, CanaryJudge
from motet.tests.rigs.patience import eventually_in_loop
from motet.tests.rigs.ray_nodes import DEMO


class Recorded:
    """A part that notes its start and its stop. `failing`: "start" or "stop"."""

    def __init__(self, name: str, events: list[str], failing: str = "") -> None:
        self._name, self._events, self._failing = name, events, failing

    def start(self) -> None:
        self._note("start")

    def stop(self) -> None:
        self._note("stop")

    def _note(self, what: str) -> None:
        if what == self._failing:
            raise OSError(f"{self._name} cannot {what}")
        self._events.append(f"{what} {self._name}")


class RecordedCoroutines(Recorded):
    async def start(self) -> None:  # type: ignore[override]
        await asyncio.sleep(0)
        self._note("start")

    async def stop(self) -> None:  # type: ignore[override]
        await asyncio.sleep(0)
        self._note("stop")


async def test_parts_are_stopped_in_the_reverse_order() -> None:
    events: list[str] = []
    async with RunningParts() as starting:
        part = Recorded("one", events)
        assert await starting.start(part) is part
        await starting.start(RecordedCoroutines("two", events))
        parts = starting.pop_all()
    assert events == ["start one", "start two"]
    await parts.aclose()
    assert events[2:] == ["stop two", "stop one"]


async def test_a_start_that_fails_stops_what_was_started_before() -> None:
    events: list[str] = []

    async def start_three() -> None:
        async with RunningParts() as parts:
            await parts.start(Recorded("one", events))
            await parts.start(RecordedCoroutines("two", events))
            await parts.start(Recorded("three", events, failing="start"))

    with pytest.raises(OSError, match="three cannot start"):
        await start_three()
    assert events == ["start one", "start two", "stop two", "stop one"]


async def test_a_stop_that_fails_keeps_no_other_part_running() -> None:
    events: list[str] = []
    parts = RunningParts()
    await parts.start(Recorded("one", events))
    await parts.start(RecordedCoroutines("two", events, failing="stop"))
    with pytest.raises(OSError, match="two cannot stop"):
        await parts.aclose()
    assert events == ["start one", "start two", "stop one"]


class Directory(Recorded):
    def __init__(self, events: list[str], app: str, deployment: str, on_change: object) -> None:
        super().__init__(f"directory of {deployment}", events)


class Router(RouterReplica):
    def __del__(self) -> None:  # type: ignore[override]
        """Serve would await the hook; the test calls it by itself."""


# As they are started; text and the dispatcher run from when they are made, and end by `close`.
PARTS = (
    LaunchKeeper,
    RegistryView,
    TextService,
    UsageService,
    Quotas,
    CanaryBook,
    CanaryJudge,
    EndedKeys,
    FleetDispatcher,
)
LATE_PARTS = (PinKeeper, ProcessPage, LoopWatchdog)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch, redis_client: Redis, redis_url: str) -> list[str]:
    """What a router starts and stops, by the names of the classes, without Ray and Serve."""
    noted: list[str] = []

    def note(kind: type, method: str, what: str) -> None:
        original = getattr(kind, method)

        def noting(self: Any, *given: Any, **more: Any) -> Any:
            noted.append(f"{what} {kind.__name__}")
            return original(self, *given, **more)

        monkeypatch.setattr(kind, method, noting)

    for kind in (*PARTS, *LATE_PARTS):
        is_made = kind in (TextService, FleetDispatcher)
        note(kind, "__init__" if is_made else "start", "start")
        note(kind, "close" if is_made else "stop", "stop")
    # Else what asks Ray first starts one in this process, which may already have another gRPC.
    monkeypatch.setattr("ray._private.auto_init_hook.enable_auto_connect", False)
    context = SimpleNamespace(replica_id=SimpleNamespace(unique_id="r"), deployment="router")
    monkeypatch.setattr("ray.serve.get_replica_context", lambda: context)
    log = SimpleNamespace(num_dropped=0, close=lambda: noted.append("close the log"))
    monkeypatch.setattr(ingress, "configure_replica_logging", lambda *given, **facts: log)
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr(ingress, "read_secrets", lambda path: LaunchSecrets(redis_url=redis_url, operator_key="key"))
    monkeypatch.setattr(ingress, "id_of_this_cluster", lambda: "cluster-1")
    monkeypatch.setattr(ingress, "keep_pauses_short", lambda: None)
    monkeypatch.setattr(ingress, "ReplicaDirectory", lambda *given: Directory(noted, *given))
    return noted


async def start_router(tmp_path: Path) -> Router:
    config = MotetConfig.of(model_path=DEMO / "base", data_dir=tmp_path, metrics_port=0)
    gang = SimpleNamespace(app_name="motet", deployment_name="gang")
    router = Router.__new__(Router)
    await router.__init__(config, None, gang, None)  # type: ignore[misc]
    return router


def names(events: list[str], what: str) -> list[str]:
    return [event.removeprefix(f"{what} ") for event in events if event.startswith(f"{what} ")]


async def test_a_router_stops_its_parts_in_the_reverse_order(events: list[str], tmp_path: Path) -> None:
    router = await start_router(tmp_path)
    started = names(events, "start")
    assert {kind.__name__ for kind in (*PARTS, *LATE_PARTS)} <= set(started)
    assert names(events, "stop") == []
    await RouterReplica.__del__(router)
    assert names(events, "stop") == started[::-1]
    assert events[-1] == "close the log"
    await no_tasks_are_left()


async def test_a_router_whose_start_fails_stops_what_it_had_started(
    events: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(**given: object) -> None:
        raise RuntimeError("no application")

    monkeypatch.setattr(ingress, "create_app", fail)
    with pytest.raises(RuntimeError, match="no application"):
        await start_router(tmp_path)
    started = names(events, "start")
    assert started[-2:] == ["ProcessPage"] * 2  # the router's, and that of its failed start, which shows it for longer
    assert names(events, "stop") == [*started[-2::-1], "ProcessPage"]
    await no_tasks_are_left()


async def no_tasks_are_left() -> None:
    await eventually_in_loop(lambda: len(asyncio.all_tasks()) == 1)


async def test_work_of_a_replica_ends_before_what_it_needs_though_a_cancellation_is_lost() -> None:
    order = []

    async def work() -> None:
        with suppress(asyncio.CancelledError):  # as `asyncio.wait_for` does, which redis-py uses as it connects
            await asyncio.Event().wait()
        try:
            await asyncio.Event().wait()
        finally:
            order.append("work")

    async with RunningParts() as parts:
        parts.callback(order.append, "redis")
        parts.run(work())
        await asyncio.sleep(0)
    assert order == ["work", "redis"]
