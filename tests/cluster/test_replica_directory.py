"""A router's directory of gangs, where Serve's controller has died and the head that would know of another is away."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from motet.cluster.replicas import serve_watch
from motet.cluster.replicas.serve_watch import ReplicaDirectory
from motet.tests.rigs.patience import PATIENCE_S, eventually_in_loop


class Cluster:
    """Stands for Ray and its controllers, each of which but the last is gone as soon as a client listens."""

    def __init__(self, lookups: list[Callable[[], str]]) -> None:
        """`lookups`: what becomes of each search for the controller, in turn."""
        self._lookups = iter(lookups)
        self.received: list[str] = []

    def get_actor(self, name: str, namespace: str) -> str:
        return next(self._lookups)()

    def listen(self, controller: str, *_: object, **__: object) -> Any:
        self.received.append(controller)
        return Client(is_running=controller == "last")


class Client:
    def __init__(self, is_running: bool) -> None:
        self.is_running = is_running

    def stop(self) -> None:
        self.is_running = False


def start(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> ReplicaDirectory:
    monkeypatch.setattr("ray.get_actor", cluster.get_actor)
    monkeypatch.setattr(serve_watch, "LongPollClient", cluster.listen)
    monkeypatch.setattr(serve_watch, "CHECK_INTERVAL_S", 0.001)
    directory = ReplicaDirectory("motet", "gang", lambda _: None)
    directory.start()
    return directory


async def test_the_loop_turns_while_no_answer_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    is_requested, has_turned = threading.Event(), threading.Event()

    def away() -> str:
        is_requested.set()
        assert has_turned.wait(PATIENCE_S), "the loop was held"
        return "last"

    cluster = Cluster([lambda: "first", away])
    directory = start(cluster, monkeypatch)
    await eventually_in_loop(is_requested.is_set)
    has_turned.set()
    await eventually_in_loop(lambda: cluster.received == ["first", "last"])
    directory.stop()


@pytest.mark.parametrize("error", [ValueError("no such actor"), RuntimeError("timed out"), TimeoutError(), OSError()])
async def test_it_looks_again_whatever_went_wrong(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> str:
        raise error

    cluster = Cluster([lambda: "first", fail, fail, lambda: "last"])
    directory = start(cluster, monkeypatch)
    await eventually_in_loop(lambda: cluster.received == ["first", "last"])
    directory.stop()
