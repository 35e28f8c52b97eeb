"""An operators' key that follows the secrets of this node."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from ...router.operator_key import OperatorKey
from ..launch_secrets import LaunchSecrets
from ..settings.config_error import ConfigError

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
            found = (await asyncio.to_thread(self._read)).operator_key
        except (ConfigError, OSError) as error:
            _log.error("the operators' key stays as it was: %s", error)
            return
        if found and found != self._key.now:
            self._key.now = found
            _log.info("the operators' key has changed")

    async def _look_forever(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look()
