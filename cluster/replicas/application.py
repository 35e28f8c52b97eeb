"""The Serve application: routers in front of gangs."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from ray import serve

from ..application.live_settings import user_config_of, without_live
from ..config import MotetConfig
from ..pod_ends import gang_end_s
from ..resources import Resources, actor_options
from ..scaling import ScalingConfig
from .autoscaler import autoscaling_config
from .gang import GangReplica
from .ingress import RouterReplica
from .replica_start import MAX_FAILED_STARTS

APP = "motet"


def build_application(
    config: MotetConfig, secrets_path: Path | None, progress_path: Path | None = None, *, is_update: bool = False
) -> Any:
    """What `serve.run` takes. `secrets_path`: the file of `LaunchSecrets`, which routers and gangs read; None: each
    reads what its node has.

    `progress_path`: the file for the progress of their start. `is_update`: the application replaces a running one,
    which must have had the same secrets. Replicas whose version is the same stay and take over what they can, and so
    does a number of gangs that follows the load.
    """
    gangs: Any = serve.deployment(
        GangReplica,
        name="gang",
        user_config=user_config_of("gang", config),
        **_number_of_gangs(config.scaling_policy, is_update),
        **_place_of_a_gang(config),
        # A process that dies is noticed at once; this is for an engine that stopped inside a living one.
        health_check_period_s=1.0,
        health_check_timeout_s=30.0,
        graceful_shutdown_timeout_s=gang_end_s(config.timeouts.drain_s),
        max_constructor_retry_count=MAX_FAILED_STARTS,
    )
    routers: Any = serve.deployment(
        serve.ingress()(RouterReplica),
        name="router",
        user_config=user_config_of("router", config),
        max_surge_percent=100,  # an update starts new ones first, so that there is always one to connect to
        num_replicas=config.placement.num_routers,
        # No CPUs: a router waits more than it works, so the gangs get all of them.
        ray_actor_options=Resources(custom=config.placement.router_resources).actor_options,
        max_ongoing_requests=100_000,  # admission is the router's own business
        health_check_period_s=5.0,
        health_check_timeout_s=30.0,
        graceful_shutdown_timeout_s=config.timeouts.router_drain_s,
        max_constructor_retry_count=MAX_FAILED_STARTS,
    )
    lasting, exposition = without_live(config), config.exposition
    gangs = _with_version(gangs, lasting.engine, lasting.leader, config.logs, exposition, _place_of_a_gang(config))
    routers = _with_version(routers, *_settings_of_a_router(lasting))
    gang = gangs.bind(config.engine, config.leader, config.logs, exposition, secrets_path, progress_path, config.hub_id)
    return routers.bind(config.without_secrets(), secrets_path, gang, progress_path)


def _settings_of_a_router(config: MotetConfig) -> tuple[object, ...]:
    """All settings that a RouterReplica reads from the config."""
    waiting = (config.sequence_wait_s, config.scaling.min_gangs == 0, config.admission)
    shown = (config.logs, config.exposition)
    return (config.router, *shown, config.model_path, config.store_path, config.serving.name, config.packing, waiting)


def _with_version(deployment: Any, *settings: object) -> Any:
    """The deployment, whose replicas an update replaces only if these settings have changed.

    Serve replaces all replicas at each `serve.run` unless it is given a version, which only its internal interface
    takes. Where Serve builds the application by itself, it takes the arguments as the version of all deployments.
    """
    version = hashlib.sha256(repr(settings).encode()).hexdigest()
    return deployment.options(version=version, _internal=True)


def _number_of_gangs(scaling: ScalingConfig, is_update: bool) -> dict[str, Any]:
    """Options of the gangs' deployment: a fixed number, or a policy where there is something to decide."""
    if scaling.is_fixed:
        return {"num_replicas": scaling.max_gangs}
    return {"autoscaling_config": autoscaling_config(scaling, is_update=is_update)}


def _place_of_a_gang(config: MotetConfig) -> dict[str, Any]:
    """Options of the gangs' deployment: what the replica takes, or a bundle for the leader and one for each worker."""
    labels = dict(config.placement.gang_labels)
    if config.placement.tensor_parallel == 1:
        options = config.worker_resources.actor_options
        return {"ray_actor_options": options | ({"label_selector": labels} if labels else {})}
    bundles = list(config.gang_bundles)
    place: dict[str, Any] = {
        "ray_actor_options": actor_options(bundles[0]),
        "placement_group_bundles": bundles,
        "placement_group_strategy": config.placement.strategy.replace("-", "_").upper(),
    }
    return place | ({"placement_group_bundle_label_selector": [labels] * len(bundles)} if labels else {})
