"""Replicas that start while Redis, the model or a volume is away, or that cannot start: they wait, and report why."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from motet.adapters.errors import RegistryUnavailable
from motet.adapters.registry.launches import KEPT_S, Kind, StartReport, Starts
from motet.adapters.registry.registry import connect
from motet.adapters.registry.registry_view import RegistryView
from motet.cluster.application.model_source import ModelUnavailable
from motet.cluster.config import MotetConfig, part_config
from motet.cluster.edge.serve_variables import LASTING_STARTS
from motet.cluster.exposition.node_page import ExpositionConfig
from motet.cluster.launch.local_serve import free_ports
from motet.cluster.launch.redis_server import RedisServer
from motet.cluster.launch_secrets import LaunchSecrets
from motet.cluster.replicas import gang, ingress
from motet.cluster.replicas.gang import GangReplica
from motet.cluster.replicas.ingress import RouterReplica
from motet.cluster.replicas.launch_keeper import LaunchKeeper
from motet.cluster.replicas.replica_start import MAX_FAILED_STARTS, ReplicaStart, RunningParts, StartPage
from motet.cluster.settings.setting_field import ConfigError
from motet.tests.rigs.part_configs import DEFAULTS
from motet.tests.rigs.patience import PATIENCE_S
from motet.tests.rigs.ray_nodes import DEMO

SECRETS = LaunchSecrets(redis_url="redis://127.0.0.1:1")


class Enough(Exception):  # noqa: N818
    """The start has come as far as the test looks."""


class HalfGang(GangReplica):
    def __del__(self) -> None:  # type: ignore[override]
        """Serve's hook is not awaited."""


class HalfRouter(RouterReplica):
    def __del__(self) -> None:  # type: ignore[override]
        """Serve's hook is not awaited."""


class Requested:
    """A call to Redis that fails the first times."""

    def __init__(self, num_failures: int = 1) -> None:
        self.num_failures, self.num_calls = num_failures, 0

    async def __call__(self, *given: object) -> str:
        self.num_calls += 1
        if self.num_calls <= self.num_failures:
            raise RegistryUnavailable("the registry cannot be reached (refused)")
        return "the answer"


def enough(*given: object, **more: object) -> None:
    raise Enough


@pytest.fixture
def config(tmp_path: Path) -> MotetConfig:
    return MotetConfig.of(model_path=DEMO / "base", data_dir=tmp_path, max_gangs=1)


