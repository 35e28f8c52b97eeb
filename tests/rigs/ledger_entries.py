"""Answers as the ledger gets them, and the memory of Redis that they take."""

from __future__ import annotations

import random
from collections import Counter
from datetime import UTC, datetime

from redis.asyncio import Redis

from motet.adapters.registry.ledger.entry import Entry, Stage
from motet.adapters.registry.ledger.ledger import prefix_of
from motet.router.http.stream_position import new_response_id

MIDNIGHT = int(datetime(2026, 11, 22, tzinfo=UTC).timestamp())


def realistic_answers(count: int, num_adapters: int, tenant: str = "acme", seed: int = 0) -> list[Entry]:
    """Those of one day, in the order in which they end: chats and completions of some hundred tokens."""
    rng = random.Random(seed)
    digests = [f"{rng.getrandbits(256):064x}" for _ in range(num_adapters)]
    found = list[tuple[float, Entry]]()
    for _ in range(count):
        began_at, duration_s = MIDNIGHT + rng.randrange(86_000), rng.expovariate(1 / 8)
        adapter, prompt_tokens = rng.randrange(num_adapters), int(rng.lognormvariate(6.5, 1))
        cached_tokens = prompt_tokens // 16 * 16 if rng.random() < 0.5 else 0
        output_tokens, recomputed_tokens = 1 + int(rng.expovariate(1 / 250)), rng.choice([0] * 49 + [320])
        is_cut_off = rng.random() < 0.03
        one = Entry(
            id=str(new_response_id(rng.choice(["cmpl-", "chatcmpl-"]), began_at, rng.randbytes(7))),
            tenant=tenant,
            began_at=began_at,
            stage=Stage.CUT_OFF if is_cut_off else Stage.COMPLETE,
            key_id=f"key_{tenant}{adapter % 4}",
            adapter=f"team-{adapter % 7}-assistant-{adapter:05}",
            version=1 + adapter % 3,
            digest=digests[adapter],
            error="timeout" if is_cut_off and rng.random() < 0.2 else "",
            requests=1,
            cut_off=int(is_cut_off),
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            output_tokens=output_tokens,
            kv_device_page_ms=int(prompt_tokens / 16 * duration_s * 1000),
            adapter_device_page_ms=int(40 * duration_s * 1000 * rng.random()),
            recomputed_tokens=recomputed_tokens,
            computed_tokens=prompt_tokens - cached_tokens + output_tokens + recomputed_tokens,
        )
        found.append((began_at + duration_s, one))
    return [one for _, one in sorted(found, key=lambda pair: pair[0])]


async def bytes_by_kind(client: Redis, tenant_id: str) -> Counter[str]:
    """Memory of Redis that a tenant's ledger takes, by the part of a key that says what it holds."""
    prefix, found = prefix_of(tenant_id), Counter[str]()
    async for key in client.scan_iter(f"{prefix}*", count=1000):
        found[key.removeprefix(prefix).split(":")[0]] += await client.memory_usage(key, samples=0) or 0
    return found
