"""The Lua of quotas against its twin in Python, and what it keeps in Redis."""

from __future__ import annotations

import asyncio
import random

import pytest
from redis.asyncio import Redis

from motet.adapters.registry.tenants.records import Quota
from motet.router.quotas.bounds import bounds_of
from motet.router.quotas.gcra import Bucket, admits, given_back, reserved, taken
from motet.router.quotas.quota_account import QuotaAccount
from motet.router.quotas.quota_scripts import Outcome, QuotaKeys
from motet.router.quotas.redis_quotas import RedisQuotas
from motet.tests.rigs.quota_rig import A_WHILE_S, asked, identity

TOLERANCE_US = 10.0  # numbers are kept as text


class Twin:
    """One tenant with one key, each with a quota of requests and of tokens, in Python."""

    def __init__(self, limits: dict[str, int]) -> None:
        self.limits = limits
        self.buckets = dict.fromkeys(limits, Bucket())

    def open(self, now_us: float, num_tokens: int) -> dict[str, tuple[float, float]] | None:
        """What was taken of each bucket, and the end of its backlog then."""
        costs = {name: num_tokens if name.startswith("tokens") else 1 for name in self.limits}
        if not all(admits(self.buckets[name], now_us, cost, self.limits[name]) for name, cost in costs.items()):
            return None
        held = {}
        for name, cost in costs.items():
            amount = reserved(cost, self.limits[name])
            self.buckets[name] = bucket = taken(self.buckets[name], now_us, amount, self.limits[name])
            held[name] = amount, bucket.at_us + bucket.backlog_us
        return held

    def end(self, now_us: float, held: dict[str, tuple[float, float]], used: int) -> None:
        for name, (amount, end_us) in held.items():
            if not name.startswith("tokens"):
                continue
            bucket, limit = self.buckets[name], self.limits[name]
            if used > amount:
                self.buckets[name] = taken(bucket, now_us, used - amount, limit)
            else:
                self.buckets[name] = given_back(bucket, now_us, amount - used, limit, end_us)


