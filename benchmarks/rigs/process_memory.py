"""How the memory of a motet's processes goes on."""

from __future__ import annotations

from collections import defaultdict
from statistics import median

import psutil

ROLES = {"ServeReplica:motet:router": "router", "ServeReplica:motet:gang": "gang", "WorkerActor": "worker"}
EXECUTABLES = ("valkey-server", "redis-server", "haproxy", "gcs_server", "raylet")


class ProcessMemory:
    """Samples of resident bytes, by process; those that were killed and came again count anew."""

    def __init__(self) -> None:
        self._samples: dict[tuple[str, int], list[tuple[float, int]]] = defaultdict(list)  # at second, bytes

    def sample(self, at_s: float) -> None:
        for process in psutil.Process().children(recursive=True):
            try:
                role = _role(process)
                num_bytes = process.memory_info().rss
            except (psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied):
                continue
            if role is not None:
                self._samples[role, process.pid].append((at_s, num_bytes))

    def growth(self, from_s: float, settled_s: float) -> dict[str, tuple[int, float]]:
        """Bytes, and growth in percent, by process: the medians of the last and of the first fifth of its samples.

        Only samples from a moment on count, and only those of a process that is older than `settled_s` by then.
        """
        found = {}
        for (role, pid), samples in self._samples.items():
            begins_s = max(from_s, samples[0][0] + (settled_s if samples[0][0] > 0 else 0))
            counted = [num_bytes for at_s, num_bytes in samples if at_s >= begins_s]
            if len(counted) >= 10:
                fifth = len(counted) // 5
                first, last = median(counted[:fifth]), median(counted[-fifth:])
                found[f"{role} {pid}"] = int(last), (last / first - 1) * 100
        return found


def _role(process: psutil.Process) -> str | None:
    title = " ".join(process.cmdline()[:1])
    for part, role in ROLES.items():
        if part in title:
            return role
    name = process.name()
    return next((one for one in EXECUTABLES if name.startswith(one[:15])), None)
