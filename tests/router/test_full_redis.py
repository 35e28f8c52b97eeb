"""A Redis that has no memory left: what goes on, what is refused and how, and that nothing acknowledged is lost.

Servers differ: up to Redis 7.2 and Valkey 7.2 they also refuse to read in a MULTI then.
"""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis
from redis.exceptions import OutOfMemoryError

from motet.adapters.errors import RegistryFull
from motet.adapters.registry.launches import Launches, Lease
from motet.adapters.registry.registry import Registry, connect
from motet.adapters.registry.registry_keys import CLUSTER_TOKEN, STORED_IS_COUNTED, STREAM_KEY, UPDATED_TRIALS
from motet.cluster.application.registration import register_router
from motet.cluster.config import MotetConfig
from motet.cluster.launch.redis_server import RedisServer
from motet.router.tenancy import metering, spool
from motet.tests.rigs.lora_files import lora_files
from motet.tests.rigs.patience import PATIENCE_S
from motet.tests.rigs.ray_nodes import DEMO
from motet.tests.rigs.real_front import (
    ASKER,
    ASKER_KEY,
    BADGER_KEY,
    OPERATOR_KEY,
    OWNER,
    OWNER_KEY,
    OWNERS_ADAPTER,
    WOMBAT_KEY,
    RealFront,
    real_front,
)
from motet.tests.rigs.router_rig import BASE, text_service
from motet.tests.rigs.usage_reconciliation import Received, reconcile, sums_of

ONE = f"/v1/adapters/{OWNERS_ADAPTER}"
FULL = (507, "registry_full")


@pytest.fixture
async def front(redis_url: str, tmp_path: Path) -> AsyncIterator[RealFront]:
    async with real_front(redis_url, tmp_path, text_service()) as front:
        yield front


@asynccontextmanager
async def full(redis: Redis) -> AsyncIterator[None]:
    await redis.config_set("maxmemory", 1)
    try:
        with pytest.raises(OutOfMemoryError):
            await redis.set("a", "b")
        yield
    finally:
        await redis.config_set("maxmemory", 0)


async def until(check: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not await check():  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def ask(front: RealFront, method: str, path: str, key: str = OWNER_KEY, **options: Any) -> httpx.Response:
    async with front.client() as client, asyncio.timeout(PATIENCE_S):
        return await client.request(method, path, headers={"Authorization": f"Bearer {key}"}, **options)


async def done(front: RealFront, method: str, path: str, key: str = OWNER_KEY, **options: Any) -> Any:
    answer = await ask(front, method, path, key, **options)
    assert answer.is_success, answer.text
    return answer.json() if answer.content else None


async def refusal(front: RealFront, method: str, path: str, key: str = OWNER_KEY, **options: Any) -> tuple[int, str]:
    answer = await ask(front, method, path, key, **options)
    return answer.status_code, answer.json()["error"]["code"]


async def complete(front: RealFront, model: str = OWNERS_ADAPTER, key: str = OWNER_KEY) -> Received:
    answer = await done(front, "POST", "/v1/completions", key, json={"model": model, "prompt": "hi", "user": "u"})
    usage = answer["usage"]
    tenant = OWNER if key == OWNER_KEY else ASKER
    return Received(answer["id"], tenant, True, usage["prompt_tokens"], usage["completion_tokens"])


def upload(front: RealFront, seed: int) -> dict[str, Any]:
    files = lora_files(seed=seed)
    tensors = files.write(front.folder).read_bytes()
    files_sent = {"adapter_config.json": files.config_bytes, "adapter_model.safetensors": tensors}
    return {"data": {"name": OWNERS_ADAPTER, "activate": "false"}, "files": files_sent}


async def test_completions_go_on_and_all_of_them_are_in_the_ledger_and_in_the_counts(front: RealFront) -> None:
    quota = {"requests_per_minute": 600, "tokens_per_minute": 10**6, "concurrent_streams": 9}
    await done(front, "PATCH", f"/v1/admin/tenants/{OWNER}", OPERATOR_KEY, json={"quota": quota})
    await done(front, "POST", "/v1/adapters", **upload(front, 3))
    await done(front, "PUT", f"{ONE}/canary", json={"version": 2, "share": 0.5})
    received = [await complete(front)]
    async with full(front.redis):
        received += [await complete(front) for _ in range(5)]
        received += [await complete(front, BASE, ASKER_KEY)]
        spool_bytes = sum(path.stat().st_size for path in (front.folder / "ledger").glob("*.log"))
        assert spool_bytes  # what Redis does not have is there

    async def has_all() -> bool:
        return (await sums_of(front.redis, OWNER, "days"))["requests"] == 6 and bool(
            (await sums_of(front.redis, ASKER, "days"))["requests"]
        )

    await until(has_all)
    await reconcile(front.redis, received)

    async def are_counted() -> bool:
        return sum(map(int, await front.redis.hvals(UPDATED_TRIALS))) == 6

    await until(are_counted)
    assert (await ask(front, "POST", "/v1/completions", json={"model": BASE, "prompt": "hi"})).status_code == 200


async def test_users_quotas_hold(front: RealFront) -> None:
    bounds = {"requests_per_minute": 2}
    await done(front, "PATCH", f"/v1/admin/tenants/{ASKER}", OPERATOR_KEY, json={"user_quota": bounds})
    ask_base = {"json": {"model": BASE, "prompt": "hi", "max_tokens": 1}}
    async with full(front.redis):
        for _ in range(2):
            await complete(front, BASE, BADGER_KEY)
        assert await refusal(front, "POST", "/v1/completions", BADGER_KEY, **ask_base) == (429, "rate_limit_exceeded")
        await complete(front, BASE, WOMBAT_KEY)


async def test_completions_are_refused_once_the_spool_is_full_and_go_on_afterwards(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool, "SEGMENT_BYTES", 16 << 10)
    monkeypatch.setattr(metering, "_FIXED_BYTES", 2 << 10)
    monkeypatch.setattr(spool.Spool.__init__, "__defaults__", (16 << 10,))
    monkeypatch.setattr("motet.tests.rigs.real_front.SPOOL_BYTES", 32 << 10)
    async with real_front(redis_url, tmp_path, text_service()) as front:
        received = []
        async with full(front.redis):
            for _ in range(1000):
                answer = await ask(front, "POST", "/v1/completions", json={"model": BASE, "prompt": "hi"})
                if answer.status_code != 200:
                    break
                usage = answer.json()["usage"]
                tokens = usage["prompt_tokens"], usage["completion_tokens"]
                received.append(Received(answer.json()["id"], OWNER, True, *tokens))
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "ledger_full")
            assert received and answer.headers["retry-after"]

        async def goes_on() -> bool:
            answer = await ask(front, "POST", "/v1/completions", ASKER_KEY, json={"model": BASE, "prompt": "hi"})
            return answer.status_code == 200

        await until(goes_on)

        async def has_all() -> bool:
            return (await sums_of(front.redis, OWNER, "days"))["requests"] == len(received)

        await until(has_all)


