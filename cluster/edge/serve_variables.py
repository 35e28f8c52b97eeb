"""Environment variables that Ray and Serve need in each of their processes, on every node that serves motet.

They read them when they start. On one machine motet sets them for its own Ray (`launch/local_serve.py`), on a running
cluster it sends some with the job (`launch/joined_cluster.py`), and images set them. Tests compare `deploy/` with
this list.
"""

from __future__ import annotations

BINARY_VARIABLE = "RAY_SERVE_HAPROXY_BINARY_PATH"  # the program that Serve runs as HAProxy
# Unless both are set, tokens reach clients seconds late (docs/benchmarks.md).
SERVE_FLAGS = {"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1"}

LONGEST_STREAM_S = 24 * 3600
DEREGISTRATION_S = 5  # within which HAProxy, even on a busy machine, removes a router that stops
PORT_REST_S = 150  # before another router may get the port of one that has ended
# Variables of Serve that let streams survive while routers are replaced.
LASTING_STREAMS = {
    # Whenever routers start or stop, another HAProxy takes over. The one before must run until its last stream has
    # ended; by default Serve ends it after two minutes.
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(LONGEST_STREAM_S),
    "RAY_SERVE_PORT_QUARANTINE_S": str(PORT_REST_S),
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": str(DEREGISTRATION_S),
}
# How long Ray and Serve wait for their own processes to start. A busy machine needs longer than their defaults, after
# which they give up, or start the process a second time.
PATIENT_STARTS = {
    "RAY_gcs_server_port_wait_time_s": "120",
    "RAY_gcs_server_request_timeout_seconds": "120",
    "RAY_worker_register_timeout_seconds": "300",  # a worker first imports Ray, slowly on a busy machine
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
