"""What a router learns of Serve: how many gangs are wanted, how its rollout goes, and whether the head answers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from motet.cluster.replicas import serve_watch
from motet.cluster.replicas.serve_watch import ServeWatch
from motet.router.metrics import ServeFacts
from motet.tests.rigs.patience import PATIENCE_S


class Controller:
    """Stands for Serve's controller."""

    def __init__(self) -> None:
        self.now, self.num_asked = 0.0, 0
        self.answer: Mapping[str, Any] | Exception = details("RUNNING", 2)
        self.answers = asyncio.Event()
        self.answers.set()
        self.facts: list[ServeFacts] = []
        self.watch = ServeWatch("motet", "gang", self.facts.append, self.ask, lambda: self.now)

    async def ask(self) -> Mapping[str, Any]:
        self.num_asked += 1
        await self.answers.wait()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    async def look(self) -> ServeFacts:
        await self.watch.look()
        return self.facts[-1]


def details(status: str, wanted: int, bounds: dict[str, int] | None = None) -> Mapping[str, Any]:
    """As Serve's REST API has them."""
    config = {"name": "gang", "num_replicas": wanted, "autoscaling_config": bounds}
    gang = {"status": "HEALTHY", "target_num_replicas": wanted, "deployment_config": config}
    return {"applications": {"motet": {"status": status, "deployments": {"gang": gang}}}}


async def test_wanted_gangs_and_their_bound_follow_serve() -> None:
    controller = Controller()
    facts = await controller.look()
    assert (facts.status, facts.num_wanted_gangs, facts.max_gangs, facts.rollout_s) == ("RUNNING", 2, 2, 0)
    assert facts.min_gangs == 2  # a number that nothing scales
    controller.answer = details("RUNNING", 3, {"min_replicas": 2, "max_replicas": 12})
    facts = await controller.look()
    assert (facts.num_wanted_gangs, facts.min_gangs, facts.max_gangs) == (3, 2, 12)


async def test_a_rollout_lasts_until_serve_runs_again() -> None:
    controller = Controller()
    controller.answer = details("DEPLOYING", 2)
    await controller.look()
    controller.now = 100.0
    assert (await controller.look()).rollout_s == 100.0
    controller.answer = details("RUNNING", 2)
    assert (await controller.look()).rollout_s == 0.0
    controller.now, controller.answer = 200.0, details("DEPLOYING", 2)
    assert (await controller.look()).rollout_s == 0.0


async def test_a_head_that_is_away_leaves_what_was_known() -> None:
    controller = Controller()
    controller.answer = RuntimeError("the actor is dead")
    await controller.watch.look()
    assert controller.facts == []  # nothing is known
    controller.answer = details("RUNNING", 4)
    await controller.look()
    controller.answer = RuntimeError("the actor is dead")
    facts = await controller.look()
    assert (facts.is_head_connected, facts.num_wanted_gangs) == (False, 4)
    controller.answer = details("RUNNING", 4)
    assert (await controller.look()).is_head_connected


async def test_one_question_at_a_time_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    controller = Controller()
    await controller.look()
    monkeypatch.setattr(serve_watch, "ANSWER_S", 0.01)
    controller.answers.clear()
    for _ in range(3):
        assert not (await controller.look()).is_head_connected
    assert controller.num_asked == 2
    controller.answers.set()
    monkeypatch.setattr(serve_watch, "ANSWER_S", PATIENCE_S)
    assert (await controller.look()).is_head_connected and controller.num_asked == 2
