"""How many threads a worker computes with where nobody has said so."""

from __future__ import annotations

import os
from pathlib import Path

# A router costs under a millisecond a request and HAProxy less, so together they need a part of one core, but soon: a
# step in which one of the threads must wait for its core makes all others wait.
CORES_KEPT = 1
# Not kept where it would leave a gang alone with fewer than these: on two cores, two threads computed 1.9 times what
# one did with everything beside them.
FEWEST_CORES = 2
CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def threads_of_a_worker(num_cores: int, num_gangs: int, workers_per_gang: int, cores_kept: int = CORES_KEPT) -> int:
    """An equal share of the machine's cores, less those that are kept for routers and HAProxy; at least 1."""
    cores_of_gangs = max(num_cores - cores_kept, min(num_cores, FEWEST_CORES))
    return max(1, cores_of_gangs // (num_gangs * workers_per_gang))


def usable_cores(quota_path: Path = CGROUP_QUOTA) -> int:
    """Cores that this process may use: of those that it was given, as many as its container may keep busy."""
    # Linux alone can tell which cores a process was given.
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = quota_path.read_text().split()
    except (OSError, ValueError):
        return num_cores
    return num_cores if quota == "max" else max(1, min(num_cores, int(quota) // int(period)))
