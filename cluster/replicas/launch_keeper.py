"""What routers do for their launch: changed keys, keys of launches that ended, and rollbacks of failed rollouts."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

from msgspec import structs

from ...adapters.ended_tasks import end_tasks
from ...adapters.errors import KeyTaken, RegistryUnavailable
from ...adapters.registry.launches import ApplicationRollout, ExpiredLaunches, Launches, Rollouts, StartReport, Starts
from ...adapters.registry.registry import Registry
from ..settings.setting_field import ConfigError
from .replica_start import MAX_FAILED_STARTS
from .serve_watch import serve_controller

LOOK_S = 10.0  # between two looks at the file of keys
BEAT_S = 60.0
SILENCE_S = 15 * 60.0  # without a heartbeat, after which a launch expires
LONGEST_GAP_S = 3 * BEAT_S

Keys = Sequence[tuple[str, str]]  # (tenant, key)

_log = logging.getLogger(__name__)


class LaunchKeeper:
    """Keeps the registry as this launch's secrets say, and deletes the keys of expired launches.

    Several clusters may share a registry while one takes over from another. The keys of all that live let clients in.
    One that ends does nothing: its keys are deleted after `SILENCE_S` without a heartbeat. Belongs to one event loop.
    """

    def __init__(
        self,
        registry: Registry,
        launches: Launches,
        owner: str,
        read_keys: Callable[[], Keys | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`owner`: the launch's id. `read_keys`: the keys that its secrets say now; it is called in a thread."""
        self.owner = owner
        self._registry, self._launches, self._read_keys, self._clock = registry, launches, read_keys, clock
        self._keys: Keys | None = None
        self._expired = ExpiredLaunches(SILENCE_S, LONGEST_GAP_S)
        self._beat_at = -BEAT_S
        self._task: asyncio.Task[None] | None = None

    async def start(self, keys: Keys | None) -> None:
        """`keys`: those that were registered. None: this launch gives none, and nothing is watched."""
        if keys is None:
            return
        self._keys = keys
        await self.look()
        self._task = asyncio.create_task(self._look_forever(), name="launch keeper")

    async def stop(self) -> None:
        await end_tasks(self._task)

    async def look(self) -> None:
        """Takes over keys that have changed, and sends the heartbeat when it is due. Raises RegistryUnavailable."""
        await self._take_over_keys()
        now = self._clock()
        if now - self._beat_at < BEAT_S:
            return
        heartbeats = await self._launches.heartbeat(self.owner)
        if heartbeats[self.owner] == 1 and self._keys:  # it had expired for others, which may have deleted its keys
            await self._register(self._keys)
        expired = self._expired.observe(heartbeats, now)
        self._beat_at = now
        for launch in expired:
            await self._registry.set_launch_keys(launch, ())
            await self._launches.forget(launch)
            _log.info("the keys of a launch that is gone were taken back: %s", launch)

    async def _take_over_keys(self) -> None:
        try:
            # A file that is gone gives no keys any more.
            keys = await asyncio.to_thread(self._read_keys) or ()
        except (ConfigError, OSError) as error:
            _log.error("the keys stay as they were: %s", error)
            return
        if keys != self._keys and await self._register(keys):
            _log.info("the keys have changed: there are %d", len(keys))

    async def _register(self, keys: Keys) -> bool:
        try:
            await self._registry.set_launch_keys(self.owner, keys)
        except KeyTaken as error:  # for as long as the other one has it
            _log.error("the keys stay as they were: %s", error)
            return False
        self._keys = keys
        return True

    async def _look_forever(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self.look()
            except RegistryUnavailable as error:
                _log.warning("keys and launches could not be read, trying later: %s", error)


def id_of_this_cluster() -> str:
    """One word, the same for all processes of a Ray cluster for as long as it lives, and no other's."""
    # Ray has no public call for it.
    from ray._private.worker import global_worker

    cluster_id: str = global_worker.node.cluster_id.hex()
    return f"cluster-{cluster_id}"


# Rolls an application back to its last good configuration if gangs of a newer one cannot start.
#
# Serve stops a gang before it starts one with the new configuration, and retries failed starts without end. A faulty
# configuration would so leave one gang less for ever. `motet serve` supervises its own updates (`Deployment.update`).
# For an application that is configured through Serve's REST API one of the routers does.

ENOUGH_FAILURES: Final = 3  # of starts, in a row
CALL_TIMEOUT_S = 30.0
_RETRYING: Final = re.compile(r"failed to start with exception\. Retrying (\d+) more time")


class Serve(Protocol):
    """The part of Serve's controller that is needed here. Both methods block."""

    def details(self) -> Mapping[str, Any]:
        """What Serve's REST API returns."""

    def apply(self, config: Mapping[str, Any], now: float) -> None:
        """Applies a configuration as the REST API does. `now`: its time, as Serve records it."""


class RolloutKeeper:
    """Supervises one application, in turn with the other routers."""

    def __init__(
        self,
        app: str,
        cluster: str,
        rollouts: Rollouts,
        starts: Starts,
        on_state: Callable[[str | None], None],
        serve: Serve | None = None,
    ) -> None:
        """`on_state`: called at each look with the reason of the last rollback, or None."""
        self._app, self._cluster, self._rollouts, self._starts = app, cluster, rollouts, starts
        self._on_state, self._serve = on_state, serve or ServeController()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._keep_forever(), name="rollout keeper")

    async def stop(self) -> None:
        await end_tasks(self._task)

    async def look(self) -> None:
        """Records a configuration with which all replicas run, and rolls back one with which they cannot start."""
        rollout = await self._rollouts.get(self._cluster)
        self._on_state(None if rollout is None else rollout.taken_back)
        if not await self._rollouts.may_look(self._cluster, LOOK_S / 2):
            return
        details = await asyncio.to_thread(self._serve.details)
        application = details["applications"].get(self._app)
        config = None if application is None else application.get("deployed_app_config")
        if config is None:  # not through the REST API
            return
        if is_whole(application):
            if rollout is None or rollout.good != config or _is_configured_anew(rollout, application):
                await self._rollouts.set(self._cluster, ApplicationRollout(good=config))
            return
        if rollout is None or rollout.good == config:
            return
        if rollout.tried_at != (tried_at := application["last_deployed_time_s"]):
            said = {name: entry["message"] for name, entry in application["deployments"].items()}
            await self._rollouts.set(self._cluster, structs.replace(rollout, tried_at=tried_at, said=said))
            return
        failed = [entry for entry in await self._starts.reports() if entry.has_failed and entry.began_at > tried_at]
        if (why := why_not_whole(application, rollout.said, failed)) is None:
            return
        latest = await asyncio.to_thread(self._serve.details)  # keeps what others have configured meanwhile
        if latest["applications"].get(self._app, {}).get("last_deployed_time_s") != tried_at:
            return
        _log.error("rolling back to the earlier configuration, since gangs of the new one cannot start: %s", why)
        now = time.time()
        await self._rollouts.set(self._cluster, ApplicationRollout(good=rollout.good, taken_back=why, came_back_at=now))
        await asyncio.to_thread(self._serve.apply, with_application(latest, self._app, rollout.good), now)

    async def _keep_forever(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self.look()
            except RegistryUnavailable as error:  # logged elsewhere
                _log.debug("the rollout could not be checked, trying later: %s", error)
            except Exception as error:  # Ray raises many kinds, and none may end this loop
                _log.warning("Serve did not report the rollout: %s", error)


class ServeController:
    """Serve's controller of this cluster."""

    def details(self) -> Mapping[str, Any]:
        import ray

        instance_details: Mapping[str, Any] = ray.get(
            serve_controller().get_serve_instance_details.remote(), timeout=CALL_TIMEOUT_S
        )
        return instance_details

    def apply(self, config: Mapping[str, Any], now: float) -> None:
        import ray
        from ray.serve.schema import ServeDeploySchema

        schema = ServeDeploySchema.model_validate(config)
        ray.get(serve_controller().apply_config.remote(schema, now), timeout=CALL_TIMEOUT_S)


def is_whole(application: Mapping[str, Any]) -> bool:
    """Whether all of its deployments run as configured."""
    deployments = application["deployments"].values()
    return application["status"] == "RUNNING" and all(deployment["status"] == "HEALTHY" for deployment in deployments)


def why_not_whole(application: Mapping[str, Any], said: Mapping[str, str], failed: Sequence[StartReport]) -> str | None:
    """Why replicas of this configuration cannot start, once enough have failed; None: they still may.

    `said`: Serve's earlier message for each deployment; while it is the same, Serve has not begun to start replicas.
    `failed`: starts with this configuration. Serve also counts those whose process was killed, but its message soon
    changes.
    """
    for name, deployment in application["deployments"].items():
        # With many replicas, a single bad node does not count.
        enough = max(ENOUGH_FAILURES, deployment["target_num_replicas"])
        reported = [report for report in failed if report.kind == name]
        if len(reported) >= enough:
            return f"{name}: {reported[-1].reason}"
        message = deployment["message"]
        if message != said.get(name) and num_failed_starts(message) >= enough:
            return f"{name}: {last_line(message)}"
    return None


def _is_configured_anew(rollout: ApplicationRollout, application: Mapping[str, Any]) -> bool:
    """Whether the application was configured again since its earlier configuration came back."""
    return rollout.taken_back is not None and bool(application["last_deployed_time_s"] > rollout.came_back_at)


def with_application(details: Mapping[str, Any], app: str, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration of all applications, with `config` for `app`. Serve ends applications that are left out."""
    configs = {name: entry.get("deployed_app_config") for name, entry in details["applications"].items()}
    configs[app] = config
    return {
        "target_capacity": details.get("target_capacity"),
        "applications": [entry for entry in configs.values() if entry is not None],
    }


def num_failed_starts(message: str) -> int:
    """How many starts of a deployment's replicas have failed in a row, from Serve's message.

    Serve does not count them for a deployment that already has replicas of this version.
    """
    match = _RETRYING.search(message)
    return 0 if match is None else MAX_FAILED_STARTS - int(match[1])


def last_line(message: str) -> str:
    """The last line of a replica's traceback, which is the error.

    >>> last_line("Traceback:\\n  …\\nValueError: no such model\\n")
    'ValueError: no such model'
    """
    return next((line.strip() for line in reversed(message.splitlines()) if line.strip()), message)