@pytest.mark.parametrize("seed", range(6))
async def test_the_lua_does_as_its_twin(redis_client: Redis, seed: int) -> None:
    draw = random.Random(seed)
    limits = {
        "requests": draw.choice([60, 3_000, 600_000]),
        "requests:k1": draw.choice([40, 100_000]),
        "tokens": draw.choice([1_000, 60_000, 6_000_000]),
        "tokens:k1": draw.choice([500, 4_000]),
    }
    who = identity(
        Quota(requests_per_minute=limits["requests"], tokens_per_minute=limits["tokens"]),
        Quota(requests_per_minute=limits["requests:k1"], tokens_per_minute=limits["tokens:k1"]),
    )
    bounds, twin = bounds_of(who), Twin(limits)
    assert bounds is not None
    quotas = RedisQuotas(redis_client, A_WHILE_S)
    under_way: list[tuple[QuotaAccount, dict[str, tuple[float, float]]]] = []
    outcomes = set()
    for number in range(150):
        if under_way and draw.random() < 0.5:
            account, held = under_way.pop(draw.randrange(len(under_way)))
            used = draw.choice([0, account.num_tokens // 2, account.num_tokens])
            now_us = await quotas.use(account, used, has_ended=True)
            twin.end(now_us, held, used)
            standing = await quotas.look(bounds)
        else:
            tokens = draw.choice([1, 30, 400, 3_000])
            account = QuotaAccount(bounds, f"l{number}", asked(who, prompt=1, new=tokens - 1), lambda *_: None)
            outcome, standing = await quotas.open(account, {"requests": 1, "tokens": tokens})
            expected = twin.open(standing.now_us, tokens)
            assert (outcome is Outcome.ADMITTED) == (expected is not None)
            outcomes.add(outcome)
            if expected is not None:
                under_way.append((account, expected))
        for rate, bucket in zip(bounds.rates, standing.buckets, strict=True):
            mine = twin.buckets[rate.name].drained(standing.now_us)
            assert bucket.backlog_us == pytest.approx(mine.backlog_us, abs=TOLERANCE_US), rate
            twin.buckets[rate.name] = bucket
        if draw.random() < 0.2:
            await asyncio.sleep(draw.random() / 50)
    assert outcomes == {Outcome.ADMITTED, Outcome.RATE_EXCEEDED}
    await quotas.close()


async def test_all_keys_are_in_the_slot_of_their_tenant_and_none_stays(redis_client: Redis) -> None:
    who = identity(
        Quota(requests_per_minute=5, tokens_per_minute=100, concurrent_streams=2), Quota(concurrent_streams=1)
    )
    bounds = bounds_of(who)
    assert bounds is not None
    quotas = RedisQuotas(redis_client, A_WHILE_S)
    account = QuotaAccount(bounds, "lease", asked(who), lambda *_: None)
    assert (await quotas.open(account, {"requests": 1, "tokens": 20}))[0] is Outcome.ADMITTED
    keys = sorted(map(str, await redis_client.keys("*")))
    assert [key.startswith("motet:{tenant:acme}:quota:") for key in keys] == [True] * 4
    assert all([await redis_client.pttl(key) > 0 for key in keys])
    await quotas.use(account, 20, has_ended=True)
    assert await redis_client.exists(QuotaKeys("acme").streams(), QuotaKeys("acme").streams("k1")) == 0
    await quotas.close()


async def test_scripts_are_loaded_again_after_redis_has_lost_them(redis_client: Redis) -> None:
    who = identity(Quota(requests_per_minute=5))
    bounds = bounds_of(who)
    assert bounds is not None
    quotas = RedisQuotas(redis_client, A_WHILE_S)
    for _ in range(2):
        await redis_client.script_flush()
        account = QuotaAccount(bounds, "lease", asked(who), lambda *_: None)
        both = await asyncio.gather(*(quotas.open(account, {"requests": 1}) for _ in range(2)))
        assert [outcome for outcome, _ in both] == [Outcome.ADMITTED] * 2
    assert (await quotas.look(bounds)).left(0) == 1
    await quotas.close()


@pytest.mark.parametrize("is_first", [True, False])
async def test_what_was_void_takes_nothing_before_or_after(redis_client: Redis, is_first: bool) -> None:
    """A server that was stopped may read the connection that was given up last."""
    quota = Quota(requests_per_minute=50, tokens_per_minute=1000, concurrent_streams=2)
    who = identity(quota, quota)
    bounds = bounds_of(who)
    assert bounds is not None
    quotas = RedisQuotas(redis_client, A_WHILE_S)
    account = QuotaAccount(bounds, "lost", asked(who), lambda *_: None)
    if is_first:
        assert (await quotas.open(account, {"requests": 1, "tokens": 400}))[0] is Outcome.ADMITTED
        await quotas.void(account.opened)
        await quotas.void(account.opened)
    else:
        await quotas.void(account.opened)
        assert (await quotas.open(account, {"requests": 1, "tokens": 400}))[0] is not Outcome.ADMITTED
    standing = await quotas.look(bounds)
    assert [standing.left(index) for index in range(4)] == [50, 50, 1000, 1000]
    assert (standing.tenant_streams, standing.key_streams) == (0, 0)
    await quotas.close()


async def test_a_request_that_is_void_is_given_back_where_nothing_else_is_bound(redis_client: Redis) -> None:
    who = identity(Quota(requests_per_minute=5))
    bounds = bounds_of(who)
    assert bounds is not None
    quotas = RedisQuotas(redis_client, A_WHILE_S)
    account = QuotaAccount(bounds, "lost", asked(who), lambda *_: None)
    await quotas.open(account, {"requests": 1})
    await quotas.void(account.opened)
    assert (await quotas.look(bounds)).left(0) == 5
    await quotas.close()


async def test_what_is_taken_up_again_and_refused_holds_no_place(redis_client: Redis) -> None:
    who = identity(Quota(concurrent_streams=1))
    bounds = bounds_of(who)
    assert bounds is not None
    quotas = RedisQuotas(redis_client, A_WHILE_S)
    ended = QuotaAccount(bounds, "first", asked(who, response_id="cmpl-1"), lambda *_: None)
    await quotas.open(ended, {})
    await quotas.use(ended, 1, has_ended=True)
    other = QuotaAccount(bounds, "other", asked(who), lambda *_: None)
    await quotas.open(other, {})
    again = QuotaAccount(bounds, "again", asked(who, response_id="cmpl-1", is_resumed=True), lambda *_: None)
    assert (await quotas.open(again, {}))[0] is Outcome.TOO_MANY_STREAMS
    await quotas.use(other, 1, has_ended=True)
    assert (await quotas.look(bounds)).tenant_streams == 0
    await quotas.close()
