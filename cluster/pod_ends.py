"""How long Kubernetes must let clusters and pods live that are to go, so that each stream comes to its end.

KubeRay and Ray know nothing of streams: by themselves they wait 60 and 30 seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

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
    """
    node_drain_s = math.ceil(start_s + max(router_drain_s, gang_end_s(drain_s)))
    return PodEnds(
        cluster_deletion_delay_s=math.ceil(ENDPOINT_LAG_S + router_drain_s),
        node_drain_s=node_drain_s,
        termination_grace_s=math.ceil(node_drain_s + TEARDOWN_S),
    )
