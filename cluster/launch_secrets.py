"""Secrets that only routers and gangs may know.

Ray keeps what actors are made with where every process of the cluster, and its dashboard, may look it up; arguments of
a process show in `ps`. So secrets lie in files that only their owner can read, and replicas read them on their own
nodes: what `motet serve` has written into the data folder, which all nodes share, or what is mounted on every node
(`application/secret_files.py`).
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path

import msgspec

SECRETS_FILE = "launch_secrets"
OPERATOR_KEY_FILE = "operator_key"
OWNER_ONLY = 0o600


class LaunchSecrets(msgspec.Struct, frozen=True, kw_only=True):
    """One launch's. Not shown when it is printed."""

    redis_url: str  # with its password
    token: str | None = None  # that routers and gangs share; None: the one in the registry
    operator_key: str | None = None  # None: the one in the data folder
    keys: tuple[tuple[str, str], ...] | None = None  # (tenant, key); None: routers have nothing to do with keys

    def __repr__(self) -> str:
        return "LaunchSecrets(…)"

    def write(self, path: Path) -> None:
        """Replaces the file in one step; a concurrent reader gets the old or the new one."""
        _write(path, msgspec.json.encode(self))

    @classmethod
    def read(cls, path: Path) -> LaunchSecrets:
        """Raises OSError or msgspec.ValidationError."""
        return msgspec.json.decode(path.read_bytes(), type=cls)


def operator_key_in(data_dir: Path) -> str:
    """The operators' key of a data folder, which is made once and kept, even if several ask for it at once."""
    path = data_dir / OPERATOR_KEY_FILE
    if not path.exists():
        unfinished = _unfinished(path, f"{secrets.token_urlsafe(24)}\n".encode())
        with suppress(FileExistsError):
            os.link(unfinished, path)
        unfinished.unlink()
    return path.read_text().strip()


def _write(path: Path, content: bytes) -> None:
    _unfinished(path, content).replace(path)


def _unfinished(path: Path, content: bytes) -> Path:
    unfinished = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    handle = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, OWNER_ONLY)
    with open(handle, "wb") as file:
        file.write(content)
    return unfinished
