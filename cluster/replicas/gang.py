"""A gang as Ray Serve sees it: a replica that holds the leader, an engine behind a frame server.

A gang of one worker computes in the replica's own process. One of several has an actor for each, in the bundles of the
replica's placement group; they end with the replica that owns them, so a gang is replaced as one.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import secrets
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import psutil
import ray
from ray import serve
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ...router.http.auth import OperatorKey
from ...workers.config import EngineConfig
from ...workers.engine_messages import TokenInterval
from ...workers.leader.frame_server import FrameServer
from ...workers.leader.served_engine import LeaderConfig
from ..application.application_config import live_values
from ..application.model_source import check_model
from ..application.secret_files import OperatorKeyWatch, read_secrets, secrets_of_this_node, shared_token
from ..config import with_options
from ..exposition.gang_metrics import GangFacts, GangMetrics
from ..exposition.node_page import ExpositionConfig, ProcessPage
from ..process_log import LogConfig
from ..progress import OnEvent, ProgressWriter, ignore_event, step
from ..resources import actor_options
from ..settings.setting_field import ConfigError
from .autoscaler import gang_stats
from .launch_keeper import id_of_this_cluster
from .replica_start import (
    ReplicaStart,
    RunningParts,
    StartPage,
    configure_replica_logging,
    keep_pauses_short,
    serve_only_at,
)
from .serve_watch import ADDRESS

if TYPE_CHECKING:
    from ...workers.loop import EngineLoop
    from ...workers.worker import WorkerSettings


# The workers of a gang as Ray actors, one in each bundle of the leader's placement group.


class WorkerActor:
    """A process for one worker. Plans do not pass through Ray, which only places the process and ends it."""

    def run(self, settings: WorkerSettings, logs: LogConfig, gang_id: str) -> None:
        """Obeys the leader until it ends the connection."""
        configure_replica_logging(logs, "worker", gang=gang_id, rank=settings.rank)
        from ...workers.worker import run_worker

        interface = interface_of(ray.util.get_node_ip_address())
        if interface is not None:
            # By default the library takes the address of the host's name, which other nodes may not reach.
            for library in ("GLOO", "NCCL"):
                os.environ.setdefault(f"{library}_SOCKET_IFNAME", interface)
        run_worker(settings)


def interface_of(ip_address: str) -> str | None:
    """The network interface that has the address; None: none has it, for example because addresses are translated."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == ip_address for entry in addresses):
            return name
    return None


class RayWorkers:
    """Starts workers beside the leader that calls it; they end with the leader's process, which owns them."""

    def __init__(self, placement_group: Any, logs: LogConfig, gang_id: str) -> None:
        """`placement_group`: the leader's; its bundle 0 is the leader's own, worker r takes bundle r + 1."""
        if placement_group is None:
            raise RuntimeError("a gang of several workers needs a placement group with a bundle for each")
        self._placement_group = placement_group
        self._logs, self._gang_id = logs, gang_id
        self._actors: list[Any] = []

    def spawn(self, settings: WorkerSettings) -> None:
        """Returns at once; the worker reports to the leader when it is up."""
        place = PlacementGroupSchedulingStrategy(self._placement_group, settings.rank + 1)
        options = actor_options(self._placement_group.bundle_specs[settings.rank + 1])
        actor = ray.remote(WorkerActor).options(scheduling_strategy=place, **options).remote()
        self._actors.append(actor)
        actor.run.remote(settings, self._logs, self._gang_id)


_log = logging.getLogger(__name__)


