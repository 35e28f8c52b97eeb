"""A client of Redis whose password follows the secrets of this node."""

from __future__ import annotations

import logging
from collections.abc import Callable
from urllib.parse import unquote, urlsplit

from redis.asyncio import Redis
from redis.credentials import CredentialProvider

from ...adapters.registry.registry import connect
from ..launch_secrets import LaunchSecrets
from ..settings.config_error import ConfigError

_log = logging.getLogger(__name__)


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
        found = urlsplit(self._url)
        password = unquote(found.password or "")
        return (unquote(found.username), password) if found.username else (password,)


def connect_with_secrets(url: str, read: Callable[[], LaunchSecrets] | None) -> Redis:
    """A client as of `connect`. `read`: the secrets of this node, which may change; None: they do not."""
    if read is None or not urlsplit(url).password:
        return connect(url)
    scheme, _, place = url.partition("://")
    _, _, host = urlsplit(url).netloc.rpartition("@")
    without = f"{scheme}://{host}{place.removeprefix(urlsplit(url).netloc)}"
    return connect(without, credentials=RedisCredentials(url, read))
