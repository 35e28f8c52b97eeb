"""Configurations with which gangs cannot start, and how the one before comes back."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.deployment_state import DeploymentState
from ray.serve.schema import ServeDeploySchema

from motet.adapters.registry.launches import Kind, Rollouts, StartReport, Starts
from motet.adapters.registry.registry import connect
from motet.cluster.launch.launch import why_not_running
from motet.cluster.launch.redis_server import RedisServer
from motet.cluster.replicas.launch_keeper import RolloutKeeper, last_line, num_failed_starts
from motet.cluster.replicas.replica_start import MAX_FAILED_STARTS

REASON = "ConfigError: --threads = 10000000000: too many"
TRACE = f"ray::ServeReplica\n  File gang.py\n{REASON}\n"
OTHER = {"name": "other", "import_path": "other:app", "route_prefix": "/other"}


def failing(num_failures: int) -> str:
    """What Serve says of a deployment after so many failed starts, by its own code."""
    said: list[str] = []
    deployment = SimpleNamespace(
        _target_state=SimpleNamespace(target_num_replicas=2, rolling_update=True),
        _replica_has_started=True,
        _replica_failure_count=num_failures,
        _failed_to_start_threshold=MAX_FAILED_STARTS,
        _record_replica_failure=lambda message: None,
        _curr_status_info=SimpleNamespace(update_message=said.append),
    )
    DeploymentState.record_replica_startup_failure(deployment, TRACE)
    return said[0]


def config(threads: int) -> dict[str, Any]:
    return {"name": "motet", "import_path": "motet.cluster.serve_application:build", "args": {"threads": threads}}


class StandInServe:
    """Serve's controller with two applications."""

    def __init__(self) -> None:
        self.config, self.deployed_at = config(1), 1.0
        self.applied: list[Mapping[str, Any]] = []
        self.is_declared = True
        self.set_state("RUNNING", "HEALTHY", "")

    def configure(self, threads: int, at: float) -> None:
        self.config, self.deployed_at = config(threads), at
        self.set_state("DEPLOYING", "UPDATING", "")

    def set_state(self, status: str, of_gangs: str, message: str, num_gangs: int = 2) -> None:
        gang = {"status": of_gangs, "message": message, "target_num_replicas": num_gangs}
        router = {"status": "HEALTHY", "message": "", "target_num_replicas": 1}
        self._state = {"status": status, "deployments": {"router": router, "gang": gang}}

    def details(self) -> Mapping[str, Any]:
        motet = self._state | {"last_deployed_time_s": self.deployed_at}
        if self.is_declared:
            motet["deployed_app_config"] = self.config
        by_hand = {"status": "RUNNING", "deployments": {}}
        others = {"other": {"deployed_app_config": OTHER, **by_hand}, "by hand": by_hand}
        found: Mapping[str, Any] = json.loads(
            json.dumps({"target_capacity": 60, "applications": {"motet": motet, **others}})
        )
        return found

    def apply(self, reported: Mapping[str, Any], now: float) -> None:
        ServeDeploySchema.model_validate(reported)
        self.applied.append(reported)
        self.configure(reported["applications"][0]["args"]["threads"], now)


class Rig:
    def __init__(self, rollouts: Rollouts) -> None:
        self.serve = StandInServe()
        self.rollouts = rollouts
        self.states: list[str | None] = []
        self.starts = Starts(rollouts._client, "cluster-1")
        self.keeper = RolloutKeeper("motet", "cluster-1", rollouts, self.starts, self.states.append, self.serve)

    async def look(self) -> str | None:
        """One look of the router whose turn it is; returns what it says of the rollout."""
        await self.rollouts._client.delete("motet:{registry}:rollout_look:cluster-1")
        await self.keeper.look()
        return self.states[-1]

    async def fail(self, threads: int) -> None:
        """Another configuration, with which gangs cannot start."""
        self.serve.configure(threads, at=self.serve.deployed_at + 1)
        await self.look()
        self.serve.set_state("DEPLOYING", "UPDATING", failing(3))
        await self.look()

    async def report(self, replica: str, began_at: float, kind: Kind = "gang", *, has_failed: bool = True) -> None:
        """As a replica does that cannot start."""
        report = StartReport(
            kind=kind, replica=replica, reason=REASON, has_failed=has_failed, began_at=began_at, reported_at=time.time()
        )
        await self.starts.report(report)


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    server = RedisServer(tmp_path / "redis")
    client = connect(server.start())
    yield Rig(Rollouts(client))
    await client.aclose()
    server.stop()


async def test_the_configuration_before_comes_back_after_three_failed_starts(rig: Rig) -> None:
    assert await rig.look() is None
    rig.serve.configure(threads=10_000_000_000, at=2.0)
    for num_failures in range(3):
        rig.serve.set_state("DEPLOYING", "UPDATING", failing(num_failures) if num_failures else "")
        assert await rig.look() is None
        assert rig.serve.applied == []
    rig.serve.set_state("DEPLOYING", "UPDATING", failing(3))
    await rig.look()
    (reported,) = rig.serve.applied
    assert reported == {"target_capacity": 60, "applications": [config(1), OTHER]}  # others stay as they are
    assert await rig.look() == f"gang: {REASON}"
    rig.serve.set_state("RUNNING", "HEALTHY", "")
    assert await rig.look() == f"gang: {REASON}"  # until the configuration changes
    assert len(rig.serve.applied) == 1


