"""Reads a node's secrets from files of a folder, such as a mounted Secret of Kubernetes, or environment variables.

It is an error if a file and a variable differ, since it would be unclear which one is right.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..launch_secrets import LaunchSecrets
from ..settings.access import is_sendable
from ..settings.config_error import ConfigError
from ..settings.setting_field import SettingField, fields_of
from ..settings.settings import Settings

SECRETS_VARIABLE = "MOTET_SECRETS_DIR"
REDIS_URL = "redis-url"
OPERATOR_KEY = "operator-key"
KEYS = "keys"  # lines TENANT=KEY
CLUSTER_TOKEN = "cluster-token"  # a file's name
FILES = (REDIS_URL, OPERATOR_KEY, KEYS, CLUSTER_TOKEN)
_SETTINGS = {REDIS_URL: "redis_url", OPERATOR_KEY: "operator_key", KEYS: "keys"}


def read_secrets(path: Path | None) -> LaunchSecrets:
    """The secrets that `motet serve` has written to `path`; None: those of this node. Raises OSError, ConfigError."""
    return secrets_of_this_node() if path is None else LaunchSecrets.read(path)


def secrets_of_this_node(environ: Mapping[str, str] | None = None) -> LaunchSecrets:
    """Raises ConfigError, without secrets in its text, and OSError for a file that cannot be read."""
    environ = os.environ if environ is None else environ
    folder = Path(environ[SECRETS_VARIABLE]) if environ.get(SECRETS_VARIABLE) else None
    files = {} if folder is None else _files(folder)
    fields = {field.name: field for field in fields_of(Settings)}
    redis_url = _one(fields[_SETTINGS[REDIS_URL]], REDIS_URL, folder, files, environ)
    if not redis_url:
        accepted = f"an application needs a Redis: the file {REDIS_URL} in the folder that {SECRETS_VARIABLE} names"
        raise ConfigError(REDIS_URL, None, f"{accepted}, or REDIS_URL in the environment of every node")
    token = files.get(CLUSTER_TOKEN)
    if token is not None and not is_sendable(token):
        raise ConfigError(f"{folder}/{CLUSTER_TOKEN}", "…", "printable ASCII without spaces is needed")
    return LaunchSecrets(
        redis_url=redis_url,
        token=token,
        operator_key=_one(fields[_SETTINGS[OPERATOR_KEY]], OPERATOR_KEY, folder, files, environ),
        keys=_one(fields[_SETTINGS[KEYS]], KEYS, folder, files, environ),
    )


def key_lines(text: str) -> tuple[str, ...]:
    """The lines TENANT=KEY of a file; empty lines and lines that begin with # are skipped."""
    lines = (line.strip() for line in text.splitlines())
    return tuple(line for line in lines if line and not line.startswith("#"))


def _files(folder: Path) -> dict[str, str]:
    """The text of each file there is. Names that begin with a dot are Kubernetes' own."""
    try:
        names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    except OSError as error:
        raise ConfigError(SECRETS_VARIABLE, str(folder), f"a readable folder is needed: {error}") from error
    for name in names:
        if name not in FILES:
            raise ConfigError(f"{folder}/{name}", "…", f"there is no such secret: {', '.join(FILES)} are known")
    try:
        return {name: (folder / name).read_text().strip() for name in names}
    except UnicodeDecodeError as error:
        raise ConfigError(str(folder), "…", "the files must be text") from error


def _one(
    field: SettingField, name: str, folder: Path | None, files: Mapping[str, str], environ: Mapping[str, str]
) -> Any:
    variable = environ.get(field.mark.env)
    in_variable = None
    if variable:
        in_variable = _converted(field, field.mark.env, variable.split() if field.is_list else variable)
    if name not in files:
        return in_variable
    in_file = _converted(field, f"{folder}/{name}", key_lines(files[name]) if field.is_list else files[name])
    if variable and in_file != in_variable:
        raise ConfigError(f"{folder}/{name}", "…", f"{field.mark.env} is set differently: give one of them")
    return in_file


def _converted(field: SettingField, place: str, given: object) -> object:
    try:
        return field.converted(given)
    except ConfigError as error:
        raise ConfigError(place, error.value, error.accepted) from None
