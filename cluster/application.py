"""The Serve application: routers in front of gangs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ray import serve

from ..workers.device import resolve_device
from .autoscaler import autoscaling_config
from .config import LEADER_NUM_CPUS, MotetConfig
from .gang import GangReplica
from .ingress import RouterReplica
from .scaling import ScalingConfig

APP = "motet"
SHUTDOWN_MARGIN_S = 5.0


def build_application(
    config: MotetConfig, token: str, progress_path: Path | None = None, *, is_update: bool = False
) -> Any:
    """What `serve.run` takes. `token`: a secret that routers and gangs share; `progress_path`: see GangReplica.

    `is_update`: it replaces a running one, and keeps its number of gangs where that goes with the load.
    """
    gangs: Any = serve.deployment(
        GangReplica,
        name="gang",
        **_number_of_gangs(config.scaling, is_update),
        **_place_of_a_gang(config),
        # A process that dies is noticed at once; this is for an engine that stopped inside a living one.
        health_check_period_s=1.0,
        health_check_timeout_s=30.0,
        graceful_shutdown_timeout_s=config.drain_s + SHUTDOWN_MARGIN_S,
        max_constructor_retry_count=1,  # a model that cannot be loaded cannot be loaded again
    )
    routers: Any = serve.deployment(
        serve.ingress()(RouterReplica),
        name="router",
        num_replicas=config.num_routers,
        ray_actor_options={"num_cpus": 0},  # it waits more than it works; the machine's share is the gangs'
        max_ongoing_requests=100_000,  # admission is the router's own business
        health_check_period_s=5.0,
        health_check_timeout_s=30.0,
        graceful_shutdown_timeout_s=config.router_drain_s,
        max_constructor_retry_count=3,
    )
    return routers.bind(config, token, gangs.bind(config.engine, token, config.drain_s, progress_path))


def _number_of_gangs(scaling: ScalingConfig, is_update: bool) -> dict[str, Any]:
    """Options of the gangs' deployment: a policy runs only where there is something to decide."""
    if scaling.is_fixed:
        return {"num_replicas": scaling.max_gangs}
    return {"autoscaling_config": autoscaling_config(scaling, is_update=is_update)}


def _place_of_a_gang(config: MotetConfig) -> dict[str, Any]:
    """Options of the gangs' deployment: the replica itself, or with it a bundle for each worker, all on one node."""
    has_gpu = resolve_device(config.device).type == "cuda"  # each worker has one of its own
    if config.tensor_parallel == 1:
        return {"ray_actor_options": {"num_cpus": config.gang_num_cpus} | ({"num_gpus": 1} if has_gpu else {})}
    workers = [{"CPU": config.gang_num_cpus} | ({"GPU": 1} if has_gpu else {})] * config.tensor_parallel
    return {
        "ray_actor_options": {"num_cpus": LEADER_NUM_CPUS},
        "placement_group_bundles": [{"CPU": LEADER_NUM_CPUS}, *workers],
        "placement_group_strategy": "STRICT_PACK",
    }
