"""A lock of packages with hashes, and what it must hold."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

IMAGES_PLATFORM = {
    "implementation_name": "cpython",
    "os_name": "posix",
    "platform_machine": "x86_64",
    "platform_python_implementation": "CPython",
    "platform_system": "Linux",
    "python_full_version": "3.11.14",
    "python_version": "3.11",
    "sys_platform": "linux",
}


def locked(path: Path) -> dict[str, str]:
    """The version of each package; fails unless each has a hash and nothing else is in the file."""
    text = re.sub(r" \\\n", "", path.read_text())
    found = {}
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        pinned = re.fullmatch(r"([a-z0-9-]+)==(\S+)(?: +--hash=sha256:[0-9a-f]{64})+", line)
        assert pinned is not None, f"{path.name} has a line that is no package with hashes: {line[:80]}"
        found[pinned[1]] = pinned[2]
    return found


def wrong_versions(requirements: Iterable[Requirement], lock: dict[str, str]) -> list[str]:
    """What is requested and not there, or in another version."""
    wrong = []
    for one in requirements:
        if not _applies(one, ""):
            continue
        version = lock.get(canonicalize_name(one.name))
        if version is None or not one.specifier.contains(version, prereleases=True):
            wrong.append(f"{one} is requested, and {version} is locked")
    return wrong


def missing(requirements: Iterable[Requirement], lock: dict[str, str]) -> list[str]:
    """What packages ask for in turn and the lock has not, as far as these packages are installed here."""
    waiting = [(one, "pyproject.toml") for one in requirements if _applies(one, "")]
    seen: set[tuple[str, ...]] = set()
    wrong: list[str] = []
    while waiting:
        one, asker = waiting.pop()
        name = canonicalize_name(one.name)
        if name not in lock:
            wrong.append(f"{asker} needs {name}")
        if (name, *sorted(one.extras)) in seen:
            continue
        seen.add((name, *sorted(one.extras)))
        try:
            requested = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for text in requested:
            needed = Requirement(text)
            if any(_applies(needed, extra) for extra in ("", *one.extras)):
                waiting.append((needed, name))
    return wrong


def _applies(one: Requirement, extra: str) -> bool:
    return one.marker is None or one.marker.evaluate({**IMAGES_PLATFORM, "extra": extra})
