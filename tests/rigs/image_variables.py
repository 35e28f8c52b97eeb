"""The environment that motet's images set for Ray and Serve."""

from __future__ import annotations

from collections.abc import Mapping

from motet.cluster.edge.serve_variables import (
    BINARY_VARIABLE,
    HUGE_PAGES,
    LASTING_STARTS,
    LASTING_STREAMS,
    PATIENT_STARTS,
    SERVE_FLAGS,
)

# For nodes that run nothing but motet, as pods do.
OWN_NODES = {
    "RAY_SERVE_DEFAULT_HTTP_HOST": "0.0.0.0",  # KubeRay's Serve would listen where its Service cannot reach it
    "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",  # the routers count requests themselves
    "RAY_worker_niceness": "0",  # workers are niced by default and starve beside other jobs
    "RAY_USAGE_STATS_ENABLED": "0",
}


def image_variables(edge_program: str) -> Mapping[str, str]:
    """The environment that an image sets. `edge_program`: its path in the image."""
    binary = {BINARY_VARIABLE: edge_program}
    return SERVE_FLAGS | binary | LASTING_STREAMS | LASTING_STARTS | PATIENT_STARTS | HUGE_PAGES | OWN_NODES
