"""How much memory processes of this machine, or of this container, may use."""

from __future__ import annotations

from pathlib import Path

import psutil

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
_UNLIMITED_BYTES = 1 << 60  # what cgroups of version 1 say for it


def groups_of(controller: str, membership: Path, mount: Path) -> list[Path]:
    """Folders of a process's cgroup for a controller, of those above it, and of the one at the mount's root.

    `membership`: the process's /proc/PID/cgroup; `mount`: where cgroups are mounted, of version 2 or 1.
    """
    try:
        lines = [line.split(":", 2) for line in membership.read_text().splitlines()]
    except OSError:
        lines = []
    # A container may see its own cgroup at the root, and no other.
    roots = {mount: Path("/"), mount / controller: Path("/")}
    for _, controllers, path in lines:
        if not controllers:
            roots[mount] = Path(path)
        elif controller in controllers.split(","):
            roots[mount / controller] = Path(path)
    return [root / above.relative_to("/") for root, path in roots.items() for above in (path, *path.parents)]


def memory_limit(mount: Path = CGROUPS, membership: Path = MEMBERSHIP) -> int | None:
    """The least limit of the process's cgroup and those above it, as a container or a service has. None: none has."""
    limits = [_limit_of(group) for group in groups_of("memory", membership, mount)]
    return min((limit for limit in limits if limit is not None), default=None)


def usable_memory_bytes() -> int:
    """The memory of the container or service or, if it has no limit, of the machine."""
    total: int = psutil.virtual_memory().total
    return min(total, memory_limit() or total)


def _limit_of(group: Path) -> int | None:
    for name in ("memory.max", "memory.limit_in_bytes"):
        try:
            text = (group / name).read_text().strip()
        except OSError:
            continue
        return int(text) if text.isdigit() and int(text) < _UNLIMITED_BYTES else None
    return None
