"""How much memory processes of this machine, or of this container, may use."""

from __future__ import annotations

from pathlib import Path

import psutil

CGROUPS = Path("/sys/fs/cgroup")
_UNLIMITED_BYTES = 1 << 60  # what cgroups of version 1 say for it


def memory_limit(mount: Path) -> int | None:
    """The limit of the container as it sees its cgroup, of version 2 or 1. None: there is none."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            text = (mount / name).read_text().strip()
        except OSError:
            continue
        return int(text) if text.isdigit() and int(text) < _UNLIMITED_BYTES else None
    return None


def usable_memory_bytes() -> int:
    """Of the container or, where it has no limit, of the machine."""
    total: int = psutil.virtual_memory().total
    return min(total, memory_limit(CGROUPS) or total)