@pytest.mark.parametrize("threads", [1, 2, 10_000_000_000])
async def test_what_is_configured_afterwards_is_tried(rig: Rig, threads: int) -> None:
    """The same once more, what runs, or something else."""
    await rig.look()
    await rig.fail(threads=10_000_000_000)
    rig.serve.configure(threads, at=rig.serve.deployed_at + 1)
    await rig.look()
    assert len(rig.serve.applied) == 1
    rig.serve.set_state("RUNNING", "HEALTHY", "")
    await rig.look()
    assert await rig.look() is None
    known = await rig.rollouts.get("cluster-1")
    assert known is not None and known.good == config(threads)


async def test_what_is_configured_while_a_router_looks_is_not_overwritten(rig: Rig) -> None:
    await rig.look()
    rig.serve.configure(threads=10_000_000_000, at=2.0)
    await rig.look()
    rig.serve.set_state("DEPLOYING", "UPDATING", failing(3))
    seen = rig.serve.details()

    def details() -> Mapping[str, Any]:
        rig.keeper._serve = rig.serve
        rig.serve.configure(threads=2, at=3.0)  # by an operator, after the router's look
        return seen

    rig.keeper._serve = SimpleNamespace(details=details)
    await rig.look()
    assert rig.serve.applied == []


async def test_an_application_that_never_was_whole_goes_on_trying(rig: Rig) -> None:
    rig.serve.set_state("DEPLOYING", "UPDATING", failing(1000))
    await rig.look()
    assert rig.serve.applied == [] and await rig.rollouts.get("cluster-1") is None


async def test_gangs_of_a_configuration_that_was_good_go_on_trying(rig: Rig) -> None:
    """As while a volume or a GPU is away for long."""
    await rig.look()
    rig.serve.set_state("UNHEALTHY", "UNHEALTHY", failing(1000))
    await rig.look()
    assert rig.serve.applied == []


async def test_what_gangs_report_counts_when_serve_speaks_of_something_else(rig: Rig) -> None:
    """Serve says of a start that pauses only that it takes long. What failed before, waits, or is a router's is another
    matter.
    """
    await rig.look()
    for number in range(3):
        await rig.report(f"before {number}", began_at=1.5)
    rig.serve.configure(threads=2, at=2.0)
    rig.serve.set_state("DEPLOYING", "UPDATING", "1 replicas have taken more than 30s to initialize.")
    await rig.look()
    await rig.report("waits", began_at=2.5, has_failed=False)
    await rig.report("router", began_at=2.5, kind="router")
    for number in range(3):
        await rig.look()
        assert rig.serve.applied == []
        await rig.report(f"after {number}", began_at=2.5)
    await rig.look()
    assert len(rig.serve.applied) == 1
    assert await rig.look() == f"gang: {REASON}"


async def test_failures_of_before_are_not_those_of_a_new_configuration(rig: Rig) -> None:
    """Serve builds the application first, and says what it said while it does."""
    await rig.look()
    rig.serve.configure(threads=2, at=2.0)
    rig.serve.set_state("DEPLOYING", "UNHEALTHY", failing(1000))
    for _ in range(5):
        await rig.look()
    assert rig.serve.applied == []
    rig.serve.set_state("DEPLOYING", "UPDATING", failing(2))
    await rig.look()
    assert rig.serve.applied == []
    rig.serve.set_state("DEPLOYING", "UPDATING", failing(3))
    await rig.look()
    assert len(rig.serve.applied) == 1


async def test_of_many_gangs_some_may_fail(rig: Rig) -> None:
    await rig.look()
    rig.serve.configure(threads=2, at=2.0)
    await rig.look()
    rig.serve.set_state("DEPLOYING", "UPDATING", failing(49), num_gangs=50)
    await rig.look()
    assert rig.serve.applied == []
    rig.serve.set_state("DEPLOYING", "UPDATING", failing(50), num_gangs=50)
    await rig.look()
    assert len(rig.serve.applied) == 1


async def test_an_application_of_motet_serve_is_left_alone(rig: Rig) -> None:
    rig.serve.is_declared = False
    await rig.look()
    rig.serve.set_state("DEPLOYING", "UPDATING", failing(1000))
    await rig.look()
    assert rig.serve.applied == [] and await rig.rollouts.get("cluster-1") is None


async def test_one_router_of_all_looks(rig: Rig) -> None:
    await rig.look()
    rig.serve.configure(threads=2, at=2.0)
    await rig.look()
    rig.serve.set_state("DEPLOYING", "UPDATING", failing(3))
    await rig.keeper.look()  # another one has looked just now
    assert rig.serve.applied == []


def test_serves_own_words_are_understood() -> None:
    assert [num_failed_starts(failing(number)) for number in (1, 2, 3, 1000)] == [1, 2, 3, 1000]
    assert num_failed_starts("") == num_failed_starts("A replica's health check failed.") == 0
    assert last_line(failing(1)) == REASON


@pytest.mark.parametrize(
    ("status", "message", "of_gangs", "reasons"),
    [
        ("DEPLOYING", "", "", []),
        ("DEPLOYING", "", "Upscaling from 1 to 2 replicas.", []),
        ("DEPLOYING", "", failing(1), [f"gang: {REASON}"]),
        ("DEPLOY_FAILED", "", TRACE, [f"gang: {REASON}"]),
        ("DEPLOY_FAILED", "it could not be built\nno such module", "", ["no such module"]),
    ],
)
def test_motet_serve_gives_up_at_the_first_failed_start(
    status: str, message: str, of_gangs: str, reasons: list[str]
) -> None:
    gang = SimpleNamespace(message=of_gangs)
    router = SimpleNamespace(message="")
    deployments = {"router": router, "gang": gang}
    shown = SimpleNamespace(status=status, message=message, deployments=deployments)
    assert why_not_running(shown, {"router": ""}) == reasons
    said_before = why_not_running(shown, {"gang": of_gangs})
    assert REASON not in " ".join(said_before) and bool(said_before) == (status == "DEPLOY_FAILED")