@pytest.fixture
def without_serve(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Lets a replica of this module believe that Serve has started it."""

    def stand_in(module: Any) -> None:
        context = SimpleNamespace(replica_id=SimpleNamespace(unique_id="r"), deployment="d")
        monkeypatch.setattr(module.serve, "get_replica_context", lambda: context)
        monkeypatch.setattr(module, "configure_replica_logging", lambda *given, **facts: None)
        monkeypatch.setattr(module.ray.util, "get_node_ip_address", lambda: "127.0.0.1")

    return stand_in


class Sleeps:
    """Pauses that end at once."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)


def a_start(sleep: Sleeps, kind: Kind = "gang", replica: str = "r1", **more: Any) -> ReplicaStart:
    return ReplicaStart(kind, replica, "cluster-1", sleep=sleep, **more)


async def build(start: ReplicaStart, redis_url: str) -> None:
    async with start:
        start.secrets = LaunchSecrets(redis_url=redis_url)
        raise MemoryError("the GPU is full")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    server = RedisServer(tmp_path / "redis")
    yield server.start()
    server.stop()


async def reported_in(url: str, clock: Callable[[], float] = time.time) -> Sequence[StartReport]:
    client = connect(url)
    try:
        return await Starts(client, "cluster-1", clock=clock).reports()
    finally:
        await client.aclose()


async def test_what_is_away_is_waited_for_with_growing_pauses_and_reported_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sleep, requested, events = Sleeps(), Requested(num_failures=600), list[tuple[str, int]]()
    with caplog.at_level(logging.WARNING):
        start = a_start(sleep, on_event=lambda what, done, total: events.append((what, done)))
        assert await start.until("Redis", requested) == "the answer"
    assert requested.num_calls == 601
    assert sleep.seconds[:8] == [1, 2, 4, 8, 16, 32, 60, 60] and set(sleep.seconds[6:]) == {60}
    assert caplog.messages == ["this gang waits for Redis: the registry cannot be reached (refused)"]
    assert events == [("waiting for Redis", 0), ("waiting for Redis", 1)]


async def test_a_report_of_another_version_hides_no_other(server: str) -> None:
    client = connect(server)
    await client.hset("motet:{registry}:starts:cluster-1", "r0", '{"kind": "hub"}')
    await client.aclose()
    with pytest.raises(MemoryError):
        await build(a_start(Sleeps()), server)
    assert [report.replica for report in await reported_in(server)] == ["r1"]


async def test_what_is_not_away_is_raised_at_once() -> None:
    sleep = Sleeps()

    async def ask() -> None:
        raise ValueError("this will never do")

    with pytest.raises(ValueError, match="never do"):
        await a_start(sleep).until("the model", ask)
    assert sleep.seconds == []


async def test_a_waiting_start_reports_what_it_waits_for(server: str, tmp_path: Path) -> None:
    seen = list[Sequence[StartReport]]()
    folder = tmp_path / "model"

    async def look(seconds: float) -> None:
        seen.append(await reported_in(server))
        if len(seen) == 2:
            folder.mkdir()

    async def ask() -> str:
        if not folder.is_dir():
            raise ModelUnavailable(f"{folder} lacks config.json")
        return "there"

    start = ReplicaStart("gang", "r1", "cluster-1", sleep=look)
    start.secrets = LaunchSecrets(redis_url=server)
    assert await start.until("the model", ask) == "there"
    assert len(seen) == 2
    for reports in seen:
        (report,) = reports
        assert (report.kind, report.replica, report.has_failed) == ("gang", "r1", False)
        assert report.reason == f"it waits for the model: {folder} lacks config.json"
    await start.succeeded()
    assert await reported_in(server) == []


async def page_at(port: int) -> str:
    """Of the node, with the operators' key; empty: there is none."""
    try:
        async with httpx.AsyncClient(trust_env=False, timeout=PATIENCE_S) as client:
            headers = {"Authorization": "Bearer secret"}
            return (await client.get(f"http://127.0.0.1:{port}/metrics", headers=headers)).raise_for_status().text
    except httpx.TransportError:
        return ""


async def test_a_node_shows_a_start_that_waits_and_one_that_has_failed_without_redis_or_router() -> None:
    (port,), pages = free_ports(1), list[str]()
    config = part_config(ExpositionConfig, DEFAULTS, name="llama", metrics_port=port, metrics_access="operators")

    async def look(seconds: float) -> None:
        pages.append(await page_at(port))

    start = ReplicaStart("router", "r1", "cluster-1", sleep=look, page=StartPage(config, "router", "r1", "127.0.0.1"))
    start.secrets = LaunchSecrets(redis_url="redis://127.0.0.1:1", operator_key="secret")
    assert await start.until("Redis", Requested(num_failures=2)) == "the answer"
    labels = 'base="llama",kind="router",start="r1"'
    assert len(pages) == 2
    for page in pages:
        assert f"motet_waiting_starts{{{labels}}} 1.0" in page and f"motet_failed_starts{{{labels}}} 0.0" in page
        assert 'motet_process_up{process="router"' not in page  # which would keep MotetNoRouter silent
    assert await page_at(port) == ""
    await start.failed(MemoryError("the GPU is full"))
    assert f"motet_waiting_starts{{{labels}}} 0.0" in pages[-1] and f"motet_failed_starts{{{labels}}} 1.0" in pages[-1]
    assert await page_at(port) == ""


async def test_failed_starts_pause_longer_and_longer_until_one_succeeds(server: str) -> None:
    sleep = Sleeps()
    for number in range(8):
        start = a_start(sleep, replica=f"r{number}")
        with pytest.raises(MemoryError):
            await build(start, server)
    assert sleep.seconds == [1, 2, 4, 8, 16, 32, 60, 60]
    router = a_start(sleep, "router", "r9")
    router.secrets = LaunchSecrets(redis_url=server)
    await router.failed(OSError("it has a count of its own"))
    assert sleep.seconds[-1] == 1
    assert [one.reason for one in await reported_in(server)].count("the GPU is full") == 8
    last = a_start(sleep, replica="r8")
    last.secrets = LaunchSecrets(redis_url=server)
    await last.succeeded()
    assert [one.kind for one in await reported_in(server)] == ["router"]
    assert await reported_in(server, lambda: time.time() + KEPT_S) == []
    assert await reported_in(server) == []  # what is too old was deleted


@pytest.mark.parametrize("url", ["redis://127.0.0.1:1", "127.0.0.1:6379", ""])  # two are no URLs
async def test_a_failure_is_raised_after_a_pause_where_it_cannot_be_reported(url: str) -> None:
    sleep = Sleeps()
    with pytest.raises(MemoryError):
        await build(a_start(sleep), url)
    assert sleep.seconds == [1]


async def test_a_success_is_one_where_it_cannot_be_reported() -> None:
    start = a_start(Sleeps())
    start.secrets = LaunchSecrets(redis_url="redis://127.0.0.1:1")
    await start.succeeded()


def test_serve_repeats_failed_starts_as_often_as_the_application_says() -> None:
    assert int(LASTING_STARTS["RAY_SERVE_MAX_PER_REPLICA_RETRY_COUNT"]) == MAX_FAILED_STARTS


async def test_a_gang_whose_settings_are_wrong_pauses_before_the_next_one(
    config: MotetConfig, without_serve: Callable[[Any], None]
) -> None:
    replica = HalfGang.__new__(HalfGang)
    sleep = Sleeps()
    replica._is_up, replica._start = False, a_start(sleep)
    with pytest.raises(ConfigError):
        await replica.reconfigure({"no-such-setting": 1})
    assert sleep.seconds == [1]
    replica._is_up = True
    await replica.reconfigure({"no-such-setting": 1})
    assert sleep.seconds == [1]


async def test_a_gang_waits_for_redis_before_it_builds_its_engine(
    config: MotetConfig, monkeypatch: pytest.MonkeyPatch, without_serve: Callable[[Any], None]
) -> None:
    without_serve(gang)
    sleep, token = Sleeps(), Requested(num_failures=3)
    monkeypatch.setattr(gang, "ReplicaStart", partial(ReplicaStart, sleep=sleep))
    monkeypatch.setattr(gang, "id_of_this_cluster", lambda: "cluster-1")
    monkeypatch.setattr(gang, "shared_token", token)
    monkeypatch.setattr(gang, "read_secrets", lambda path: SECRETS)
    monkeypatch.setattr(gang, "_build_engine", enough)
    replica = HalfGang.__new__(HalfGang)
    with pytest.raises(Enough):
        await replica.__init__(config.engine, config.leader, config.logs, config.exposition, None, None)  # type: ignore[misc]
    assert token.num_calls == 4
    assert sleep.seconds == [1, 2, 4, 1]  # the last before Serve begins the next start


async def test_a_router_waits_for_redis_with_all_of_its_reads(
    config: MotetConfig, monkeypatch: pytest.MonkeyPatch, without_serve: Callable[[Any], None]
) -> None:
    without_serve(ingress)
    requested = {name: Requested() for name in ("register_router", "shared_token", "keeper", "view")}
    for name in ("register_router", "shared_token"):
        monkeypatch.setattr(ingress, name, requested[name])
    monkeypatch.setattr(LaunchKeeper, "start", requested["keeper"])
    monkeypatch.setattr(RegistryView, "start", requested["view"])
    monkeypatch.setattr(ingress, "id_of_this_cluster", lambda: "cluster-1")
    monkeypatch.setattr(ingress, "import_transformers_without_torch", lambda: None)
    monkeypatch.setattr(ingress, "TextService", SimpleNamespace(from_folder=enough))
    monkeypatch.setattr(ingress, "AdapterStore", lambda path: None)
    monkeypatch.setattr(ingress, "UploadService", lambda *given, **more: None)
    replica = HalfRouter.__new__(HalfRouter)
    replica._replica_start = a_start(Sleeps(), "router")
    with pytest.raises(Enough):
        await replica._start(RunningParts(), config, SECRETS, None, None)
    assert {name: one.num_calls for name, one in requested.items()} == dict.fromkeys(requested, 2)
