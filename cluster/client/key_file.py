"""Keys in files, as Kubernetes mounts secrets, or on standard input."""

from __future__ import annotations

from pathlib import Path

import click

from ..launch_secrets import OPERATOR_KEY_FILE


def read_keys(path: Path | None) -> tuple[str, ...]:
    """The lines TENANT=KEY of a file, or of standard input for "-"; those that are empty or begin with # say nothing.

    Raises ClickException.
    """
    if path is None:
        return ()
    lines = (line.strip() for line in _read(path).splitlines())
    return tuple(line for line in lines if line and not line.startswith("#"))


def read_key(path: Path) -> str:
    """The key that is all of a file, or of standard input for "-". Raises ClickException."""
    return _read(path).strip()


def operator_key_of(data_dir: Path) -> str | None:
    """The operators' key that a motet with this data folder has made, if it did and this user may read it."""
    try:
        return (data_dir / OPERATOR_KEY_FILE).read_text().strip()
    except OSError:
        return None


def _read(path: Path) -> str:
    try:
        with click.open_file(str(path)) as file:
            text: str = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise click.ClickException(f"the keys in {path} cannot be read: {error}") from error
    return text
