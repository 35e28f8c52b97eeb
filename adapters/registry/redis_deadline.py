"""A bound on how long Redis may take to answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from redis.exceptions import OutOfMemoryError, RedisClusterException, RedisError

from ..errors import RegistryFull, RegistryUnavailable

TIMEOUT_S: Final = 3.0  # of one call


@asynccontextmanager
async def answered_within(timeout_s: float = TIMEOUT_S) -> AsyncIterator[None]:
    """Raises RegistryUnavailable if a command in the block fails, or has no answer in time.

    RegistryFull says that Redis refused a write because its memory is full: then nothing was written.
    """
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except OutOfMemoryError as error:
        raise RegistryFull("the registry's memory is full: nothing can be added until some of it is freed") from error
    except (RedisError, RedisClusterException, OSError, TimeoutError) as error:
        problem = str(error) or type(error).__name__
        raise RegistryUnavailable(f"the registry cannot be reached ({problem}): try again in a moment") from error
