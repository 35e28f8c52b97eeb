"""What a launch and its replicas share and nobody else may know.

Ray keeps what actors are made with where every process of the cluster, and its dashboard, may look it up; arguments of
a process show in `ps`. So secrets lie in a file that only its owner can read, in the data folder, which all nodes
share. Replicas get its path.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import msgspec

SECRETS_FILE = "launch_secrets"
OPERATOR_KEY_FILE = "operator_key"
OWNER_ONLY = 0o600


class LaunchSecrets(msgspec.Struct, frozen=True, kw_only=True):
    """One launch's. Not shown when it is printed."""

    token: str  # that routers and gangs share
    redis_url: str  # with its password
    operator_key: str

    def __repr__(self) -> str:
        return "LaunchSecrets(…)"

    def write(self, path: Path) -> None:
        """Replaces the file in one step; whoever reads it meanwhile reads one or the other."""
        _write(path, msgspec.json.encode(self))

    @classmethod
    def read(cls, path: Path) -> LaunchSecrets:
        """Raises OSError or msgspec.ValidationError."""
        return msgspec.json.decode(path.read_bytes(), type=cls)


def operator_key_in(data_dir: Path) -> str:
    """The operators' key of a data folder, which is made at the first call and kept."""
    path = data_dir / OPERATOR_KEY_FILE
    if not path.exists():
        _write(path, f"{secrets.token_urlsafe(24)}\n".encode())
    return path.read_text().strip()


def _write(path: Path, content: bytes) -> None:
    unfinished = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    handle = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, OWNER_ONLY)
    with open(handle, "wb") as file:
        file.write(content)
    unfinished.replace(path)
