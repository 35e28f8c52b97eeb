"""A gang as Ray Serve sees it: a replica that holds the leader, an engine behind a frame server.

A gang of one worker computes in the replica's own process. One of several has an actor for each, in the bundles of the
replica's placement group; they end with the replica that owns them, so a gang is replaced as one.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import ray

from ...workers.config import EngineConfig
from ...workers.leader.frame_server import FrameServer
from ...workers.leader.leader_config import LeaderConfig
from ..exposition.exposition_config import ExpositionConfig
from ..exposition.gang_metrics import GangFacts, GangMetrics
from ..exposition.process_page import ProcessPage
from ..launch_secrets import LaunchSecrets
from ..progress_log import OnEvent, ProgressWriter, ignore_event, step
from .gang_stats import gang_stats
from .gang_workers import RayWorkers
from .garbage_collection import make_garbage_collection_rare
from .replica_directory import ADDRESS
from .replica_logging import configure_replica_logging

if TYPE_CHECKING:  # the module imports torch, which launchers need not: they only name the class below
    from ...workers.loop import EngineLoop

_log = logging.getLogger(__name__)


class GangReplica:
    """Serves one engine to the routers. Tokens do not pass through Serve, which only keeps the replica alive."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        config: EngineConfig,
        leader: LeaderConfig,
        exposition: ExpositionConfig,
        secrets_path: Path,
        progress_path: Path | None,
    ) -> None:
        """`secrets_path`: of `LaunchSecrets`. `progress_path`: the file for the progress of building the engine."""
        configure_replica_logging()
        self._drain_s = leader.drain_s
        self._max_num_sequences = config.max_num_sequences
        on_event = ignore_event if progress_path is None else ProgressWriter(progress_path)
        host = ray.util.get_node_ip_address()  # loopback on a cluster of one machine
        workers = None if config.tensor_parallel == 1 else RayWorkers(ray.util.get_current_placement_group())
        # In a thread, so that the replica answers Serve while a large model loads.
        engine = await asyncio.to_thread(_build_engine, config, on_event, workers, host)
        info = msgspec.structs.replace(engine.info, gang_id=secrets.token_hex(4))
        launch = await asyncio.to_thread(LaunchSecrets.read, secrets_path)
        metrics = GangMetrics(info, exposition.name)
        self._server = FrameServer(engine, info, launch.token, leader, metrics.observe)
        self._address = await self._server.start(host)
        self._page = ProcessPage(
            exposition, info.gang_id, launch.operator_key, lambda: metrics.families(GangFacts.of(self._server))
        )
        await self._page.start(host)
        make_garbage_collection_rare()
        _log.info("gang %s serves %s at %s", info.gang_id, info.model, self._address)

    def record_replica_metadata(self) -> dict[str, str]:
        """What this replica tells the directory of every router."""
        return {ADDRESS: self._address, **self._page.metadata}

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What this replica tells the autoscaler."""
        return gang_stats(self._server.load, self._max_num_sequences)

    async def wake(self) -> None:
        """Does nothing: a router calls it so that Serve sees that a gang is wanted."""

    async def check_health(self) -> None:
        """Raises when the replica must be replaced."""
        if not self._server.healthy:
            raise RuntimeError("the gang's engine or frame server has stopped")

    async def __del__(self) -> None:
        """Serve's hook for a graceful end; routers have heard by now that this gang takes nothing new."""
        num_handed_over = await self._server.drain(self._drain_s)
        if num_handed_over:
            _log.info("%d sequences were handed over", num_handed_over)
        await self._page.stop()
        await self._server.stop()


def _build_engine(config: EngineConfig, on_event: OnEvent, workers: RayWorkers | None, host: str) -> EngineLoop:
    with step(on_event, "loading torch"):
        from ...workers.engine_builder import build_engine_loop

    return build_engine_loop(config, on_event, None if workers is None else workers.spawn, host)
