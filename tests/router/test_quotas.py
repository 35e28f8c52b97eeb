"""Quotas over several routers that share a Redis: what they admit, report to clients, return and expire."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Any

import pytest
from redis.asyncio import Redis

from motet.adapters.registry.tenants.records import KeyRecord, Quota, TenantRecord
from motet.router.http.auth import Identity
from motet.router.http.errors import ApiError
from motet.router.tenancy import grants
from motet.router.tenancy.account import Account
from motet.router.tenancy.grants import PERIOD_US, limits_of
from motet.router.tenancy.quotas import MAX_TAKEOVERS, Quotas, redis_key
from motet.tests.rigs.patience import PATIENCE_S
from motet.tests.rigs.quota_rig import ending, identity, is_left, left, progress, routers, try_open, until
from motet.tests.rigs.quota_rig import requested as asked


def headers(account: Account | ApiError) -> dict[str, str]:
    if isinstance(account, ApiError):
        return dict(account.headers)
    return {name.decode(): value.decode() for name, value in account.headers}


class Refill:
    """What comes back of a limit by itself, however slow this machine is."""

    def __init__(self, limit: int) -> None:
        self._limit, self._began_s = limit, time.monotonic()

    @property
    def most(self) -> float:
        """Units until now."""
        return self._limit * (time.monotonic() - self._began_s) * 1e6 / PERIOD_US


class Lease:
    """A router's, of a tenant's answers at once, in Redis."""

    def __init__(self, client: Redis, caller: Identity, quotas: Quotas) -> None:
        (limit,) = [one for one in limits_of(caller) if one.kind == "streams"]
        self._client: Any = client
        self._key, self._begins = redis_key(caller.tenant.tenant_id, limit), f"router:{quotas._router}."

    async def end(self) -> None:
        """As if the router had been silent for long."""
        field, value = await self._read()
        await self._client.hset(self._key, field, f"{value.rpartition(' ')[0]} 1")

    async def is_renewed(self) -> None:
        """Returns when it has been prolonged."""
        before = await self._end()

        async def is_later() -> bool:
            return await self._end() > before

        await until(is_later)

    async def _end(self) -> int:
        return int((await self._read())[1].rpartition(" ")[2])

    async def _read(self) -> tuple[str, str]:
        fields: dict[str, str] = await self._client.hgetall(self._key)
        (found,) = [(field, value) for field, value in fields.items() if field.startswith(self._begins)]
        return found


async def hammer(client: Redis, fleet: list[Quotas], limit: int) -> tuple[int, float]:
    """How many requests many clients of each router got through, and in how many seconds of Redis.

    Each asks until so many of them together as two minutes allow were refused.
    """
    caller, admitted, refused = identity(Quota(requests_per_minute=limit)), 0, 0

    async def now_s() -> float:
        seconds, us = await client.time()
        return float(seconds + us / 1e6)

    async def ask(quotas: Quotas) -> None:
        nonlocal admitted, refused
        while refused < 2 * limit:
            account = await try_open(quotas, asked(caller))
            admitted += not isinstance(account, ApiError)
            refused += isinstance(account, ApiError)
            assert not isinstance(account, ApiError) or account.status_code == 429, "Redis has decided all of it"
            await asyncio.sleep(0)  # a router with a grant does not wait for Redis

    began_s = await now_s()
    await asyncio.gather(*(ask(quotas) for quotas in fleet for _ in range(4)))
    took_s = await now_s() - began_s
    return admitted, took_s


@pytest.mark.parametrize("count", [1, 5])
async def test_no_number_of_routers_lets_more_through_than_the_quota(
    redis_client: Redis, redis_url: str, count: int
) -> None:
    limit = 600
    async with routers(redis_url, count) as fleet:
        admitted, took_s = await hammer(redis_client, fleet, limit)
    drained = limit * took_s * 1e6 / PERIOD_US
    assert limit * 0.99 <= admitted <= limit + drained + 1


async def test_a_quota_of_one_works_at_each_of_many_routers(redis_client: Redis, redis_url: str) -> None:
    async with routers(redis_url, 8) as fleet:
        for number, quotas in enumerate(fleet):
            caller = identity(Quota(requests_per_minute=1, tokens_per_minute=20), name=f"tenant-{number}")
            assert not isinstance(await try_open(quotas, asked(caller)), ApiError)
            for other in fleet:
                assert isinstance(await try_open(other, asked(caller)), ApiError)


async def test_what_another_router_holds_in_reserve_is_waited_for(
    redis_client: Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("motet.router.tenancy.quotas._RETURNED_S", 3.0)  # by then it has returned it on a busy machine
    caller = identity(Quota(requests_per_minute=40, concurrent_streams=40))
    async with routers(redis_url, 1) as (here,):
        for _ in range(20):
            (await here.open(asked(caller))).settle(ending())
        assert any(grant.spare > 1 for grant in here._grants.values()), "it took many at once, and has a reserve"
        async with routers(redis_url, 1) as (there,):
            results = [await try_open(there, asked(caller)) for _ in range(20)]
            assert not any(isinstance(result, ApiError) for result in results)


async def test_what_is_idle_goes_back(redis_client: Redis, redis_url: str) -> None:
    caller = identity(Quota(requests_per_minute=1000, concurrent_streams=10))
    async with routers(redis_url, 2) as (here, there):
        for account in [await here.open(asked(caller)) for _ in range(5)]:
            account.settle(ending())
        await until(partial(is_left, there, caller, {"streams": 10, "requests": 994}))


async def test_a_request_with_a_grant_does_not_wait_for_redis(redis_client: Redis, redis_url: str) -> None:
    caller = identity(Quota(requests_per_minute=100_000, tokens_per_minute=10_000_000, concurrent_streams=1000))
    async with routers(redis_url, 1) as (quotas,):
        for _ in range(100):
            (await quotas.open(asked(caller))).settle(ending())
        began_s = time.monotonic()
        await redis_client.config_resetstat()
        for _ in range(10):
            (await quotas.open(asked(caller))).settle(ending())
        calls = (await redis_client.info("commandstats")).get("cmdstat_evalsha", {"calls": 0})["calls"]
        # Of its three limits, beside requests.
        assert calls <= 3 * (2 + (time.monotonic() - began_s) * 1e6 // grants.REPORT_INTERVAL_US)


async def test_a_request_is_let_through_by_all_of_its_quotas_or_takes_of_none(
    redis_client: Redis, redis_url: str
) -> None:
    caller = identity(
        Quota(requests_per_minute=100, tokens_per_minute=1000, concurrent_streams=5), Quota(requests_per_minute=1)
    )
    async with routers(redis_url, 1) as (quotas,):
        tokens, seconds = Refill(1000), Refill(60)
        first = await quotas.open(asked(caller, prompt=50, new=50))
        assert headers(first)["x-ratelimit-limit-requests"] == "1"  # the key's, which has less left
        assert headers(first)["x-ratelimit-remaining-requests"] == "0"
        assert 900 <= int(headers(first)["x-ratelimit-remaining-tokens"]) <= 900 + tokens.most
        refused = await try_open(quotas, asked(caller, prompt=50, new=50))
        assert isinstance(refused, ApiError)
        assert (refused.status_code, refused.detail.code) == (429, "rate_limit_exceeded")
        assert "this key's requests a minute: limit 1" in str(refused)
        assert 60 - seconds.most <= int(headers(refused)["Retry-After"]) <= 60
        requests = Refill(100)
        now = await left(quotas, caller)
        assert 99 <= now["requests"] <= 99 + requests.most  # of the tenant's: the refused one took none
        assert 900 <= now["tokens"] <= 900 + tokens.most
        assert now["streams"] == 4


async def test_tokens_are_reserved_and_given_back(redis_client: Redis, redis_url: str) -> None:
    caller = identity(Quota(tokens_per_minute=1000))
    async with routers(redis_url, 2) as (here, there):
        first = await here.open(asked(caller, prompt=100, new=800))
        refused = await try_open(there, asked(caller, prompt=100, new=800))
        assert isinstance(refused, ApiError)
        assert "this tenant's tokens a minute: limit 1000" in str(refused)
        assert "max_tokens" in str(refused)
        first.settle(ending(prompt=100, completion=20))
        await until(partial(is_left, there, caller, {"tokens": 880}))
        refill = Refill(1000)
        second = await there.open(asked(caller, prompt=100, new=700))
        assert int(headers(second)["x-ratelimit-remaining-tokens"]) < 200 + refill.most


async def test_tokens_that_have_drained_do_not_come_back_once_more(redis_client: Redis, redis_url: str) -> None:
    caller = identity(Quota(tokens_per_minute=60_000))
    async with routers(redis_url, 1) as (quotas,):
        first = await quotas.open(asked(caller, prompt=0, new=400))
        await until(partial(is_left, quotas, caller, {"tokens": 60_000}))
        refill = Refill(60_000)
        second = await quotas.open(asked(caller, prompt=0, new=30_000))
        first.settle(ending(prompt=0, completion=0))
        assert (await left(quotas, caller))["tokens"] <= 30_000 + refill.most
        second.settle(ending(prompt=0, completion=30_000))


async def test_an_answer_that_failed_before_anything_was_computed_costs_no_tokens(
    redis_client: Redis, redis_url: str
) -> None:
    caller = identity(Quota(tokens_per_minute=1000))
    async with routers(redis_url, 1) as (quotas,):
        account = await quotas.open(asked(caller, prompt=900, new=100))
        account.settle(ending(prompt=0, error="overloaded"))
        refill = Refill(1000)
        again = await quotas.open(asked(caller, prompt=900, new=100))  # after it, in the same batch or the next
        assert int(headers(again)["x-ratelimit-remaining-tokens"]) <= refill.most


async def test_an_answer_that_failed_costs_the_prompt_that_was_computed(redis_client: Redis, redis_url: str) -> None:
    caller = identity(Quota(tokens_per_minute=1000))
    async with routers(redis_url, 1) as (quotas,):
        account = await quotas.open(asked(caller, prompt=900, new=100))
        account.settle(ending(prompt=900, error="internal_error"))
        assert isinstance(await try_open(quotas, asked(caller, prompt=900, new=100)), ApiError)


async def test_what_is_larger_than_a_minutes_quota_gets_the_whole_of_it_and_is_charged_as_it_goes(
    redis_client: Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("motet.router.tenancy.quotas.RENEW_S", 0.05)
    caller, completion = identity(Quota(tokens_per_minute=1000)), 0
    async with routers(redis_url, 1) as (quotas,):
        refill = Refill(1000)
        first = await quotas.open(asked(caller, prompt=500, new=4000, by_now=lambda: progress(500, completion)))
        assert int(headers(first)["x-ratelimit-remaining-tokens"]) <= refill.most
        completion = 1500  # 2000 in all, of which 1000 were there

        async def backlog_s() -> float:
            return (await quotas.look(caller))[0][0].full_in_s

        async with asyncio.timeout(PATIENCE_S):
            while await backlog_s() < 100:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        first.settle(ending(prompt=500, completion=1500))
        assert 100 < await backlog_s() <= 120  # two minutes' worth was used, and no more is charged in the end


async def test_what_is_computed_beyond_the_reservation_is_charged_as_it_goes(
    redis_client: Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of beams, whose rounds compute their newest tokens as prompts."""
    monkeypatch.setattr("motet.router.tenancy.quotas.RENEW_S", 0.05)
    caller = identity(Quota(tokens_per_minute=1000))
    async with routers(redis_url, 1) as (quotas,):
        await quotas.open(asked(caller, prompt=100, new=100, by_now=lambda: progress(500, 400)))

        async def is_charged() -> bool:
            return (await left(quotas, caller))["tokens"] < 500

        await until(is_charged)


