"""Requests of tenants with quotas that are refused because Redis answers late."""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from pathlib import Path

from motet.adapters.registry.registry import connect
from motet.adapters.registry.tenants.records import Quota
from motet.cluster.launch.redis_server import RedisServer
from motet.router.http.errors import ApiError
from motet.router.tenancy.quotas import Quotas
from motet.tests.rigs.late_redis import late_redis
from motet.tests.rigs.quota_rig import ending, identity, requested

_NUM_TENANTS = 20
_PAUSE_S = 0.025  # between requests
_ANSWER_S = 0.2  # that an answer takes
_LATE_S = 0.15
_QUOTA = Quota(requests_per_minute=6000, tokens_per_minute=10**7, concurrent_streams=100)


async def refused_when_late(seconds: float, share: float = 0.1) -> float:
    """The part of requests that a router refuses while Redis answers this share of messages 0.15 s late."""
    rng = random.Random(0)
    with tempfile.TemporaryDirectory(prefix="motet-bench-") as folder:
        server = RedisServer(Path(folder) / "redis")
        async with late_redis(await asyncio.to_thread(server.start)) as late:
            late.delay_s = lambda: _LATE_S if rng.random() < share else 0.001
            client = connect(late.url)
            quotas = Quotas(client, lambda: 2)
            quotas.start()

            async def is_refused(number: int) -> bool:
                caller = identity(_QUOTA, name=f"t{rng.randrange(_NUM_TENANTS)}")
                try:
                    account = await quotas.open(requested(caller, response_id=f"cmpl-{number}"))
                except ApiError:
                    return True
                await asyncio.sleep(_ANSWER_S)
                account.settle(ending())
                return False

            requests: list[asyncio.Task[bool]] = []
            ends_at = time.monotonic() + seconds
            while time.monotonic() < ends_at:
                requests.append(asyncio.create_task(is_refused(len(requests))))
                await asyncio.sleep(_PAUSE_S)
            refused = await asyncio.gather(*requests)
            await quotas.stop()
            await client.aclose()
        await asyncio.to_thread(server.stop)
    return sum(refused) / len(refused)
