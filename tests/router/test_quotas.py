"""Quotas over several routers that share a Redis: what they let through, tell clients, give back and let go."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from redis.asyncio import Redis

from motet.adapters.registry.tenants.records import Quota
from motet.router.accounts.account import Account
from motet.router.openai_api.errors import ApiError
from motet.router.quotas import redis_quotas
from motet.router.quotas.gcra import PERIOD_US
from motet.router.quotas.quota_scripts import FREE_RETURNS, QuotaKeys
from motet.router.quotas.quotas import Quotas
from motet.tests.rigs.patience import PATIENCE_S
from motet.tests.rigs.quota_rig import asked, ending, identity, progress, routers, try_open, until


def headers(account: Account | ApiError) -> dict[str, str]:
    if isinstance(account, ApiError):
        return dict(account.headers)
    return {name.decode(): value.decode() for name, value in account.headers}


async def hammer(client: Redis, fleet: list[Quotas], limit: int) -> tuple[int, float]:
    """How many requests many clients of each router got through, and in how many seconds of Redis.

    Each asks until so many of them together as two minutes allow were refused.
    """
    who, admitted, refused = identity(Quota(requests_per_minute=limit)), 0, 0

    async def now_s() -> float:
        seconds, us = await client.time()
        return float(seconds + us / 1e6)

    async def ask(quotas: Quotas) -> None:
        nonlocal admitted, refused
        while refused < 2 * limit:
            account = await try_open(quotas, asked(who))
            admitted += not isinstance(account, ApiError)
            refused += isinstance(account, ApiError)

    began_s = await now_s()
    await asyncio.gather(*(ask(quotas) for quotas in fleet for _ in range(4)))
    took_s = await now_s() - began_s
    assert not any(quotas.is_local for quotas in fleet), "Redis has decided all of it"
    return admitted, took_s


@pytest.mark.parametrize("count", [1, 5])
async def test_no_number_of_routers_lets_more_through_than_the_quota(
    redis_client: Redis, redis_url: str, count: int
) -> None:
    limit = 600
    async with routers(redis_url, count) as fleet:
        admitted, took_s = await hammer(redis_client, fleet, limit)
    drained = limit * took_s * 1e6 / PERIOD_US
    assert limit * 0.99 <= admitted <= (limit + drained) * 1.01 + 1


async def test_a_request_is_let_through_by_all_of_its_quotas_or_takes_of_none(
    redis_client: Redis, redis_url: str
) -> None:
    who = identity(
        Quota(requests_per_minute=100, tokens_per_minute=1000, concurrent_streams=5), Quota(requests_per_minute=1)
    )
    async with routers(redis_url, 1) as (quotas,):
        first = await quotas.open(asked(who, prompt=50, new=50))
        assert headers(first)["x-ratelimit-limit-requests"] == "1"  # the key's, which has less left
        assert headers(first)["x-ratelimit-remaining-requests"] == "0"
        assert headers(first)["x-ratelimit-remaining-tokens"] == "900"
        refused = await try_open(quotas, asked(who, prompt=50, new=50))
        assert isinstance(refused, ApiError)
        assert (refused.status_code, refused.detail.code) == (429, "rate_limit_exceeded")
        assert "this key's requests a minute: limit 1" in str(refused)
        assert 55 <= int(headers(refused)["Retry-After"]) <= 60
        standing = await quotas.look(who)
        assert standing is not None
        assert standing.left(0) == 99  # of the tenant's requests: the refused one took none
        assert 900 <= standing.left(2) < 1000
        assert (standing.tenant_streams, standing.key_streams) == (1, 0)


async def test_tokens_are_reserved_and_given_back(redis_client: Redis, redis_url: str) -> None:
    who = identity(Quota(tokens_per_minute=1000))
    async with routers(redis_url, 2) as (here, there):
        first = await here.open(asked(who, prompt=100, new=800))
        refused = await try_open(there, asked(who, prompt=100, new=800))
        assert isinstance(refused, ApiError)
        assert "this tenant's tokens a minute: limit 1000" in str(refused)
        assert "max_tokens" in str(refused)
        first.settle(ending(prompt=100, completion=20))

        async def is_given_back() -> bool:
            standing = await there.look(who)
            return standing is not None and standing.left(0) >= 880

        await until(is_given_back)
        second = await there.open(asked(who, prompt=100, new=700))
        assert int(headers(second)["x-ratelimit-remaining-tokens"]) < 200


async def test_an_answer_that_failed_before_anything_was_computed_costs_no_tokens(
    redis_client: Redis, redis_url: str
) -> None:
    who = identity(Quota(tokens_per_minute=1000))
    async with routers(redis_url, 1) as (quotas,):
        account = await quotas.open(asked(who, prompt=900, new=100))
        account.settle(ending(prompt=0, error="overloaded"))
        again = await quotas.open(asked(who, prompt=900, new=100))  # after it, in the same batch or the next
        assert headers(again)["x-ratelimit-remaining-tokens"] == "0"


async def test_what_is_larger_than_a_minutes_quota_gets_the_whole_of_it_and_is_charged_as_it_goes(
    redis_client: Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("motet.router.quotas.quotas.RENEW_S", 0.05)
    who, completion = identity(Quota(tokens_per_minute=1000)), 0
    async with routers(redis_url, 1) as (quotas,):
        first = await quotas.open(asked(who, prompt=500, new=4000, by_now=lambda: progress(500, completion)))
        assert headers(first)["x-ratelimit-remaining-tokens"] == "0"
        completion = 1500  # 2000 in all, of which 1000 were there

        async def backlog_s() -> float:
            standing = await quotas.look(who)
            assert standing is not None
            return standing.full_in_s(0)

        async with asyncio.timeout(PATIENCE_S):
            while await backlog_s() < 100:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        first.settle(ending(prompt=500, completion=1500))
        assert 100 < await backlog_s() <= 120  # two minutes' worth was used, and no more is charged in the end


async def test_answers_at_once_are_counted_over_routers_and_let_go_at_their_end(
    redis_client: Redis, redis_url: str
) -> None:
    who = identity(Quota(concurrent_streams=2), Quota(concurrent_streams=5))
    async with routers(redis_url, 2) as (here, there):
        first, _ = await here.open(asked(who)), await there.open(asked(who))
        assert headers(first)["x-ratelimit-remaining-streams"] == "1"
        refused = await try_open(there, asked(who))
        assert isinstance(refused, ApiError)
        assert refused.detail.code == "rate_limit_exceeded"
        assert headers(refused)["Retry-After"] == "1"
        assert headers(refused)["x-ratelimit-remaining-streams"] == "0"
        first.settle(ending())
        async with asyncio.timeout(PATIENCE_S):
            while isinstance(await try_open(there, asked(who)), ApiError):  # noqa: ASYNC110
                await asyncio.sleep(0.02)


async def test_streams_of_a_killed_router_end_and_those_of_a_living_one_do_not(
    redis_client: Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_quotas, "_LEASE_US", 1_500_000)
    monkeypatch.setattr("motet.router.quotas.quotas.RENEW_S", 0.1)
    who = identity(Quota(concurrent_streams=2))
    async with routers(redis_url, 1) as (living,):
        kept = await living.open(asked(who))
        async with routers(redis_url, 1) as (killed,):
            await killed.open(asked(who))
            assert isinstance(await try_open(living, asked(who)), ApiError)
        async with asyncio.timeout(PATIENCE_S):
            while isinstance(await try_open(living, asked(who)), ApiError):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        await asyncio.sleep(2.0)  # longer than a lease: both of the living one's count
        assert isinstance(await try_open(living, asked(who)), ApiError)
        kept.settle(ending())


async def test_a_resumed_stream_is_not_charged_twice(redis_client: Redis, redis_url: str) -> None:
    who = identity(Quota(requests_per_minute=2, tokens_per_minute=1000, concurrent_streams=1))
    async with routers(redis_url, 2) as (lost, other):
        await lost.open(asked(who, prompt=400, new=500, response_id="cmpl-1"))  # and its router is no more
        again = await other.open(asked(who, prompt=400, new=500, response_id="cmpl-1", is_resumed=True))
        assert headers(again)["x-ratelimit-remaining-requests"] == "1"
        assert int(headers(again)["x-ratelimit-remaining-tokens"]) < 150
        assert headers(again)["x-ratelimit-remaining-streams"] == "0"
        again.settle(ending(prompt=400, completion=100))
        standing = await other.look(who)
        assert standing is not None
        assert 500 <= standing.left(1) < 600  # 900 were reserved once, and 400 of them given back
        assert standing.tenant_streams == 0


async def test_the_end_of_a_stream_that_went_over_to_another_router_changes_nothing(
    redis_client: Redis, redis_url: str
) -> None:
    who = identity(Quota(tokens_per_minute=1000, concurrent_streams=1))
    async with routers(redis_url, 2) as (here, there):
        first = await here.open(asked(who, prompt=400, new=500, response_id="cmpl-1"))
        second = await there.open(asked(who, prompt=400, new=500, response_id="cmpl-1", is_resumed=True))
        first.settle(ending(prompt=400, completion=1, error="taken_over"))
        standing = await here.look(who)
        assert standing is not None
        assert standing.left(0) < 150
        assert standing.tenant_streams == 1
        second.settle(ending(prompt=400, completion=500))


async def test_who_comes_back_and_leaves_gets_nothing_back(redis_client: Redis, redis_url: str) -> None:
    who = identity(Quota(tokens_per_minute=1000))
    of_answer: dict[str, Any] = {"prompt": 100, "new": 500, "response_id": "cmpl-1", "is_stream": True}
    async with routers(redis_url, 1) as (quotas,):

        async def left() -> float:
            standing = await quotas.look(who)
            assert standing is not None
            return standing.left(0)

        first = await quotas.open(asked(who, **of_answer))
        first.settle(ending(prompt=100, completion=300))
        for number in range(4):  # at its end, or at once, or refused
            again = await quotas.open(asked(who, **of_answer, is_resumed=True))
            again.settle(ending(prompt=100, completion=number, error="timeout" if number % 2 else ""))
        assert 600 <= await left() < 640
        # While it still runs: what the first connection has used is charged when that is known.
        of_other: dict[str, Any] = {**of_answer, "response_id": "cmpl-2"}
        running = await quotas.open(asked(who, **of_other))
        hasty = await quotas.open(asked(who, **of_other, is_resumed=True))
        hasty.settle(ending(prompt=100, error="timeout"))
        running.settle(ending(prompt=100, completion=200, error="taken_over"))
        assert 300 <= await left() < 350


async def test_who_comes_back_again_and_again_pays_like_anybody(redis_client: Redis, redis_url: str) -> None:
    """What no gang keeps is computed again each time: routers cannot know how often that is."""
    who = identity(Quota(requests_per_minute=3, tokens_per_minute=2000, concurrent_streams=1 + FREE_RETURNS))
    of_answer: dict[str, Any] = {"prompt": 500, "new": 500, "response_id": "cmpl-1"}
    async with routers(redis_url, 2) as pair:
        open_ = [await pair[0].open(asked(who, **of_answer))]
        returns = [await try_open(pair[n % 2], asked(who, **of_answer, is_resumed=True)) for n in range(20)]
        open_ += [account for account in returns if not isinstance(account, ApiError)]
        assert len(open_) == 1 + FREE_RETURNS + 1  # the last one for 1,000 tokens more, which were the last
        for account in open_:
            account.settle(ending(prompt=500, completion=499))
        standing = await pair[0].look(who)
        assert standing is not None
        assert standing.left(0) < 2 and standing.left(1) < 50  # of requests, of tokens
        assert isinstance(await try_open(pair[1], asked(who, **of_answer, is_resumed=True)), ApiError)


async def test_who_comes_back_again_and_again_takes_places(redis_client: Redis, redis_url: str) -> None:
    who = identity(Quota(concurrent_streams=2))
    async with routers(redis_url, 1) as (quotas,):
        await quotas.open(asked(who, response_id="cmpl-1"))
        returns = [await try_open(quotas, asked(who, response_id="cmpl-1", is_resumed=True)) for _ in range(20)]
        assert sum(not isinstance(account, ApiError) for account in returns) == FREE_RETURNS + 1


async def test_a_request_that_leaves_before_it_is_answered_holds_nothing(redis_client: Redis, redis_url: str) -> None:
    who = identity(Quota(tokens_per_minute=1000, concurrent_streams=1))
    async with routers(redis_url, 1) as (quotas,):
        leaving = asyncio.create_task(quotas.open(asked(who, prompt=400, new=500)))
        await asyncio.sleep(0)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        standing = await quotas.look(who)
        assert standing is not None
        assert (standing.left(0), standing.tenant_streams) == (1000, 0)


async def test_without_quotas_redis_is_not_asked(redis_client: Redis, redis_url: str) -> None:
    await redis_client.config_resetstat()
    async with routers(redis_url, 1) as (quotas,):
        account = await quotas.open(asked(identity()))
        account.settle(ending())
        assert headers(account) == {}
        assert quotas.precheck(identity()) == []
        bounded = await quotas.open(asked(identity(Quota(requests_per_minute=5))))
        bounded.settle(ending())
    calls = await redis_client.info("commandstats")
    assert sum(calls[f"cmdstat_{name}"]["calls"] for name in ("evalsha",)) <= 2  # once unknown, once loaded


async def test_a_quota_of_zero_is_refused_without_a_time_to_come_back(redis_client: Redis, redis_url: str) -> None:
    async with routers(redis_url, 1) as (quotas,):
        for quota in (Quota(requests_per_minute=0), Quota(tokens_per_minute=0), Quota(concurrent_streams=0)):
            refused = await try_open(quotas, asked(identity(quota)))
            assert isinstance(refused, ApiError)
            assert refused.detail.code == "insufficient_quota"
            assert headers(refused) == {"x-should-retry": "false"}


async def test_at_the_door_who_has_no_requests_left_is_refused_unasked(redis_client: Redis, redis_url: str) -> None:
    who = identity(Quota(requests_per_minute=2))
    async with routers(redis_url, 1) as (quotas,):
        for _ in range(2):
            quotas.precheck(who)
            await quotas.open(asked(who))
        await redis_client.config_resetstat()
        with pytest.raises(ApiError, match="requests a minute: limit 2, left 0"):
            quotas.precheck(who)
        quotas.precheck(who, is_resuming=True)
        assert "cmdstat_evalsha" not in await redis_client.info("commandstats")
        assert await redis_client.exists(QuotaKeys("acme").rates)


async def test_tenants_do_not_share(redis_client: Redis, redis_url: str) -> None:
    quota = Quota(requests_per_minute=1)
    async with routers(redis_url, 1) as (quotas,):
        await quotas.open(asked(identity(quota)))
        assert not isinstance(await try_open(quotas, asked(identity(quota, name="zenith"))), ApiError)
        assert isinstance(await try_open(quotas, asked(identity(quota))), ApiError)


async def test_who_gets_the_name_of_a_deleted_tenant_begins_anew(redis_client: Redis, redis_url: str) -> None:
    quota = Quota(requests_per_minute=1, tokens_per_minute=100, concurrent_streams=1)
    async with routers(redis_url, 1) as (quotas,):
        await quotas.open(asked(identity(quota), prompt=10, new=90))
        assert isinstance(await try_open(quotas, asked(identity(quota))), ApiError)
        following = identity(quota, num_ended=1)
        quotas.precheck(following)
        again = await quotas.open(asked(following, prompt=10, new=90))
        assert headers(again)["x-ratelimit-remaining-requests"] == "0"
        assert isinstance(await try_open(quotas, asked(identity(quota))), ApiError)
