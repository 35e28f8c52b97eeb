"""What a process takes of its node, in the words of Ray."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from ..workers.machine_memory import CGROUPS, MEMBERSHIP, groups_of

Placement = Literal["strict-pack", "pack", "spread"]  # of a gang's processes over nodes
PLACEMENTS: tuple[Placement, ...] = get_args(Placement)

RAYS_OWN = ("CPU", "GPU", "memory", "object_store_memory")
LEAST_AMOUNT = 0.0001  # Ray counts in these


@dataclass(frozen=True, kw_only=True)
class Resources:
    """Logical amounts: Ray counts them, and does not enforce them."""

    num_cpus: float = 0.0
    num_gpus: float = 0.0
    custom: tuple[tuple[str, float], ...] = ()  # (name, amount), as nodes were started with

    @property
    def bundle(self) -> dict[str, float]:
        """As placement groups and nodes name them."""
        named = {"CPU": self.num_cpus, "GPU": self.num_gpus, **dict(self.custom)}
        return {name: amount for name, amount in named.items() if amount > 0}

    @property
    def actor_options(self) -> dict[str, Any]:
        """As actors and Serve's replicas name them."""
        return actor_options(self.bundle)


def actor_options(bundle: Mapping[str, float]) -> dict[str, Any]:
    """The options of an actor that takes all of a bundle."""
    options: dict[str, Any] = {"num_cpus": bundle.get("CPU", 0)}
    if bundle.get("GPU", 0) > 0:
        options["num_gpus"] = bundle["GPU"]
    if custom := {name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU")}:
        options["resources"] = custom
    return options


def why_not_num_gpus(num_gpus: float) -> str | None:
    """What would be accepted instead; None if it is right."""
    if not 0 <= num_gpus < math.inf:
        return "zero or a positive number is needed"
    if num_gpus > 1 and num_gpus != int(num_gpus):
        return "a share of one GPU, 0 to 1, or a whole number of them is accepted"
    return None


def why_not_custom(custom: tuple[tuple[str, float], ...]) -> str | None:
    """What is wrong with names or amounts; None if nothing is."""
    names = [name for name, _ in custom]
    for name, amount in custom:
        if name in RAYS_OWN:
            return f"{name} is one of Ray's own resources, not a custom one: there are settings for CPUs and GPUs"
        if not name or not name.isprintable() or name != name.strip():
            return f"{name!r} is not a name of a resource: printable text without spaces around it is needed"
        if names.count(name) > 1:
            return f"{name} is given more than once"
        if not LEAST_AMOUNT <= amount < math.inf:
            return f"{amount:g} of {name}: a number from {LEAST_AMOUNT:g} is needed"
        if amount > 1 and amount != int(amount):
            return f"{amount:g} of {name}: a share of one, or a whole number, is accepted"
    return None


def why_not_labels(labels: tuple[tuple[str, str], ...]) -> str | None:
    """What is wrong with labels that nodes must have; None if nothing is."""
    keys = [key for key, _ in labels]
    for key, value in labels:
        if not key or not value or any(sign.isspace() or sign in "!(),=" for sign in key + value):
            return f"{key}={value}: KEY=VALUE without spaces, commas, brackets and exclamation marks is needed"
        if keys.count(key) > 1:
            return f"{key} is given more than once"
    return None


# The default number of threads of a worker.

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
