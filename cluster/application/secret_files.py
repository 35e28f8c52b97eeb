"""Secrets of this node, from files of a folder, and what follows them while they change."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from redis.asyncio import Redis
from redis.credentials import CredentialProvider

from ...adapters.registry.launches import Launches
from ...adapters.registry.registry import connect
from ...router.http.auth import OperatorKey
from ..launch_secrets import LaunchSecrets
from ..settings.access import is_sendable
from ..settings.setting_field import ConfigError, SettingField, fields_of
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
    redis_url = _read_setting(fields[_SETTINGS[REDIS_URL]], REDIS_URL, folder, files, environ)
    if not redis_url:
        accepted = f"an application needs a Redis: the file {REDIS_URL} in the folder that {SECRETS_VARIABLE} names"
        raise ConfigError(REDIS_URL, None, f"{accepted}, or REDIS_URL in the environment of every node")
    token = files.get(CLUSTER_TOKEN)
    if token is not None and not is_sendable(token):
        raise ConfigError(f"{folder}/{CLUSTER_TOKEN}", "…", "printable ASCII without spaces is needed")
    return LaunchSecrets(
        redis_url=redis_url,
        token=token,
        operator_key=_read_setting(fields[_SETTINGS[OPERATOR_KEY]], OPERATOR_KEY, folder, files, environ),
        keys=_read_setting(fields[_SETTINGS[KEYS]], KEYS, folder, files, environ),
    )


def key_lines(text: str) -> tuple[str, ...]:
    """The lines TENANT=KEY of a file; empty lines and lines that begin with # are skipped.

    >>> key_lines("# of the shops\\n\\n acme=one \\nzoo=two")
    ('acme=one', 'zoo=two')
    """
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


def _read_setting(
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


def _converted(field: SettingField, place: str, raw_value: object) -> object:
    try:
        return field.converted(raw_value)
    except ConfigError as error:
        raise ConfigError(place, error.value, error.accepted) from None


# The secret that routers show to gangs: the one that was given, or one that all make together.

NUM_BYTES = 32


async def shared_token(launch_secrets: LaunchSecrets) -> str:
    """The same at every caller with these secrets. Raises RegistryUnavailable."""
    if launch_secrets.token is not None:
        return launch_secrets.token
    client = connect(launch_secrets.redis_url)
    try:
        return await Launches(client).shared_token(secrets.token_hex(NUM_BYTES))
    finally:
        await client.aclose()


# An operators' key that follows the secrets of this node.

LOOK_S = 10.0  # between two looks, as for tenants' keys

_log = logging.getLogger(__name__)


class OperatorKeyWatch:
    """Replaces the key when the secrets say another one. Belongs to one event loop."""

    def __init__(self, key: OperatorKey, read: Callable[[], LaunchSecrets]) -> None:
        """`read`: what this node's secrets say now; it is called in a thread."""
        self._key, self._read = key, read
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._look_forever(), name="operators' key")

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def look(self) -> None:
        """Takes over a key that has changed. Without one, or with a file that cannot be read, it stays."""
        try:
            new_key = (await asyncio.to_thread(self._read)).operator_key
        except (ConfigError, OSError) as error:
            _log.error("the operators' key stays as it was: %s", error)
            return
        if new_key and new_key != self._key.now:
            self._key.now = new_key
            _log.info("the operators' key has changed")

    async def _look_forever(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look()


# A client of Redis whose password follows the secrets of this node.


class RedisCredentials(CredentialProvider):
    """User and password of the URL that the secrets say when a connection is made."""

    def __init__(self, url: str, read: Callable[[], LaunchSecrets]) -> None:
        """`url`: the one that was read at first; its host stays."""
        self._url, self._read = url, read

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """`(password,)` or `(user, password)`."""
        try:
            self._url = self._read().redis_url  # a small file in memory: Kubernetes mounts secrets so
        except (ConfigError, OSError) as error:
            _log.error("the password of Redis stays as it was: %s", error)
        url = urlsplit(self._url)
        password = unquote(url.password or "")
        return (unquote(url.username), password) if url.username else (password,)


def connect_with_secrets(url: str, read: Callable[[], LaunchSecrets] | None) -> Redis:
    """A client as of `connect`. `read`: the secrets of this node, which may change; None: they do not."""
    if read is None or not urlsplit(url).password:
        return connect(url)
    scheme, _, place = url.partition("://")
    _, _, host = urlsplit(url).netloc.rpartition("@")
    without = f"{scheme}://{host}{place.removeprefix(urlsplit(url).netloc)}"
    return connect(without, credentials=RedisCredentials(url, read))
