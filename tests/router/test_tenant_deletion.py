"""A tenant that has used everything is deleted: what Redis still says of it is what docs/tenants.md says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from motet.adapters.registry.canary_counts import CanaryCounts
from motet.tests.rigs.lora_files import lora_files
from motet.tests.rigs.quota_rig import until
from motet.tests.rigs.real_front import OPERATOR_KEY, OWNER, OWNER_KEY, OWNERS_ADAPTER, RealFront, real_front
from motet.tests.rigs.router_rig import text_service

REGISTRY = "motet:{registry}:"
STAYS = {"audit", f"audit:{OWNER}", "audit_order", "events", "tenants", "versions"}
EXPIRES_WITHIN_S = 600
NUM_ANSWERS = 8
COMMENT = "a comment on an answer"


@pytest.fixture
async def front(redis_url: str, tmp_path: Path) -> AsyncIterator[RealFront]:
    async with real_front(redis_url, tmp_path, text_service()) as front:
        yield front


async def requested(front: RealFront, method: str, path: str, key: str = OWNER_KEY, **options: Any) -> Any:
    """The answer's JSON. The request must not be refused."""
    async with front.client() as client:
        answer = await client.request(method, path, headers={"Authorization": f"Bearer {key}"}, **options)
    assert answer.is_success, answer.text
    return answer.json()


async def content_of(redis: Redis, key: str) -> str:
    client: Any = redis
    read = {
        "hash": client.hgetall,
        "string": client.get,
        "set": client.smembers,
        "stream": client.xrange,
        "zset": lambda one: client.zrange(one, 0, -1),
        "list": lambda one: client.lrange(one, 0, -1),
    }
    return str(await read[await client.type(key)](key))


async def names_of(front: RealFront) -> set[str]:
    return {key async for key in front.redis.scan_iter()}


async def use_everything(front: RealFront) -> None:
    one, files = f"/v1/adapters/{OWNERS_ADAPTER}", lora_files(seed=7)
    tensors = await asyncio.to_thread(lambda: files.write(front.folder).read_bytes())
    form = {"adapter_config.json": files.config_bytes, "adapter_model.safetensors": tensors}
    quota = {"requests_per_minute": 600, "tokens_per_minute": 10**6, "concurrent_streams": 9, "adapters": 9}
    await requested(front, "PATCH", f"/v1/admin/tenants/{OWNER}", OPERATOR_KEY, json={"quota": quota})
    await requested(front, "POST", "/v1/adapters", data={"name": OWNERS_ADAPTER, "activate": "false"}, files=form)
    await requested(front, "PUT", f"{one}/aliases/live", json={"version": 1})
    await requested(front, "PATCH", f"{one}/versions/2", json={"note": 'a note "id":"0123"'})
    await requested(front, "POST", "/v1/keys", json={"expires_in_s": 1000})
    for round_ in range(2):  # a trial that has ended, and one that runs
        await requested(front, "PUT", f"{one}/canary", json={"version": 2, "share": 0.5})
        body = {"model": OWNERS_ADAPTER, "prompt": "hi", "max_tokens": 2}
        answers = [
            await requested(front, "POST", "/v1/completions", json={**body, "user": f"u{i}"})
            for i in range(NUM_ANSWERS // 2)
        ]
        await front.canaries.flush()
        said = {"thumb": "up", "comment": COMMENT}
        reported = await asyncio.gather(
            *(requested(front, "POST", "/v1/feedback", json={"id": answer["id"], **said}) for answer in answers)
        )
        assert all(one["counted"] for one in reported)
        if not round_:
            await requested(front, "DELETE", f"{one}/canary")
    await requested(front, "PUT", f"{one}/shadow", json={"version": 2, "share": 0.5})
    await CanaryCounts(front.redis).note_failures({(OWNER, OWNERS_ADAPTER, 2): "it is too large"})


async def test_what_redis_says_of_a_deleted_tenant(front: RealFront) -> None:
    await use_everything(front)

    async def is_metered() -> bool:
        rows = (await requested(front, "GET", "/v1/usage"))["data"]
        return bool(sum(row["requests"] for row in rows) == NUM_ANSWERS)

    await until(is_metered)
    before = await names_of(front)
    kinds = {name.removeprefix(REGISTRY).partition(":")[0] for name in before if name.startswith(REGISTRY)}
    assert {"answers", "answer_order", "canary", "canary_comments", "canary_names", "failed", "made_keys"} <= kinds
    assert {"keys", "key_ends", "names", "adapters", "stored", "version_notes", "audit"} <= kinds
    await requested(front, "DELETE", f"/v1/admin/tenants/{OWNER}", OPERATOR_KEY)
    left = {}
    for name in await names_of(front):
        content = await content_of(front.redis, name)
        assert COMMENT not in content, name
        if OWNER in name + content and not 0 < await front.redis.ttl(name) <= EXPIRES_WITHIN_S:
            left[name.removeprefix(REGISTRY)] = content
    assert left.keys() == STAYS
    assert left["versions"].count(OWNER) == 2 and left["tenants"].count(f"'{OWNER}'") == 1
    after = {name.removeprefix(REGISTRY).partition(":")[0] for name in await names_of(front)}
    assert not after & {
        "canary",
        "canary_sticky",
        "canary_comments",
        "canary_names",
        "answers",
        "answer_order",
        "made_keys",
        "key_ends",
    }
    assert [await front.uploads.sweep(older_than_s=0.0) for _ in range(2)] == [0, 2]  # the first one marks them
    assert [path.name for path in front.folder.rglob("*.gz")] == [f"{OWNER}.jsonl.gz"]
