"""How a deployment ends when one of its parts fails to end: without Ray, with stand-ins."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from motet.cluster.config import MotetConfig
from motet.cluster.launch import launch
from motet.cluster.launch.launch import Deployment, LaunchError
from motet.cluster.launch.local_serve import free_ports

DEMO_BASE = Path(__file__).resolve().parents[2] / "examples" / "demo" / "base"
VARIABLE = "MOTET_TEST_OF_DEPLOYMENT"


class Parts:
    """Stands in for all parts that are started, and records which were ended."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, start_serve: Callable[..., None]) -> None:
        self.ended: list[str] = []
        self.failing: set[str] = set()

        async def nothing(*args: Any, **options: Any) -> None:
            return None

        monkeypatch.setattr(launch, "RedisServer", lambda path, host, max_bytes: Part(self, "redis"))
        monkeypatch.setattr(launch, "Janitor", lambda *_: Part(self, "janitor"))
        monkeypatch.setattr(launch, "serve_environment", lambda *args: {VARIABLE: "set"})
        monkeypatch.setattr(launch, "register_launch", nothing)
        monkeypatch.setattr(launch, "start_serve", start_serve)
        monkeypatch.setattr(launch, "check_room", ignore)
        monkeypatch.setattr(launch, "_run_application", ignore)
        monkeypatch.setattr(launch, "_wait_until_ready", lambda url: None)
        monkeypatch.setattr(launch, "_shut_ray_down", lambda: self.end("ray"))

    def end(self, name: str) -> None:
        self.ended.append(name)
        if name in self.failing:
            raise TimeoutError(f"{name} does not end")


class Part:
    def __init__(self, parts: Parts, name: str) -> None:
        self._parts, self._name = parts, name

    def start(self) -> str:
        return "redis://nowhere"

    def stop(self) -> None:
        self._parts.end(self._name)

    finish = stop


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MotetConfig:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # no janitor removes the session's folder here
    return MotetConfig.of(model_path=DEMO_BASE, data_dir=tmp_path / "data", port=free_ports(1)[0])


def ignore(*args: Any, **options: Any) -> None:
    return None


@pytest.mark.parametrize("failing", [set(), {"ray"}, {"janitor"}, {"redis"}, {"ray", "janitor", "redis"}])
def test_every_part_is_ended_whatever_the_others_do(
    config: MotetConfig, monkeypatch: pytest.MonkeyPatch, failing: set[str]
) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    parts = Parts(monkeypatch, ignore)
    parts.failing = failing
    deployment = Deployment()
    deployment.start(config, ignore)
    assert os.environ[VARIABLE] == "set"
    assert signal.getsignal(signal.SIGTERM) is not handler
    if failing:
        with pytest.raises(TimeoutError):
            deployment.stop()
    else:
        deployment.stop()
    assert parts.ended == ["ray", "janitor", "redis"]
    assert VARIABLE not in os.environ
    assert signal.getsignal(signal.SIGTERM) is handler
    deployment.stop()
    assert len(parts.ended) == 3


def test_what_kept_it_from_starting_is_reported_though_nothing_can_be_ended(
    config: MotetConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def start_serve(*args: Any) -> None:
        raise LaunchError("Ray is ill")

    parts = Parts(monkeypatch, start_serve)
    parts.failing = {"ray", "janitor", "redis"}
    with pytest.raises(LaunchError, match="Ray is ill"):
        Deployment().start(config, ignore)
    assert parts.ended == ["ray", "janitor", "redis"]
    assert "does not end" in caplog.text


def test_an_error_says_where_its_logs_will_be(config: MotetConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_application(config: MotetConfig, secrets_path: Path, progress_path: Path) -> None:
        raise LaunchError("the model is ill")

    Parts(monkeypatch, ignore)  # which makes no logs
    monkeypatch.setattr(launch, "_run_application", run_application)
    with pytest.raises(LaunchError, match=r"the model is ill\nlogs: .*logs"):
        Deployment().start(config, ignore)