class GangReplica:
    """Serves one engine to the routers. Tokens do not pass through Serve, which only keeps the replica alive."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        config: EngineConfig,
        leader: LeaderConfig,
        logs: LogConfig,
        exposition: ExpositionConfig,
        secrets_path: Path | None,
        progress_path: Path | None,
        hub_id: str | None = None,
    ) -> None:
        """`secrets_path`: of `LaunchSecrets`; None: the node has them. `progress_path`: the file for the progress of
        building the engine. `hub_id`: of the model, where nodes download it.
        """
        gang_id = secrets.token_hex(4)
        replica = serve.get_replica_context().replica_id.unique_id
        self._log = configure_replica_logging(logs, "gang", gang=gang_id, replica=replica)
        serve_only_at(ray.util.get_node_ip_address())
        self._config, self._leader, self._logs = config, leader, logs
        self._is_up = False
        on_event = ignore_event if progress_path is None else ProgressWriter(progress_path)
        page = StartPage(exposition, "gang", replica, ray.util.get_node_ip_address())
        self._start = ReplicaStart("gang", replica, id_of_this_cluster(), on_event, page=page)
        async with self._start:
            await self._serve(gang_id, exposition, secrets_path, hub_id, on_event)
        keep_pauses_short()

    async def _serve(
        self,
        gang_id: str,
        exposition: ExpositionConfig,
        secrets_path: Path | None,
        hub_id: str | None,
        on_event: OnEvent,
    ) -> None:
        """Builds the engine and serves it, once all that it needs is there."""
        config, start = self._config, self._start
        launch = await start.until("its secrets", partial(asyncio.to_thread, read_secrets, secrets_path))
        start.secrets = launch
        token = await start.until("Redis", partial(shared_token, launch))
        host = ray.util.get_node_ip_address()  # loopback on a cluster of one machine
        workers = None
        if config.tensor_parallel > 1:
            workers = RayWorkers(ray.util.get_current_placement_group(), self._logs, gang_id)
        check = partial(asyncio.to_thread, check_model, config.model_path, hub_id, on_event)
        await start.until("the model", check)
        # In a thread, so that the replica answers Serve while a large model loads.
        engine = await asyncio.to_thread(_build_engine, config, on_event, workers, host)
        info = msgspec.structs.replace(engine.info, gang_id=gang_id)
        metrics = GangMetrics(info, exposition.name)
        self._engine = engine
        self._server = FrameServer(engine, info, token, self._leader, metrics.observe)
        async with RunningParts() as parts:
            # Stops the engine too, which has its workers before the server starts.
            parts.push_async_callback(self._server.stop)
            self._address = await self._server.start(host)
            operator_key = None if launch.operator_key is None else OperatorKey(launch.operator_key)
            if operator_key is not None and secrets_path is None:
                await parts.start(OperatorKeyWatch(operator_key, secrets_of_this_node))
            self._page = ProcessPage(
                exposition, "gang", info.gang_id, operator_key, lambda: metrics.families(GangFacts.of(self._server))
            )
            parts.push_async_callback(self._page.stop)
            await self._page.start(host)
            self._parts = parts.pop_all()
        _log.info("gang %s serves %s at %s", info.gang_id, info.model, self._address)

    def record_replica_metadata(self) -> dict[str, str]:
        """Metadata for the directory of every router."""
        return {ADDRESS: self._address, **self._page.metadata}

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Numbers for the autoscaler."""
        return gang_stats(self._server.load, self._config.max_num_sequences, self._server.shares)

    async def wake(self) -> None:
        """Does nothing: a router calls it so that Serve sees that a gang is wanted."""

    async def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """Serve's hook for a replica's settings. Raises ConfigError before the replica is up; later keeps the old ones.

        Serve would replace a running replica that raises by others, which would raise as well.
        """
        try:
            values = live_values("gang", user_config)
        except ConfigError as error:
            if not self._is_up:
                await self._start.failed(error)
                raise
            _log.error("the settings stay as they were: %s", error)
            return
        self._engine.receive(TokenInterval(values.pop("token_interval_s", self._config.token_interval_s)))
        self._server.change(dataclasses.replace(self._leader, **values))

    async def check_health(self) -> None:
        """Raises when the replica must be replaced."""
        if not self._is_up:
            self._is_up = True
            await self._start.succeeded()
        if not self._server.healthy:
            raise RuntimeError("the gang's engine or frame server has stopped")

    async def __del__(self) -> None:
        """Serve's hook for a graceful end; by now routers send it nothing new."""
        num_handed_over = await self._server.drain(self._leader.drain_s)
        if num_handed_over:
            _log.info("%d sequences were handed over", num_handed_over)
        await self._parts.aclose()
        self._log.close()


def _build_engine(config: EngineConfig, on_event: OnEvent, workers: RayWorkers | None, host: str) -> EngineLoop:
    with step(on_event, "loading torch"):
        from ...workers.engine_builder import build_engine_loop

    try:
        return build_engine_loop(config, on_event, None if workers is None else workers.spawn, host)
    except Exception as error:  # Serve shows only a traceback, and only until its next try
        _log.error("this gang cannot start: %s", with_options(str(error)))
        raise
