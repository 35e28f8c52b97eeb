"""What Ray and Serve must find in the environment of each of their processes, on every node that serves motet.

They read it when they start. On one machine motet sets it for its own Ray (`launch/local_serve.py`), on a running
cluster it sends its part with the job (`launch/joined_cluster.py`), and images contain it. Tests compare `deploy/` and
`motet doctor` with this list.
"""

from __future__ import annotations

from collections.abc import Mapping

BINARY_VARIABLE = "RAY_SERVE_HAPROXY_BINARY_PATH"  # what Serve runs for HAProxy
# Without either of them a token takes seconds on its way out (docs/benchmarks.md).
SERVE_FLAGS = {"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1"}

LONGEST_STREAM_S = 24 * 3600
DEREGISTRATION_S = 5  # until HAProxy, on a busy machine too, has removed a router that stops
PORT_REST_S = 150  # before another router gets the port of one that is gone
# Variables of Serve that let streams survive changes of routers.
LASTING_STREAMS = {
    # Whenever routers start or stop, another HAProxy takes over. The one before must run until its last stream has
    # ended; by default Serve ends it after two minutes.
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(LONGEST_STREAM_S),
    "RAY_SERVE_PORT_QUARANTINE_S": str(PORT_REST_S),
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": str(DEREGISTRATION_S),
}
# How long Ray and Serve wait for parts of themselves to start. A busy machine needs longer than their defaults, after
# which they give up, or start the part a second time.
PATIENT_STARTS = {
    "RAY_gcs_server_port_wait_time_s": "120",
    "RAY_gcs_server_request_timeout_seconds": "120",
    "RAY_worker_register_timeout_seconds": "300",  # of a process that has yet to import what it runs
    "RAY_agent_register_timeout_ms": "300000",  # without its agents a raylet ends itself
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    "RAY_SERVE_HAPROXY_STARTUP_TIMEOUT_S": "120",
}
# Serve gives a deployment up for good after this number of failed starts for each replica, 3 by default. motet's
# replicas pause after a failed start (`replicas/replica_start.py`), and go on for as long as it takes.
LASTING_STARTS = {"RAY_SERVE_MAX_PER_REPLICA_RETRY_COUNT": "1000000"}
# Makes the C library allocate huge pages, which speeds up reading weights. Native linears allocate them by themselves;
# this is for other weights: experts', and those that oneDNN packs.
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
# For nodes that run nothing but motet, as pods do.
OWN_NODES = {
    "RAY_SERVE_DEFAULT_HTTP_HOST": "0.0.0.0",  # KubeRay's Serve would listen where its Service cannot reach it
    "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",  # the routers count requests themselves
    "RAY_worker_niceness": "0",  # workers are niced by default and starve beside other jobs
    "RAY_USAGE_STATS_ENABLED": "0",
}


def image_variables(edge_program: str) -> Mapping[str, str]:
    """The environment that an image sets. `edge_program`: where `motet edge-program` has written it in the image."""
    binary = {BINARY_VARIABLE: edge_program}
    return SERVE_FLAGS | binary | LASTING_STREAMS | LASTING_STARTS | PATIENT_STARTS | HUGE_PAGES | OWN_NODES
