"""The default number of threads of a worker."""

from __future__ import annotations

import os
from pathlib import Path

from ..workers.machine_memory import CGROUPS, MEMBERSHIP, groups_of

# A router costs under a millisecond a request and HAProxy less, so together they need a part of one core, but soon: a
# step in which one of the threads must wait for its core makes all others wait.
CORES_KEPT = 1
# Not kept where it would leave a gang alone with fewer than these: on two cores, two threads serve 1.2 to 1.4 times
# what one does, with router, HAProxy and clients on the same cores (benchmarks/served.py).
FEWEST_CORES = 2


def threads_of_a_worker(num_cores: int, num_gangs: int, workers_per_gang: int, cores_kept: int = CORES_KEPT) -> int:
    """An equal share of the machine's cores, less those that are kept for routers and HAProxy; at least 1."""
    cores_of_gangs = max(num_cores - cores_kept, min(num_cores, FEWEST_CORES))
    return max(1, cores_of_gangs // (num_gangs * workers_per_gang))


def usable_cores(membership: Path = MEMBERSHIP, mount: Path = CGROUPS) -> int:
    """Cores that this process may use: of those that it was given, as many as its cgroups may keep busy; at least 1."""
    # Only Linux shows which cores a process was given.
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota(membership, mount)
    return num_cores if quota is None else max(1, min(num_cores, int(quota)))


def cpu_quota(membership: Path, mount: Path) -> float | None:
    """The least number of cores that a process's cgroup, one above it, or the one at the mount's root may keep busy.

    `membership`: the process's /proc/PID/cgroup; `mount`: where cgroups are mounted, of version 2 or 1. None: no limit.
    """
    quotas = [_quota_of(group) for group in groups_of("cpu", membership, mount)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota_of(group: Path) -> float | None:
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):  # of version 2, and of version 1
        try:
            quota, period = " ".join((group / name).read_text() for name in names).split()
        except (OSError, ValueError):
            continue
        if quota not in ("max", "-1"):
            return int(quota) / int(period)
    return None
