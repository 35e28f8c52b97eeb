"""What a million users cost: Redis and each router, where users have keys, and where they come with tokens.

A Redis server as `motet serve` starts it is filled with keys of users, a thousand of each tenant. A process that holds
nothing but a router's view starts beside it, looks keys up, and waits for a key that is made and for its deletion.
Another one opens and settles an answer of each of as many users with tokens, who have a quota each, and says what is
left once they have gone. The ledger takes an answer of each of many users of one tenant, and of each of a thousand of
another, on one day; its bytes are shown before and after that month has passed.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import msgspec
import psutil
from msgspec.structs import replace
from redis.asyncio import Redis

from motet.adapters.registry.administration.key_registry import KeyRegistry
from motet.adapters.registry.ledger.ledger import Ledger
from motet.adapters.registry.registry import Registry, connect
from motet.adapters.registry.registry_keys import API_KEYS
from motet.adapters.registry.registry_view import RegistryView
from motet.adapters.registry.tenants.records import Actor, KeyRecord, Quota, TenantRecord
from motet.cluster.launch.redis_server import RedisServer
from motet.router.http.auth import Identity
from motet.router.tenancy.account import AnswerRequest, Ending, Progress
from motet.router.tenancy.quotas import Quotas
from motet.tests.rigs.ledger_entries import bytes_by_kind, realistic_answers

KEYS_OF_A_TENANT = 1000
NUM_CHANGES = 21
AT_ONCE = 200  # users whose answers are under way
LEFT_AFTER_S = 80.0  # their minute is over then, and what routers held of it is back
PATIENCE_S = 600.0
_SPENT = Progress(num_prompt_tokens=100, num_cached_tokens=0, num_completion_tokens=50)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=1_000_000, help="users with a key each; 0: none")
    parser.add_argument("--tokens", type=int, default=100_000, help="users with tokens; 0: none")
    parser.add_argument("--ledger", type=int, default=100_000, help="users of one tenant who ask on a day; 0: none")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)  # the child process: what, and the registry's URL
    options = parser.parse_args()
    if options.measure:
        what, url = options.measure
        found = asyncio.run(started(url) if what == "keys" else passed(url, options.tokens))
        print(json.dumps(found))
        return
    with tempfile.TemporaryDirectory() as folder:
        server = RedisServer(Path(folder) / "redis")
        url = server.start()
        try:
            if options.ledger:  # first, as it empties Redis in the end
                print(json.dumps(asyncio.run(ledger(url, options.ledger))), flush=True)
            of_redis = {"redis_bytes_a_key": asyncio.run(fill(url, options.keys))}
            for what in ("keys", "tokens"):
                if not getattr(options, what):
                    continue
                command = [sys.executable, __file__, "--tokens", str(options.tokens), "--measure", what, url]
                found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
                print(json.dumps({"users": getattr(options, what), "with": what, **of_redis, **found}), flush=True)
                of_redis = {}
        finally:
            server.stop()


async def fill(url: str, num_keys: int) -> float:
    """Bytes of a key."""
    client = connect(url, PATIENCE_S)
    before = (await client.info("memory"))["used_memory"]
    for start in range(0, num_keys, 5000):
        records: dict[Any, Any] = {}
        for number in range(start, min(start + 5000, num_keys)):
            key_hash = hashlib.sha256(str(number).encode()).hexdigest()
            key = KeyRecord(
                key_id=key_hash[:16],
                tenant=f"tenant{number // KEYS_OF_A_TENANT}",
                user=f"user-{number:07}",
                created_at=1760000000.123,
            )
            records[key_hash] = msgspec.json.encode(key).decode()
        await client.hset(API_KEYS, mapping=records)
    grown = (await client.info("memory"))["used_memory"] - before
    await client.aclose()
    return round(float(grown) / max(num_keys, 1), 1)


async def started(url: str) -> dict[str, float]:
    """A router's view of all keys."""
    client = connect(url, PATIENCE_S)
    before, began, cpu_began = _resident(), time.perf_counter(), time.process_time()
    view = RegistryView(Registry(client))
    await view.start()
    took_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
    num_keys = view.keys.num_keys
    grown = _resident() - before
    lookups = {
        "known_key_us": _lookup_us(view, [str(number) for number in range(0, num_keys, max(1, num_keys // 20_000))]),
        "unknown_key_us": _lookup_us(view, [f"unknown {number}" for number in range(20_000)]),
        **await changes(connect(url, PATIENCE_S), view),
    }
    await view.stop()
    await client.aclose()
    return {
        "start_s": round(took_s, 1),
        "start_cpu_s": round(cpu_s, 1),
        "router_mib": round(grown / 2**20, 1),
        "router_bytes_a_key": round(grown / max(num_keys, 1)),
        **lookups,
    }


async def ledger(url: str, num_users: int) -> dict[str, Any]:
    """Bytes of Redis for each user of a tenant with so many, and of one with a thousand, by what they are for."""
    client, answers = connect(url, PATIENCE_S), realistic_answers(1000, num_adapters=50)
    kept, found = Ledger(client, kept_days=3, timeout_s=PATIENCE_S), dict[str, Any]()
    for tenant, users in (("many", num_users), ("few", KEYS_OF_A_TENANT)):
        for start in range(0, users, len(answers)):
            await kept.take(
                [
                    replace(one, tenant=tenant, id=f"cmpl-{start + number:025}", user=f"user-{start + number:07}")
                    for number, one in enumerate(answers)
                ]
            )
        for when in ("now", "later"):
            by_kind = await bytes_by_kind(client, tenant)
            for kind in ("records", "groups", "hours", "days") if when == "now" else ("days",):
                found[f"{tenant}_{kind}_bytes_a_user_{when}"] = round(by_kind[kind] / users, 1)
            began = time.perf_counter()
            await kept.fold_users(tenant, date(2027, 1, 1))
            if when == "now":
                found[f"{tenant}_fold_s"] = round(time.perf_counter() - began, 2)
    await client.flushall()
    await client.aclose()
    return {"users": num_users, "with": "ledger", **found}


def _lookup_us(view: RegistryView, keys: Sequence[str]) -> float:
    """CPU of a look-up as each request makes it, the key's hash included."""
    began = time.process_time()
    for key in keys:
        view.key(key)
    return round(1e6 * (time.process_time() - began) / len(keys), 1)


async def changes(client: Redis, view: RegistryView) -> dict[str, float]:
    """How long after a key was made, and deleted, by another process than this router it is known, and is not."""
    keys, actor, took_ms = KeyRegistry(client), Actor(kind="operator"), []
    for _ in range(NUM_CHANGES):
        made, key = await keys.create(KeyRecord(key_id="", tenant="acme"), actor)
        began = time.perf_counter()
        while view.key(key) is None:  # noqa: ASYNC110 - a view has no such event
            await asyncio.sleep(0)
        middle = time.perf_counter()
        found = view.keys.key_with_id(made.key_id)
        assert found is not None
        await keys.delete(*found, actor)
        deleted = time.perf_counter()
        while view.key(key) is not None:  # noqa: ASYNC110
            await asyncio.sleep(0)
        took_ms.append((1e3 * (middle - began), 1e3 * (time.perf_counter() - deleted)))
    await client.aclose()
    made_ms, revoked_ms = (sorted(some)[NUM_CHANGES // 2] for some in zip(*took_ms, strict=True))
    return {"new_key_ms": round(made_ms, 2), "revoked_key_ms": round(revoked_ms, 2)}


async def passed(url: str, num_users: int) -> dict[str, float]:
    """What is left in a router, and in Redis, of users who have each asked once."""
    client = connect(url, PATIENCE_S)
    quotas = Quotas(client, lambda: 1, wait_s=PATIENCE_S)
    quotas.start()
    tenant = TenantRecord(name="acme", user_quota=Quota(requests_per_minute=60, tokens_per_minute=100_000))
    for number in range(AT_ONCE):
        await _ask(quotas, tenant, f"warm-{number}")
    redis_before, before = (await client.info("memory"))["used_memory"], _resident()
    num_objects = len(gc.get_objects())
    began, cpu_began, most = time.perf_counter(), time.process_time(), 0
    for start in range(0, num_users, AT_ONCE):
        numbers = range(start, min(start + AT_ONCE, num_users))
        await asyncio.gather(*(_ask(quotas, tenant, f"user-{number}") for number in numbers))
        most = max(most, _resident() - before)
    took_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
    redis_most = (await client.info("memory"))["used_memory"] - redis_before
    await asyncio.sleep(LEFT_AFTER_S)
    left, redis_left = _resident() - before, (await client.info("memory"))["used_memory"] - redis_before
    num_held = len(quotas._holders) + len(quotas._grants)
    await quotas.stop()
    await client.aclose()
    return {
        "users_a_second": round(num_users / took_s),
        "cpu_us_a_user": round(1e6 * cpu_s / num_users),
        "most_router_mib": round(most / 2**20, 1),
        "router_mib_left": round(left / 2**20, 1),  # the process keeps memory that is free again
        "objects_left": len(gc.get_objects()) - num_objects,
        "limits_left": num_held,
        "redis_bytes_a_user": round(redis_most / num_users, 1),  # of those of the last minute
        "redis_bytes_left_a_user": round(redis_left / num_users, 1),
    }


async def _ask(quotas: Quotas, tenant: TenantRecord, user: str) -> None:
    """One answer of a user with a token, from its account's opening to its end."""
    key = KeyRecord(key_id=f"token-{user}", tenant=tenant.name, user=user)
    requested = AnswerRequest(
        identity=Identity(tenant, key, subject=user),
        response_id=f"cmpl-{user}",
        model="base",
        version=None,
        user="",
        num_prompt_tokens=100,
        num_new_tokens=50,
        num_sequences=1,
        is_resumed=False,
        progress=lambda: _SPENT,
    )
    account = await quotas.open(requested)
    account.settle(Ending(progress=_SPENT, error="", is_cancelled=False, first_token_s=0.1, duration_s=0.2))


def _resident() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


if __name__ == "__main__":
    main()
