"""The patience of a replica that starts with a Redis that does not answer yet.

Ray Serve gives an application up after a few failures of a constructor and starts its replicas no more. So a replica
waits for a Redis whose image is still pulled, or that fails over. A start by hand fails at once all the same: `motet
serve` registers before it starts anything.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from ...adapters.errors import RegistryUnavailable

MAX_WAIT_S = 5 * 60.0
PAUSE_S = 1.0
LOG_INTERVAL_S = 30.0

Answer = TypeVar("Answer")

_log = logging.getLogger(__name__)


async def when_redis_answers(ask: Callable[[], Awaitable[Answer]]) -> Answer:
    """What `ask` returns, which may be called many times. Raises RegistryUnavailable if it did for `MAX_WAIT_S`."""
    now = asyncio.get_running_loop().time
    began_at, log_at = now(), now()
    while True:
        try:
            return await ask()
        except RegistryUnavailable as error:
            if now() - began_at >= MAX_WAIT_S:
                raise
            if now() >= log_at:
                _log.warning("waiting for Redis, up to %.0f s: %s", MAX_WAIT_S - (now() - began_at), error)
                log_at = now() + LOG_INTERVAL_S
        await asyncio.sleep(PAUSE_S)