async def test_what_adds_to_the_registry_is_refused_and_what_frees_it_works(front: RealFront) -> None:
    await done(front, "POST", "/v1/adapters", **upload(front, 3))
    made = await done(front, "POST", "/v1/keys", json={})
    answer = await complete(front)

    async def is_metered() -> bool:
        return bool((await sums_of(front.redis, OWNER, "days"))["requests"])

    await until(is_metered)
    await done(front, "PUT", f"{ONE}/canary", json={"version": 2, "share": 0.5})
    async with full(front.redis):
        # An upload leaves nothing.
        stored = await front.stored()
        assert await refusal(front, "POST", "/v1/adapters", **upload(front, 4)) == FULL
        assert (await front.stored())[0] == stored[0]
        # Changes that need hardly any memory work: ends of canaries, promotions, rollbacks, new keys, revocations and
        # deletions.
        await done(front, "DELETE", f"{ONE}/canary")
        await done(front, "POST", f"{ONE}/promote", json={"version": 2})
        await done(front, "POST", f"{ONE}/rollback", json={})
        assert (await front.registry.names.get(OWNER, OWNERS_ADAPTER)).current.version == 1
        await done(front, "POST", "/v1/keys", json={})
        await done(front, "DELETE", f"/v1/keys/{made['id']}")
        await front.view.catch_up()
        assert await refusal(front, "GET", "/v1/models", made["key"]) == (401, "invalid_api_key")
        await done(front, "DELETE", ONE)
        await done(front, "DELETE", f"/v1/admin/tenants/{OWNER}", OPERATOR_KEY)
    # Its usage is archived.
    assert OWNER not in [row["name"] for row in (await done(front, "GET", "/v1/admin/tenants", OPERATOR_KEY))["data"]]
    (path,) = (front.folder / "archive").rglob(f"{OWNER}.jsonl.gz")
    assert answer.id in gzip.decompress(path.read_bytes()).decode()
    actions = [one["action"] for one in (await done(front, "GET", "/v1/admin/audit", OPERATOR_KEY))["data"]]
    assert {"key.delete", "adapter.delete", "tenant.delete"} <= {*actions}


async def test_launches_and_leases_hold(front: RealFront) -> None:
    launches, lease = Launches(front.redis), Lease(front.redis, "lease", PATIENCE_S)
    registry = Registry(front.redis, PATIENCE_S)
    token = await launches.shared_token("token")
    async with full(front.redis):
        assert (await launches.heartbeat("one"))["one"] == 1
        assert (await launches.heartbeat("one"))["one"] == 2
        assert await launches.shared_token("another") == token
        assert await registry.share_stream_key(b"another") != b"another"
        assert await lease.hold("one", 10.0) and not await lease.hold("other", 10.0)
        with pytest.raises(RegistryFull):
            await front.uploads.upload(
                ASKER, "more", lora_files(seed=5).config_bytes, lora_files(seed=5).write(front.folder)
            )


async def test_a_router_starts(front: RealFront, redis_url: str, tmp_path: Path) -> None:
    registry = Registry(front.redis, PATIENCE_S)
    objectives = ((OWNER, 1.0),)  # so that it looks for the tenant among all keys
    config = MotetConfig.of(model_path=DEMO / "base", data_dir=tmp_path / "data", latency_objectives_s=objectives)
    config.serving.data_dir.mkdir()
    await front.redis.delete(STORED_IS_COUNTED, STREAM_KEY, CLUSTER_TOKEN)  # as if no router had started here
    async with full(front.redis):
        await register_router(registry, config, "launch", [(ASKER, "key-of-the-launch")])
        assert await Launches(front.redis).shared_token("token") == "token"
        async with real_front(redis_url, tmp_path, text_service(), is_first=False) as another:
            assert another.view.connected
            await complete(another)


async def test_a_server_of_our_own_has_its_bound(tmp_path: Path) -> None:
    server = RedisServer(tmp_path, max_bytes=64 << 20)
    client = connect(await asyncio.to_thread(server.start), PATIENCE_S)
    try:
        bound = await client.config_get("maxmemory*")
        assert (bound["maxmemory"], bound["maxmemory-policy"]) == (str(64 << 20), "noeviction")
    finally:
        await client.aclose()
        await asyncio.to_thread(server.stop)
