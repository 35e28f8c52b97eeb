"""Ledger and quotas against what gangs computed, while clients leave and routers, gangs and Redis die: by seeds.

`--first-seed` says where to begin. A seed that fails fails again.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from hashlib import sha1
from pathlib import Path
from types import SimpleNamespace

import pytest
import redis

from motet.adapters.registry.ledger.entry import NUMBERS
from motet.adapters.registry.registry import connect
from motet.adapters.registry.tenants.records import Quota
from motet.router.fleet import open_sequence
from motet.router.generation import generation as generation_module
from motet.router.openai import generation_response
from motet.router.tenancy import grant_sender
from motet.router.tenancy.grants import EXCHANGE
from motet.tests.rigs.charging_fuzz import World
from motet.tests.rigs.router_rig import text_service
from motet.tests.rigs.simulated_time import run_simulated
from motet.tests.rigs.usage_reconciliation import ledger_entries, sums_of

TEXT = text_service()
NUM_SEEDS = 8
QUOTAS = (
    Quota(),
    Quota(concurrent_streams=4),
    Quota(requests_per_minute=12),
    Quota(tokens_per_minute=1500),
    Quota(requests_per_minute=30, tokens_per_minute=6000, concurrent_streams=8),
)


@pytest.fixture(autouse=True)
def simulated_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Routers' clocks, and Redis's in quotas, are the simulated time."""

    def now() -> float:
        return asyncio.get_running_loop().time()

    for module in (generation_module, generation_response, open_sequence, grant_sender):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=now, monotonic=now))
    source = EXCHANGE.source.replace("redis.call('TIME')", "{0, redis.call('GET', 'now')}")
    assert source != EXCHANGE.source
    of_the_test = SimpleNamespace(parameters=EXCHANGE.parameters, source=source, sha=sha1(source.encode()).hexdigest())
    monkeypatch.setattr(grant_sender, "EXCHANGE", of_the_test)


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        client.flushall()
        yield client


def play(seed: int, client: redis.Redis, url: str, folder: Path, *, is_quiet: bool = False) -> Counter[str]:
    """Runs a world, and looks at what its ledger has; what happened there."""
    client.flushall()
    random.seed(seed)
    world = World(seed, client, folder / str(seed), TEXT, is_quiet=is_quiet, quota=random.choice(QUOTAS))

    async def look() -> None:
        redis_client = connect(url)
        try:
            entries = await ledger_entries(redis_client, ["acme"])
            world.check_ledger(entries)
            total: Counter[str] = Counter(dict.fromkeys(NUMBERS, 0))
            for entry in entries.values():
                total.update(dict(zip(NUMBERS, entry.numbers, strict=True)))
            for kind in ("days", "hours"):
                assert await sums_of(redis_client, "acme", kind) == total
        finally:
            await redis_client.aclose()

    try:
        run_simulated(world.run())
        asyncio.run(look())
    except BaseException as error:
        error.add_note(f"again with --first-seed {seed}, {'quiet' if is_quiet else 'in trouble'}")
        raise
    return world.num_events


def test_what_gangs_computed_is_charged_once(
    client: redis.Redis, redis_url: str, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    first, num_events = pytestconfig.getoption("first_seed"), Counter[str]()
    kinds = ("kill", "drain", "fail", "router", "redis", "overflow", "resumed", "refused", "scores", "embeddings")
    for seed in range(first, first + 4 * NUM_SEEDS):  # more than usual only until all kinds were drawn
        if seed >= first + NUM_SEEDS and all(num_events[kind] for kind in kinds):
            break
        num_events += play(seed, client, redis_url, tmp_path)
    assert all(num_events[kind] for kind in kinds), num_events


def test_with_clients_alone_it_is_charged_to_the_token(
    client: redis.Redis, redis_url: str, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    first = pytestconfig.getoption("first_seed")
    for seed in range(first, first + 4):
        play(seed, client, redis_url, tmp_path, is_quiet=True)
