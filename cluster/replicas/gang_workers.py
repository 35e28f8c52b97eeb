"""The workers of a gang as Ray actors, one in each bundle of the leader's placement group."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import psutil
import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ..logs.log_config import LogConfig
from ..resources import actor_options
from .replica_logging import configure_replica_logging

if TYPE_CHECKING:  # the module imports torch, which launchers need not
    from ...workers.worker import WorkerSettings


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
        if any(one.address.partition("%")[0] == ip_address for one in addresses):
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
