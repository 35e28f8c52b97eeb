"""Who gets a deleted tenant's name gets nothing of what the one before used, though its lines come late."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from motet.tests.rigs.patience import PATIENCE_S
from motet.tests.rigs.real_front import OPERATOR_KEY, real_front
from motet.tests.rigs.router_rig import BASE, text_service
from motet.tests.rigs.usage_reconciliation import ledger_entries
from motet.workers.wire.messages import SequenceUpdate

OPERATORS = {"Authorization": f"Bearer {OPERATOR_KEY}"}
REQUESTED = {"model": BASE, "prompt": "hello", "max_tokens": 50}


async def test_what_a_deleted_tenant_had_under_way_is_not_its_successors(redis_url: str, tmp_path: Path) -> None:
    async with real_front(redis_url, tmp_path, text_service()) as front, front.client() as client:

        async def new_tenant() -> dict[str, str]:
            made = await client.post("/v1/admin/tenants", headers=OPERATORS, json={"name": "acme"})
            assert made.status_code == 201, made.text
            key = await client.post("/v1/admin/tenants/acme/keys", headers=OPERATORS, json={})
            return {"Authorization": f"Bearer {key.json()['key']}"}

        async def entries_of(tenant_id: str) -> list[Any]:
            async with asyncio.timeout(PATIENCE_S):
                while not (found := await ledger_entries(front.redis, [tenant_id], tenant="acme")):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            return [*found.values()]

        first = await new_tenant()
        front.dispatcher.hangs = True
        front.dispatcher.script = lambda request: [SequenceUpdate(1, [40])]
        stream = asyncio.create_task(client.post("/v1/completions", headers=first, json=REQUESTED))
        async with asyncio.timeout(PATIENCE_S):
            while not (front.dispatcher.streams and front.dispatcher.streams[-1].num_read):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        deleted = await client.delete("/v1/admin/tenants/acme", headers=OPERATORS)
        assert deleted.status_code == 200
        second = await new_tenant()
        stream.cancel()
        await asyncio.gather(stream, return_exceptions=True)
        assert [entry.output_tokens for entry in await entries_of("acme")] == [1]
        for path, headers in (("/v1/usage", second), ("/v1/admin/usage", OPERATORS)):
            assert (await client.get(f"{path}?by=key", headers=headers)).json()["data"] == []

        front.dispatcher.hangs, front.dispatcher.script = False, None
        answer = await client.post("/v1/completions", headers=second, json=REQUESTED)
        assert answer.status_code == 200
        assert [entry.id for entry in await entries_of("acme~1")] == [answer.json()["id"]]
        for path, headers in (("/v1/usage", second), ("/v1/admin/usage?by=tenant&tenant=acme", OPERATORS)):
            assert (await client.get(path, headers=headers)).json()["total"]["requests"] == 1
        rows = (await client.get("/v1/admin/usage?by=tenant", headers=OPERATORS)).json()["data"]
        assert [(row["tenant"], row["requests"]) for row in rows] == [("acme", 1)]

        # Nor does one see from a shared prefix what the other has requested.
        salts = [request.cache_salt for request in front.dispatcher.submitted]
        assert len(salts) == len({*salts}) == 2
