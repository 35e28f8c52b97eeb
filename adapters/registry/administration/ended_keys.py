"""Keys that ended long ago leave the registry, a few at a time."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from redis.asyncio import Redis

from ...ended_tasks import end_tasks
from ...errors import RegistryUnavailable
from ..redis_deadline import answered_within
from ..registry_keys import bind_script

KEPT_S: Final = 7 * 86_400  # after a key's end, in which its tenant sees in the list why it is refused
PAGE_SIZE: Final = 100  # keys in one script: a millisecond of Redis' time
REST_S: Final = 300.0
_BETWEEN_PAGES_S: Final = 0.1  # routers follow each deletion by an event
_log = logging.getLogger(__name__)


class EndedKeys:
    """Any number of routers may do this at once: what one has deleted, the others do not find."""

    def __init__(self, client: Redis) -> None:
        self._delete_ended = bind_script(client, "administration/delete_ended_keys.lua", allow_oom=True)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._forget_forever(), name="ended keys")

    async def stop(self) -> None:
        await end_tasks(self._task)

    async def forget(self) -> bool:
        """Deletes at most PAGE_SIZE of the keys that ended longest ago; whether there may be more.

        Raises RegistryUnavailable.
        """
        async with answered_within():
            return bool(await self._delete_ended(kept_s=KEPT_S, count=PAGE_SIZE) == PAGE_SIZE)

    async def _forget_forever(self) -> None:
        while True:
            rest_s = REST_S
            try:
                if await self.forget():
                    rest_s = _BETWEEN_PAGES_S
            except RegistryUnavailable:
                pass  # the view logs it
            except Exception:
                _log.exception("keys that have ended cannot be deleted")
            await asyncio.sleep(rest_s)
