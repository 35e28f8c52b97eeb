"""What routers exchange with Ray Serve: replicas, states of deployments, demand for gangs, placements."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import ray
from ray.serve._private.common import DeploymentID, DeploymentTargetInfo
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE
from ray.serve._private.long_poll import LongPollClient, LongPollNamespace

from ...router.metrics import ServeFacts

# Which gangs or routers there are, as Ray Serve knows it, pushed to a router.
#
# A replica publishes its address as replica metadata, and the Serve controller pushes the set of running replicas to
# its listeners. Serve's own handles are built on the same feed. So a router learns within a tenth of a second of a
# gang that comes, goes or is replaced, for any number of gangs, and without asking. A custom `RequestRouter` would get
# the same set, but it exists only behind a handle's first request and cannot be handed a collaborator; asking through
# `handle.broadcast` would cost every router a call to every gang each second. The price is that `LongPollClient` is
# not Serve's public API: this file is the only one that knows it, and the end-to-end test goes through it.

ADDRESS = "leader_address"  # key in a gang's replica metadata

CHECK_INTERVAL_S = 1.0

_log = logging.getLogger(__name__)


Metadata = Mapping[str, str]


class ReplicaDirectory:
    """Calls `on_change` with the metadata of a deployment's replicas by replica id, at first and at each change."""

    def __init__(self, app: str, deployment: str, on_change: Callable[[Mapping[str, Metadata]], None]) -> None:
        self._deployment_id = DeploymentID(name=deployment, app_name=app)
        self._on_change = on_change
        self._client: Any = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Needs a running event loop, on which `on_change` is called."""
        self._listen(serve_controller())
        self._task = asyncio.create_task(self._keep_listening())

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
        if self._client is not None:
            self._client.stop()

    def _listen(self, controller: Any) -> None:
        self._client = LongPollClient(
            controller,
            {(LongPollNamespace.DEPLOYMENT_TARGETS, self._deployment_id): self._update},
            call_in_event_loop=asyncio.get_running_loop(),
            client_id=f"motet:{self._deployment_id}",
        )

    async def _keep_listening(self) -> None:
        """Subscribes again when the controller has died and was restarted, which stops a client for good."""
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            if not self._client.is_running:
                try:
                    # In a thread: where the head is gone as well, Ray waits a minute or two before it says so.
                    self._listen(await asyncio.to_thread(serve_controller))
                except Exception as error:  # Ray's are many, and none may end the watch for the next controller
                    _log.warning("the Serve controller is away; replicas known before stay in use: %s", error)

    def _update(self, targets: DeploymentTargetInfo) -> None:
        self._on_change(
            {replica.replica_id.unique_id: replica.replica_metadata for replica in targets.running_replicas}
        )


def serve_controller() -> Any:
    """The handle of Serve's controller. Raises ValueError if there is none. It blocks while Ray searches."""
    return ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)


# Shows Ray Serve that a gang is wanted while there is none.

POLL_S = 0.2