async def test_answers_at_once_are_counted_over_routers_and_let_go_at_their_end(
    redis_client: Redis, redis_url: str
) -> None:
    caller = identity(Quota(concurrent_streams=2), Quota(concurrent_streams=5))
    async with routers(redis_url, 2) as (here, there):
        first, _ = await here.open(asked(caller)), await there.open(asked(caller))
        assert headers(first)["x-ratelimit-remaining-streams"] == "1"
        refused = await try_open(there, asked(caller))
        assert isinstance(refused, ApiError)
        assert refused.detail.code == "rate_limit_exceeded"
        assert headers(refused)["Retry-After"] == "1"
        assert headers(refused)["x-ratelimit-remaining-streams"] == "0"
        first.settle(ending())
        async with asyncio.timeout(PATIENCE_S):
            while isinstance(await try_open(there, asked(caller)), ApiError):  # noqa: ASYNC110
                await asyncio.sleep(0.02)


async def test_streams_of_a_killed_router_end_and_those_of_a_living_one_do_not(
    redis_client: Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("motet.router.tenancy.quotas.RENEW_S", 0.1)
    caller = identity(Quota(concurrent_streams=2))
    async with routers(redis_url, 1) as (living,):
        kept = await living.open(asked(caller))
        async with routers(redis_url, 1) as (killed,):
            await killed.open(asked(caller))
            assert isinstance(await try_open(living, asked(caller)), ApiError)
        lease = Lease(redis_client, caller, killed)
        await lease.end()
        async with asyncio.timeout(PATIENCE_S):
            while isinstance(await try_open(living, asked(caller)), ApiError):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        await Lease(redis_client, caller, living).is_renewed()  # both of the living one's count
        assert isinstance(await try_open(living, asked(caller)), ApiError)
        kept.settle(ending())


async def test_a_place_is_renewed_although_the_tenant_had_no_stream_for_a_while(
    redis_client: Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left of one of its quotas is still of interest then, and of another one not."""
    monkeypatch.setattr(grants, "LEASE_US", 1_000_000)
    monkeypatch.setattr("motet.router.tenancy.quotas.RENEW_S", 0.1)
    caller = identity(Quota(requests_per_minute=4, concurrent_streams=1))
    async with routers(redis_url, 2) as (here, there):
        (await here.open(asked(caller))).settle(ending())
        await until(partial(is_left, there, caller, {"streams": 1}))
        await asyncio.sleep(1.0)  # a lease
        monkeypatch.setattr(grants, "LEASE_US", 20_000_000)
        await here.open(asked(caller))
        await Lease(redis_client, caller, here).is_renewed()
        assert isinstance(await try_open(there, asked(caller)), ApiError)


async def test_a_resumed_stream_is_admitted_and_charged_for_what_it_uses(redis_client: Redis, redis_url: str) -> None:
    caller = identity(Quota(requests_per_minute=2, tokens_per_minute=1000, concurrent_streams=1))
    async with routers(redis_url, 2) as (lost, other):
        requests, tokens = Refill(2), Refill(1000)
        await lost.open(asked(caller, prompt=400, new=500, response_id="cmpl-1"))  # and its router is no more
        again = await other.open(asked(caller, prompt=400, new=500, response_id="cmpl-1", is_resumed=True))
        assert 1 <= int(headers(again)["x-ratelimit-remaining-requests"]) <= 1 + requests.most
        assert int(headers(again)["x-ratelimit-remaining-tokens"]) <= 100 + tokens.most
        assert headers(again)["x-ratelimit-remaining-streams"] == "0"
        refused = await try_open(other, asked(caller))
        assert isinstance(refused, ApiError), "it has the only place"
        again.settle(ending(prompt=0, completion=100))
        now = await left(other, caller)
        assert 1 <= now["requests"] <= 1 + requests.most
        assert now["tokens"] <= tokens.most  # 900 were reserved by the lost router, and 100 used since
        assert now["streams"] == 1


@pytest.mark.parametrize("place", [0, 1])
async def test_a_stream_that_was_taken_over_is_charged_once(redis_client: Redis, redis_url: str, place: int) -> None:
    """The gang goes on with it, and reports what it has computed for both connections to the later one."""
    caller = identity(Quota(tokens_per_minute=1000))
    async with routers(redis_url, 2) as pair:
        first = await pair[0].open(asked(caller, prompt=300, new=200, response_id="cmpl-1"))
        again = await pair[place].open(asked(caller, prompt=300, new=200, response_id="cmpl-1", is_resumed=True))
        first.settle(ending(prompt=300, completion=100, error="taken_over"))
        again.settle(ending(prompt=300, completion=200))
        async with asyncio.timeout(20):  # if it was charged twice that much is left after 24 s
            await until(partial(is_left, pair[1], caller, {"tokens": 500}))


async def test_what_another_router_holds_of_an_earlier_limit_is_no_debt(redis_client: Redis, redis_url: str) -> None:
    async with routers(redis_url, 2) as (first, other):
        before, after = identity(Quota(tokens_per_minute=100_000)), identity(Quota(tokens_per_minute=1))
        for _ in range(3):  # so it holds some that it may need soon
            await first.open(asked(before, prompt=400, new=400))
        assert not isinstance(await try_open(other, asked(after, response_id="cmpl-1", is_resumed=True)), ApiError)


async def test_all_streams_of_a_dead_router_may_be_resumed_at_once(redis_client: Redis, redis_url: str) -> None:
    caller, names = identity(Quota(concurrent_streams=8)), [f"cmpl-{number}" for number in range(8)]
    async with routers(redis_url, 2) as (lost, other):
        for name in names:
            await lost.open(asked(caller, response_id=name))
        returns = [try_open(other, asked(caller, response_id=name, is_resumed=True)) for name in names]
        assert not any(isinstance(one, ApiError) for one in await asyncio.gather(*returns))
        assert isinstance(await try_open(other, asked(caller)), ApiError)


async def test_a_place_that_was_taken_over_is_no_second_one_where_its_stream_was(
    redis_client: Redis, redis_url: str
) -> None:
    caller = identity(Quota(concurrent_streams=2))
    async with routers(redis_url, 2) as (here, there):
        first = await here.open(asked(caller, response_id="cmpl-1"))
        other = await here.open(asked(caller))
        again = await there.open(asked(caller, response_id="cmpl-1", is_resumed=True))
        first.settle(ending(error="taken_over"))
        for quotas in (here, there):
            assert isinstance(await try_open(quotas, asked(caller)), ApiError)
        other.settle(ending())
        third = await here.open(asked(caller))
        assert isinstance(await try_open(there, asked(caller)), ApiError)
        for account in (again, third):
            account.settle(ending())
        await until(partial(is_left, there, caller, {"streams": 2}))


async def test_who_comes_back_again_and_again_pays_for_what_is_computed(redis_client: Redis, redis_url: str) -> None:
    """What no gang keeps is computed again each time."""
    caller = identity(Quota(tokens_per_minute=2000))
    of_answer: dict[str, Any] = {"prompt": 500, "new": 500, "response_id": "cmpl-1"}
    async with routers(redis_url, 2) as pair:
        (await pair[0].open(asked(caller, **of_answer))).settle(ending(prompt=500, completion=500))
        num_returns = 0
        while not isinstance(
            again := await try_open(pair[num_returns % 2], asked(caller, **of_answer, is_resumed=True)), ApiError
        ):
            again.settle(ending(prompt=500, completion=500))
            num_returns += 1
        assert 2 <= num_returns <= 5  # until it owes more than another whole minute
        assert again.detail.code == "rate_limit_exceeded"
        assert 50 < int(headers(again)["Retry-After"]) <= 180


@pytest.mark.parametrize("ends_meanwhile", [False, True])
async def test_a_resumed_stream_that_is_not_admitted_takes_no_place_with_it(
    redis_client: Redis, redis_url: str, ends_meanwhile: bool
) -> None:
    caller = identity(Quota(concurrent_streams=1))
    async with routers(redis_url, 2) as (quotas, other):
        first = await quotas.open(asked(caller, response_id="cmpl-1"))
        resuming = asyncio.create_task(quotas.open(asked(caller, response_id="cmpl-1", is_resumed=True)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)  # it asks Redis, and its client leaves
        if ends_meanwhile:
            first.settle(ending())
        resuming.cancel()
        with pytest.raises(asyncio.CancelledError):
            await resuming
        if not ends_meanwhile:
            assert (await left(other, caller))["streams"] == 0
            first.settle(ending())
        await until(partial(is_left, other, caller, {"streams": 1}))


async def test_a_stream_that_may_not_be_resumed_for_its_tenants_debt_takes_no_place_with_it(
    redis_client: Redis, redis_url: str
) -> None:
    caller = identity(Quota(tokens_per_minute=1000, concurrent_streams=2))
    async with routers(redis_url, 1) as (quotas,):
        first = await quotas.open(asked(caller, prompt=100, new=100, response_id="cmpl-1"))
        second = await quotas.open(asked(caller, prompt=100, new=100))
        second.settle(ending(prompt=100, completion=4000))  # four minutes' worth
        refused = await try_open(quotas, asked(caller, prompt=100, new=100, response_id="cmpl-1", is_resumed=True))
        assert isinstance(refused, ApiError) and refused.detail.code == "rate_limit_exceeded"
        first.settle(ending(prompt=100, completion=100))
        await until(partial(is_left, quotas, caller, {"streams": 2}))


async def test_who_comes_back_again_and_again_takes_places(redis_client: Redis, redis_url: str) -> None:
    caller = identity(Quota(concurrent_streams=2))
    async with routers(redis_url, 1) as (quotas,):
        await quotas.open(asked(caller, response_id="cmpl-1"))
        returns = [await try_open(quotas, asked(caller, response_id="cmpl-1", is_resumed=True)) for _ in range(20)]
        assert sum(not isinstance(account, ApiError) for account in returns) <= 2 * MAX_TAKEOVERS + 1


async def test_a_request_that_leaves_before_it_is_answered_holds_nothing(redis_client: Redis, redis_url: str) -> None:
    caller = identity(Quota(tokens_per_minute=1000, concurrent_streams=1))
    async with routers(redis_url, 2) as (quotas, other):
        leaving = asyncio.create_task(quotas.open(asked(caller, prompt=400, new=500)))
        await asyncio.sleep(0)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        await until(partial(is_left, other, caller, {"tokens": 1000, "streams": 1}))


async def test_without_quotas_redis_is_not_asked(redis_client: Redis, redis_url: str) -> None:
    await redis_client.config_resetstat()
    async with routers(redis_url, 1) as (quotas,):
        account = await quotas.open(asked(identity()))
        account.settle(ending())
        assert headers(account) == {}
        assert quotas.precheck(identity()) == []
        await asyncio.sleep(0.5)
    assert "cmdstat_evalsha" not in await redis_client.info("commandstats")


async def test_a_quota_of_zero_is_refused_without_a_time_to_come_back(redis_client: Redis, redis_url: str) -> None:
    async with routers(redis_url, 1) as (quotas,):
        for quota in (Quota(requests_per_minute=0), Quota(tokens_per_minute=0), Quota(concurrent_streams=0)):
            refused = await try_open(quotas, asked(identity(quota)))
            assert isinstance(refused, ApiError)
            assert refused.detail.code == "insufficient_quota"
            assert headers(refused) == {"x-should-retry": "false"}
            assert list((await left(quotas, identity(quota))).values()) == [0]


async def test_a_changed_limit_holds_at_once(redis_client: Redis, redis_url: str) -> None:
    before, after = (identity(Quota(requests_per_minute=n, concurrent_streams=n)) for n in (1000, 2))
    async with routers(redis_url, 2) as fleet:
        accounts = [await fleet[0].open(asked(before)) for _ in range(50)]
        for quotas in fleet:
            assert isinstance(await try_open(quotas, asked(after)), ApiError), "50 are made at once"
        for account in accounts:
            account.settle(ending())
        raised = identity(Quota(requests_per_minute=2000, concurrent_streams=3))
        three = [await quotas.open(asked(raised)) for quotas in (fleet[0], fleet[1], fleet[0])]
        assert isinstance(await try_open(fleet[1], asked(raised)), ApiError)
        assert len(three) == 3


async def runs_scripts(redis: Redis) -> bool:
    """Whether routers call a script within two of their turns."""
    await redis.config_resetstat()
    await asyncio.sleep(0.5)
    return "cmdstat_evalsha" in await redis.info("commandstats")


async def test_precheck_refuses_who_has_no_requests_left_without_redis(redis_client: Redis, redis_url: str) -> None:
    caller = identity(Quota(requests_per_minute=2))
    async with routers(redis_url, 1) as (quotas,):
        for _ in range(2):
            quotas.precheck(caller)
            await quotas.open(asked(caller))
        while await runs_scripts(redis_client):  # until everything is reported
            pass
        with pytest.raises(ApiError, match="requests a minute: limit 2, left 0"):
            quotas.precheck(caller)
        quotas.precheck(caller, is_resuming=True)
        assert "cmdstat_evalsha" not in await redis_client.info("commandstats")


async def test_tenants_do_not_share(redis_client: Redis, redis_url: str) -> None:
    quota = Quota(requests_per_minute=1)
    async with routers(redis_url, 1) as (quotas,):
        await quotas.open(asked(identity(quota)))
        assert not isinstance(await try_open(quotas, asked(identity(quota, name="zenith"))), ApiError)
        assert isinstance(await try_open(quotas, asked(identity(quota))), ApiError)


async def test_an_error_of_one_grant_is_that_grants_alone(
    redis_client: Redis, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    quota = Quota(requests_per_minute=10)
    broken, *others = (identity(quota, name=name) for name in ("broken", "first", "second"))
    key = redis_key(broken.tenant.tenant_id, limits_of(broken)[0])
    await redis_client.script_flush()  # the batch comes again, once Redis has the script
    await redis_client.set(key, "no hash")
    async with routers(redis_url, 1) as (quotas,):
        for _ in range(2):
            refused, *answered = await asyncio.gather(
                *(try_open(quotas, asked(caller)) for caller in (broken, *others))
            )
            assert isinstance(refused, ApiError) and refused.status_code == 503
            assert not any(isinstance(answer, ApiError) for answer in answered)
        assert [record.getMessage().partition(": WRONG")[0] for record in caplog.records] == [
            f"quotas: redis refused the message of {key}"
        ]
        await redis_client.delete(key)
        assert not isinstance(await try_open(quotas, asked(broken)), ApiError)


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


async def test_all_keys_are_in_the_slot_of_their_tenant_and_none_stays(redis_client: Redis, redis_url: str) -> None:
    quota = Quota(requests_per_minute=5, tokens_per_minute=100, concurrent_streams=2)
    async with routers(redis_url, 1) as (quotas,):
        account = await quotas.open(asked(identity(quota, quota)))
        keys = sorted(map(str, await redis_client.keys("*")))
        assert [key.startswith("motet:{tenant:acme}:quota:") for key in keys] == [True] * 6
        assert all([0 < await redis_client.pttl(key) <= 200_000 for key in keys])
        account.settle(ending())
    assert not quotas._accounts


async def test_users_who_are_idle_leave_nothing(redis_url: str) -> None:
    """Each has a limit of its own while an answer of his is made, over all of his keys."""
    tenant = TenantRecord(name="acme", user_quota=Quota(concurrent_streams=2))
    async with routers(redis_url, 1) as (quotas,):
        accounts = []
        for number in range(40):
            key = KeyRecord(key_id=f"k{number}", tenant="acme", user=f"u{number // 2}")
            accounts.append(await quotas.open(asked(Identity(tenant, key))))
        assert len(quotas._grants) == 20
        third = KeyRecord(key_id="another", tenant="acme", user="u7")
        refused = await try_open(quotas, asked(Identity(tenant, third)))
        assert isinstance(refused, ApiError) and "This user may have 2 answers" in str(refused.detail.message)
        for account in accounts:
            account.settle(ending())

        async def is_empty() -> bool:
            await quotas._renew()
            return not quotas._holders and not quotas._grants

        del account, accounts, refused
        await until(is_empty)
