"""A full disk under motet's own Redis: tenants with quotas are served as those without are."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

from redis.exceptions import RedisError

from motet.cluster.launch.redis_server import RedisServer
from motet.tests.rigs.batch_client import BatchClient
from motet.tests.rigs.patience import PATIENCE_S, eventually
from motet.tests.rigs.real_front import ASKER_KEY, OPERATOR_KEY, OWNER, OWNER_KEY, real_front
from motet.tests.rigs.router_rig import BASE, text_service
from motet.tests.rigs.small_disk import fill, small_disk

QUOTA = {"requests_per_minute": 1_000_000, "tokens_per_minute": 10**9, "concurrent_streams": 100}


async def test_tenants_with_quotas_are_served(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        server = RedisServer(disk / "redis", reserve_bytes=16 << 20)
        url = await asyncio.to_thread(server.start)
        try:
            await asyncio.to_thread(eventually, server.has_reserve)
            async with real_front(url, tmp_path, text_service()) as front:
                await BatchClient(front, OPERATOR_KEY).done(
                    "PATCH", f"/v1/admin/tenants/{OWNER}", json={"quota": QUOTA}
                )
                limited, free = BatchClient(front, OWNER_KEY), BatchClient(front, ASKER_KEY)
                body = {"model": BASE, "prompt": "hi", "max_tokens": 1}

                async def statuses(client: BatchClient, number: int) -> list[int]:
                    return [(await client.ask("POST", "/v1/completions", json=body)).status_code for _ in range(number)]

                assert await statuses(limited, 3) == [200] * 3
                first = server.pid
                await asyncio.to_thread(fill, disk)
                async with asyncio.timeout(PATIENCE_S):
                    while server.pid == first:  # what its last page of the file has room for it still writes
                        with suppress(RedisError):
                            await front.redis.set("a", bytes(500))
                    while await statuses(limited, 1) != [200]:
                        assert await statuses(free, 1) == [200]
                assert await statuses(limited, 50) == await statuses(free, 50) == [200] * 50
                kept = {"quota": {"requests_per_minute": 999_999}}
                await BatchClient(front, OPERATOR_KEY).done("PATCH", f"/v1/admin/tenants/{OWNER}", json=kept)
        finally:
            await asyncio.to_thread(server.stop)