class GangDemand:
    """Keeps one call to the gangs waiting in Serve for as long as sequences of this router wait for a gang.

    Tokens do not pass through Serve, so Serve does not see the demand. A call that finds no replica waits at the
    handle, which notifies the controller at once. The controller starts a gang, the call ends, and the sequences go to
    the gang directly. Belongs to one event loop.
    """

    def __init__(self, gang: Any, num_waiting: Callable[[], int]) -> None:
        """`gang`: Serve's handle of the gangs. `num_waiting`: sequences of this router that wait for a gang now."""
        self._gang = gang
        self._num_waiting = num_waiting
        self._task: asyncio.Task[None] | None = None

    def show(self) -> None:
        """Call it when a sequence begins to wait."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._call_while_waiting(), name="gang demand")

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _call_while_waiting(self) -> None:
        while self._num_waiting():
            call = self._gang.wake.remote()
            answer = asyncio.ensure_future(_answer(call))
            try:
                while self._num_waiting() and not answer.done():
                    await asyncio.wait([answer], timeout=POLL_S)
            finally:
                if not answer.done():
                    call.cancel()  # no sequence waits any more
                    answer.cancel()
            await asyncio.sleep(POLL_S)  # a gang that answered is connected to in a moment


async def _answer(call: Any) -> None:
    try:
        await call
    except Exception as error:  # the gang may have died: while sequences wait, the next round calls again
        _log.warning("a call to the gangs failed: %r", error)


# Frees what dead gangs still hold of the nodes.
#
# A gang of several workers has a placement group of the name of its replica. Serve's controller removes it with the
# replica, but loses sight of a replica that dies while a new controller recovers: its placement group stays, and where
# it holds the last room, no gang takes the dead one's place. No public part of Serve looks for it, so each router
# does.

LOOK_S = 15.0


class PlacementKeeper:
    """Removes the placement groups of a deployment that had no living replica at two looks, one after the other.

    Serve makes a placement group a moment before the actor, which is known by its name from then on, wherever it waits.
    """

    def __init__(self, app: str, deployment: str, look: Callable[[], Mapping[str, str]] | None = None) -> None:
        """`look`: ids of placement groups that belong to no actor, by name; the default asks Ray."""
        self._look = look or (lambda: placements_without_actor(app, deployment))
        self._seen: set[str] = set()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._keep_forever(), name="placement keeper")

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def keep(self) -> None:
        """One look; it waits for Ray."""
        placements = self._look()
        for name in self._seen & placements.keys():
            _log.warning("what a dead gang held is freed, as Serve has lost sight of it: %s", name)
            try:
                remove_placement(placements[name])
            except Exception as error:  # the others are freed nevertheless
                _log.warning("the placement group of %s could not be removed: %s", name, error)
        self._seen = set(placements)

    async def _keep_forever(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                # In a thread: where the head is gone, Ray waits a minute or two before it says so.
                await asyncio.to_thread(self.keep)
            except Exception as error:  # Ray's are many, and none may end the looking
                _log.warning("placement groups could not be checked: %s", error)


def placements_without_actor(app: str, deployment: str) -> Mapping[str, str]:
    """Ids of the deployment's placement groups whose replica is gone, by their names, which are the replicas'."""
    import ray
    from ray.serve._private.common import DeploymentID, ReplicaID
    from ray.serve._private.constants import SERVE_NAMESPACE

    table: Mapping[str, Mapping[str, Any]] = ray.util.placement_group_table()
    # After the table: each of its groups had its actor by then, or has none.
    actors = ray.util.list_named_actors(all_namespaces=True)
    living = {actor["name"] for actor in actors if actor["namespace"] == SERVE_NAMESPACE}
    prefix = ReplicaID("", DeploymentID(name=deployment, app_name=app)).to_full_id_str()
    return ownerless(table, living, prefix)


def ownerless(table: Mapping[str, Mapping[str, Any]], living: Collection[str], prefix: str) -> Mapping[str, str]:
    """Existing placement groups by id, from Ray's table, whose name begins so and is not an actor's.

    >>> table = {"1": {"name": "gang#a", "state": "CREATED"}, "2": {"name": "gang#b", "state": "CREATED"}}
    >>> ownerless(table, ["gang#a"], "gang#")
    {'gang#b': '2'}
    """
    return {
        entry["name"]: placement_id
        for placement_id, entry in table.items()
        if entry["state"] != "REMOVED" and entry["name"].startswith(prefix) and entry["name"] not in living
    }


def remove_placement(placement_id: str) -> None:
    import ray
    from ray._raylet import PlacementGroupID
    from ray.util.placement_group import PlacementGroup

    ray.util.remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(placement_id))))


INTERVAL_S = 15.0
ANSWER_S = 10.0  # after which the controller counts as away
DEPLOYING = "DEPLOYING"


Details = Mapping[str, Any]


class ServeWatch:
    """Calls `on_change` with what the controller says, and when it answers no more. Belongs to one event loop."""

    def __init__(
        self,
        app: str,
        gang_deployment: str,
        on_change: Callable[[ServeFacts], None],
        ask: Callable[[], Awaitable[Details]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`ask`: the details of all applications, as Serve's REST API has them; None: read from the controller."""
        self._app, self._gang, self._on_change, self._clock = app, gang_deployment, on_change, clock
        self._ask = ask or _ask_controller
        self._facts: ServeFacts | None = None
        self._deploying_since: float | None = None
        self._question: asyncio.Task[Details] | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._look_forever(), name="serve watch")

    def stop(self) -> None:
        for task in (self._task, self._question):
            if task is not None:
                task.cancel()

    async def look(self) -> None:
        """Asks once. A question that is still open is waited for again: there is never a second one."""
        if self._question is None:
            self._question = asyncio.ensure_future(_as_coroutine(self._ask))
        done, _ = await asyncio.wait([self._question], timeout=ANSWER_S)
        if not done:
            return self._note_silence("no answer")
        question, self._question = self._question, None
        try:
            facts = self._facts_in(question.result())
        except Exception as error:  # Ray's are many, and none may end the watch
            return self._note_silence(repr(error))
        if self._facts is not None and not self._facts.is_head_connected:
            _log.info("Serve's controller answers again")
        self._take(facts)

    def _facts_in(self, details: Details) -> ServeFacts:
        """Raises KeyError if Serve has no such application."""
        application = details["applications"][self._app]
        gang = application["deployments"][self._gang]
        config = gang["deployment_config"]
        bounds = config.get("autoscaling_config")
        target = gang["target_num_replicas"]
        now = self._clock()
        if application["status"] != DEPLOYING:
            self._deploying_since = None
        elif self._deploying_since is None:
            self._deploying_since = now
        return ServeFacts(
            status=application["status"],
            num_wanted_gangs=target,
            min_gangs=target if bounds is None else bounds["min_replicas"],
            max_gangs=target if bounds is None else bounds["max_replicas"],
            rollout_s=0.0 if self._deploying_since is None else now - self._deploying_since,
            is_head_connected=True,
        )

    def _note_silence(self, why: str) -> None:
        if self._facts is None or not self._facts.is_head_connected:
            return
        _log.warning("Serve's controller, on the head, does not answer: %s", why)
        self._take(replace(self._facts, is_head_connected=False))

    def _take(self, facts: ServeFacts) -> None:
        self._facts = facts
        self._on_change(facts)

    async def _look_forever(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(INTERVAL_S)


async def _as_coroutine(ask: Callable[[], Awaitable[Details]]) -> Details:
    return await ask()


async def _ask_controller() -> Details:
    # In a thread: where the head is gone, Ray searches for a minute or two.
    controller = await asyncio.to_thread(serve_controller)
    details: Details = await controller.get_serve_instance_details.remote()
    return details
