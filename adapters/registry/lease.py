"""What one process at a time may do, as a string in Redis that expires."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Final

from redis.asyncio import Redis

from .lua_script import LuaScript
from .redis_deadline import TIMEOUT_S, answered_within

_HOLD: Final = LuaScript(Path(__file__).with_name("hold.lua"), allow_oom=True)


class Lease:
    """The lease that is stored as `key`. Raises RegistryUnavailable when Redis does not answer."""

    def __init__(self, client: Redis, key: str, timeout_s: float = TIMEOUT_S) -> None:
        self._hold = _HOLD.bind(client, {"lease": key})
        self._timeout_s = timeout_s

    async def hold(self, holder: str, hold_s: float) -> bool:
        """Gives the lease to the holder for `hold_s` from now on; 0 ends it. False: another one holds it."""
        async with answered_within(self._timeout_s):
            return bool(await self._hold(holder=holder, milliseconds=math.ceil(hold_s * 1000)))
