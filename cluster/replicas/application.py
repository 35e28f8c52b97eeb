"""The Serve application: routers in front of gangs."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray import serve

from ..application.application_config import user_config_of, without_live
from ..config import MotetConfig
from ..resources import Resources, actor_options
from ..scaling import ScalingConfig
from .autoscaler import autoscaling_config
from .gang import GangReplica
from .ingress import RouterReplica
from .replica_start import MAX_FAILED_STARTS

# How long Kubernetes must let clusters and pods live that are to go, so that each stream comes to its end.
#
# KubeRay and Ray know nothing of streams: by themselves they wait 60 and 30 seconds.

ENDPOINT_LAG_S = 30.0  # until every proxy has stopped sending requests to a cluster or pod
HAND_OVER_S = 5.0  # in which a gang that has drained hands its streams over
TEARDOWN_S = 30.0  # in which Ray ends the processes of a pod


@dataclass(frozen=True, kw_only=True)
class PodEnds:
    """The least seconds that lose no stream."""

    cluster_deletion_delay_s: int  # of a RayService: rayClusterDeletionDelaySeconds
    node_drain_s: int  # in each container: RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S
    termination_grace_s: int  # of each pod: terminationGracePeriodSeconds


def gang_end_s(drain_s: float) -> float:
    """How long Serve must wait for a gang that it stops."""
    return drain_s + HAND_OVER_S


def pod_ends(*, router_drain_s: float, drain_s: float, start_s: float) -> PodEnds:
    """The seconds for these settings. `start_s`: in which another node's gang or router is up in a lost one's place.

    Behind KubeRay's own Service or Gateway a cluster that another one replaces gets no requests once the endpoints
    have changed. The last one's stream may last as long as a terminating router would serve it. Behind a
    Service that names no cluster, such as the one in `deploy/`, it gets its share of requests until it is deleted.
    Then its pods are terminated, as a single pod is when its node is drained, and finish their streams. Ray gives
    Serve the pod's deadline. Serve starts a replacement, and stops a replica when the replacement is up or when the
    replica's own drain would pass the deadline: with a shorter drain, before there is a replacement.

    >>> pod_ends(router_drain_s=600, drain_s=5, start_s=60)
    PodEnds(cluster_deletion_delay_s=630, node_drain_s=660, termination_grace_s=690)
    """
    node_drain_s = math.ceil(start_s + max(router_drain_s, gang_end_s(drain_s)))
    return PodEnds(
        cluster_deletion_delay_s=math.ceil(ENDPOINT_LAG_S + router_drain_s),
        node_drain_s=node_drain_s,
        termination_grace_s=math.ceil(node_drain_s + TEARDOWN_S),
    )


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
        graceful_shutdown_timeout_s=gang_end_s(config.leader.drain_s),
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
    views = (config.logs, config.exposition)
    return (config.router, *views, config.model_path, config.store_path, config.serving.name, config.packing, waiting)


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
