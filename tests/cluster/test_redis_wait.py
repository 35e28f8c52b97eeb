"""Replicas that start while Redis does not answer, as when its pod is not up yet or its Sentinel fails over."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from motet.adapters.errors import RegistryUnavailable
from motet.adapters.registry.registry_view import RegistryView
from motet.cluster.application import redis_wait
from motet.cluster.application.redis_wait import when_redis_answers
from motet.cluster.config import MotetConfig
from motet.cluster.launch_secrets import LaunchSecrets
from motet.cluster.replicas import gang, ingress
from motet.cluster.replicas.gang import GangReplica
from motet.cluster.replicas.ingress import RouterReplica
from motet.cluster.replicas.launch_keeper import LaunchKeeper
from motet.cluster.replicas.running_parts import RunningParts
from motet.tests.rigs.ray_nodes import DEMO

SECRETS = LaunchSecrets(redis_url="redis://127.0.0.1:1")


class Enough(Exception):  # noqa: N818
    """The start has come as far as the test looks."""


class HalfGang(GangReplica):
    def __del__(self) -> None:  # type: ignore[override]
        """Nobody awaits Serve's hook."""


class HalfRouter(RouterReplica):
    def __del__(self) -> None:  # type: ignore[override]
        """Nobody awaits Serve's hook."""


class Asked:
    """What asks Redis, in vain for the first times."""

    def __init__(self, num_failures: int = 1) -> None:
        self.num_failures, self.num_calls = num_failures, 0

    async def __call__(self, *given: object) -> str:
        self.num_calls += 1
        if self.num_calls <= self.num_failures:
            raise RegistryUnavailable("the registry cannot be reached (refused)")
        return "the answer"


def enough(*given: object, **more: object) -> None:
    raise Enough


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_wait, "PAUSE_S", 0.001)


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


async def test_an_outage_is_waited_for_and_told_not_too_often(caplog: pytest.LogCaptureFixture) -> None:
    asked = Asked(num_failures=50)
    with caplog.at_level(logging.WARNING):
        assert await when_redis_answers(asked) == "the answer"
    assert asked.num_calls == 51
    (line,) = caplog.messages
    assert "waiting for Redis, up to 300 s: the registry cannot be reached (refused)" in line


async def test_a_redis_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_wait, "MAX_WAIT_S", 0.5)
    asked = Asked(num_failures=1_000_000)
    with pytest.raises(RegistryUnavailable):
        await when_redis_answers(asked)
    assert asked.num_calls > 1


async def test_a_gang_waits_for_redis_before_it_builds_its_engine(
    config: MotetConfig, monkeypatch: pytest.MonkeyPatch, without_serve: Callable[[Any], None]
) -> None:
    without_serve(gang)
    token = Asked(num_failures=3)
    monkeypatch.setattr(gang, "shared_token", token)
    monkeypatch.setattr(gang, "read_secrets", lambda path: SECRETS)
    monkeypatch.setattr(gang, "_build_engine", enough)
    replica = HalfGang.__new__(HalfGang)
    with pytest.raises(Enough):
        await replica.__init__(config.engine, config.leader, config.logs, config.exposition, None, None)  # type: ignore[misc]
    assert token.num_calls == 4


async def test_a_router_waits_for_redis_with_all_that_it_asks(
    config: MotetConfig, monkeypatch: pytest.MonkeyPatch, without_serve: Callable[[Any], None]
) -> None:
    without_serve(ingress)
    asked = {name: Asked() for name in ("register_router", "shared_token", "keeper", "view")}
    for name in ("register_router", "shared_token"):
        monkeypatch.setattr(ingress, name, asked[name])
    monkeypatch.setattr(LaunchKeeper, "start", asked["keeper"])
    monkeypatch.setattr(RegistryView, "start", asked["view"])
    monkeypatch.setattr(ingress, "id_of_this_cluster", lambda: "cluster-1")
    monkeypatch.setattr(ingress, "import_transformers_without_torch", lambda: None)
    monkeypatch.setattr(ingress, "TextService", SimpleNamespace(from_folder=enough))
    monkeypatch.setattr(ingress, "AdapterStore", lambda path: None)
    monkeypatch.setattr(ingress, "UploadService", lambda *given, **more: None)
    replica = HalfRouter.__new__(HalfRouter)
    with pytest.raises(Enough):
        await replica._start(RunningParts(), config, SECRETS, None, None)
    assert {name: one.num_calls for name, one in asked.items()} == dict.fromkeys(asked, 2)
