"""Quotas while Redis is stopped, paused or slow: each router goes by its share, and nothing is let through twice."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from motet.adapters.registry.registry import connect
from motet.adapters.registry.tenants.records import Quota
from motet.cluster.registry_server.redis_server import RedisServer
from motet.router.accounts.account import Progress
from motet.router.openai_api.errors import ApiError
from motet.router.quotas.gcra import PERIOD_US
from motet.router.quotas.local_shares import LocalShares, Report
from motet.router.quotas.quota_scripts import QuotaKeys
from motet.router.quotas.quotas import Quotas
from motet.router.quotas.redis_quotas import RESUMABLE_MS
from motet.router.tenants.identity import Identity
from motet.tests.rigs.late_redis import late_redis
from motet.tests.rigs.patience import PATIENCE_S
from motet.tests.rigs.patience import eventually_in_loop as eventually
from motet.tests.rigs.quota_rig import (
    A_WHILE_S,
    asked,
    ending,
    identity,
    routers,
    try_open,
    until,
    wait_for_redis,
)

WAIT_S = 0.2  # of a router, for a Redis that does not answer; for one that does, as long as that takes


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(Path(tmp_path_factory.mktemp("r")) / "redis")
    server.start()
    yield server
    if server.pid is not None:
        os.kill(server.pid, signal.SIGCONT)
    server.stop()


def pause(server: RedisServer, fleet: list[Quotas]) -> None:
    assert server.pid is not None
    os.kill(server.pid, signal.SIGSTOP)
    wait_for_redis(fleet, WAIT_S)


def go_on(server: RedisServer, fleet: list[Quotas]) -> None:
    assert server.pid is not None
    os.kill(server.pid, signal.SIGCONT)
    wait_for_redis(fleet, A_WHILE_S)


async def count_admitted(fleet: list[Quotas], quota: Quota, each: int) -> list[int]:
    """How many of so many requests each router lets through."""
    counts = []
    for quotas in fleet:
        results = [await try_open(quotas, asked(identity(quota))) for _ in range(each)]
        counts.append(sum(not isinstance(result, ApiError) for result in results))
    return counts


async def lose(quotas: Quotas) -> None:
    """The router learns that Redis is away, by a request of another tenant."""
    await try_open(quotas, asked(identity(Quota(requests_per_minute=1), name="somebody")))
    assert quotas.is_local


async def test_each_router_keeps_its_share_of_what_was_left(server: RedisServer) -> None:
    quota = Quota(requests_per_minute=120)
    async with routers(server.url, 2) as fleet:
        assert await count_admitted(fleet, quota, 30) == [30, 30]  # 60 of 120 are left
        await fleet[0].open(asked(identity(quota)))  # so that both have heard of 60
        pause(server, fleet)
        for quotas in fleet:
            await lose(quotas)
        began = time.monotonic()
        admitted = await count_admitted(fleet, quota, 60)
        drained = 120 * (time.monotonic() - began + 10) * 1e6 / PERIOD_US  # and what drained while they were lost
        assert all(count >= 25 for count in admitted), "never none"
        assert sum(admitted) <= 59 + drained
        async with asyncio.timeout(PATIENCE_S):
            while not isinstance(refused := await try_open(fleet[0], asked(identity(quota))), ApiError):
                pass  # some have drained since
        assert int(refused.headers["Retry-After"]) <= 2  # one in a second is its share


async def test_it_waits_for_redis_once_and_not_for_each_request(server: RedisServer) -> None:
    who = identity(Quota(requests_per_minute=100_000))
    async with routers(server.url, 1) as (quotas,):
        await quotas.open(asked(who))
        pause(server, [quotas])
        began = time.monotonic()
        await quotas.open(asked(who))
        assert time.monotonic() - began >= WAIT_S * 0.9
        began = time.monotonic()
        for _ in range(200):
            await quotas.open(asked(who))
        assert time.monotonic() - began < 200 * WAIT_S / 4


@pytest.mark.parametrize("how", ["paused", "killed"])
async def test_redis_back_again_knows_what_was_let_through_meanwhile(server: RedisServer, how: str) -> None:
    quota = Quota(requests_per_minute=60, concurrent_streams=500)
    async with routers(server.url, 2) as fleet:
        await count_admitted(fleet, quota, 1)
        pause(server, fleet)
        for quotas in fleet:
            await lose(quotas)
        began = time.monotonic()
        during = await count_admitted(fleet, quota, 40)
        assert sum(during) >= 50
        if how == "killed":
            assert server.pid is not None
            pid = server.pid
            os.kill(pid, signal.SIGKILL)  # and it is started again
            await eventually(lambda: server.pid not in (None, pid))
        go_on(server, fleet)
        await eventually(lambda: not any(quotas.is_local for quotas in fleet))
        after = await count_admitted(fleet, quota, 40)
        total = 2 + sum(during) + sum(after)
        assert total <= 60 * (1 + (time.monotonic() - began + 5) * 1e6 / PERIOD_US)

        async def all_count() -> bool:  # those that were opened without Redis, too
            standing = await fleet[0].look(identity(quota))
            return standing is not None and standing.tenant_streams == total

        await until(all_count)


async def test_no_router_goes_back_before_the_others_can_have_told_theirs(server: RedisServer) -> None:
    """One finds Redis at once, the other much later: what it let through is not let through again meanwhile."""
    quota = Quota(requests_per_minute=60)
    async with routers(server.url, 2) as (early, late):
        await count_admitted([early, late], quota, 1)
        pause(server, [early, late])
        for quotas in (early, late):
            await lose(quotas)
        began = time.monotonic()
        total = 2 + sum(await count_admitted([early, late], quota, 40))
        go_on(server, [early, late])
        while early.is_local or late.is_local:
            total += sum(await count_admitted([early, late], quota, 1))
            await asyncio.sleep(0.02)
        total += sum(await count_admitted([early, late], quota, 40))
        assert total <= 60 * (1 + (time.monotonic() - began + 5) * 1e6 / PERIOD_US) * 1.01 + 1


async def test_small_quotas_are_never_none_and_never_more(server: RedisServer) -> None:
    async with routers(server.url, 1, known=8) as (quotas,):
        await lose_with_paused(server, quotas)
        who = identity(Quota(concurrent_streams=3))
        first = await quotas.open(asked(who))  # an eighth of three is less than one
        assert isinstance(await try_open(quotas, asked(who)), ApiError)
        first.settle(ending())
        await quotas.open(asked(who))
        assert isinstance(await try_open(quotas, asked(identity(Quota(concurrent_streams=0)))), ApiError)
        refused = await try_open(quotas, asked(identity(Quota(requests_per_minute=4))))
        assert isinstance(refused, ApiError)
        assert 55 <= int(refused.headers["Retry-After"]) <= 60  # half of one is there, and half of one comes a minute


async def test_what_is_resumed_goes_on_whatever_the_share(server: RedisServer) -> None:
    who = identity(Quota(requests_per_minute=2, tokens_per_minute=1000, concurrent_streams=2))
    async with routers(server.url, 1, known=2) as (quotas,):
        await lose_with_paused(server, quotas)
        await quotas.open(asked(who, prompt=100, new=400))
        assert isinstance(await try_open(quotas, asked(who, prompt=100, new=400)), ApiError)
        quotas.precheck(who, is_resuming=True)
        await quotas.open(asked(who, prompt=100, new=400, is_resumed=True))


async def lose_with_paused(server: RedisServer, quotas: Quotas) -> None:
    await quotas.open(asked(identity(Quota(requests_per_minute=5), name="first")))
    pause(server, [quotas])
    await lose(quotas)


async def test_tokens_are_given_back_to_the_share(server: RedisServer) -> None:
    who = identity(Quota(tokens_per_minute=2000))
    async with routers(server.url, 1, known=2) as (quotas,):
        await lose_with_paused(server, quotas)
        account = await quotas.open(asked(who, prompt=100, new=800))
        assert isinstance(await try_open(quotas, asked(who, prompt=100, new=800)), ApiError)
        account.settle(ending(prompt=100, completion=50))
        await quotas.open(asked(who, prompt=100, new=700))


@pytest.mark.parametrize("state", ["away", "returning"])
async def test_a_quota_that_is_set_to_0_meanwhile_keeps_no_router_local(server: RedisServer, state: str) -> None:
    before = identity(Quota(requests_per_minute=100, tokens_per_minute=1000))
    none = Quota(requests_per_minute=0, tokens_per_minute=0)
    async with routers(server.url, 1) as (quotas,):
        await lose_with_paused(server, quotas)
        account = await quotas.open(asked(before, prompt=100, new=300))
        if state == "returning":
            go_on(server, [quotas])
            async with routers(server.url, 1) as (other,):
                await until(lambda: has_less_than_all(other, before))
        refused = await try_open(quotas, asked(identity(none)))
        assert isinstance(refused, ApiError) and refused.status_code == 429
        standing = await quotas.look(identity(none))
        assert standing is not None and (standing.left(0), standing.left(1)) == (0, 0)
        await quotas.open(asked(identity(none, name="fresh"), is_resumed=True))
        account.settle(ending(prompt=100, completion=500))
        go_on(server, [quotas])
        await eventually(lambda: not quotas.is_local)
        standing = await quotas.look(before)
        assert standing is not None
        left = {rate.name: standing.left(index) for index, rate in enumerate(standing.bounds.rates)}
        assert left["tokens"] < 900  # 600 were used, and some have drained


async def has_less_than_all(quotas: Quotas, who: Identity) -> bool:
    standing = await quotas.look(who)
    assert standing is not None
    return any(standing.left(index) < rate.limit for index, rate in enumerate(standing.bounds.rates))


async def test_what_cannot_be_told_at_first_is_no_end_of_telling(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reports = LocalShares.reports
    faults = [ZeroDivisionError("a fault"), ZeroDivisionError("another")]

    def fail_at_first(shares: LocalShares, now_us: float) -> list[Report]:
        if faults:
            raise faults.pop()
        return reports(shares, now_us)

    monkeypatch.setattr(LocalShares, "reports", fail_at_first)
    async with routers(server.url, 1) as (quotas,):
        await lose_with_paused(server, quotas)
        go_on(server, [quotas])
        await eventually(lambda: not quotas.is_local)
    assert not faults
    assert "could not be told" in caplog.text


async def test_an_answer_that_cannot_be_charged_does_not_end_the_renewing(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("motet.router.quotas.quotas.RENEW_S", 0.02)
    asked_for = 0

    def fail() -> Progress:
        nonlocal asked_for
        asked_for += 1
        raise RuntimeError("a fault")

    async with routers(server.url, 1) as (quotas,):
        await quotas.open(asked(identity(Quota(tokens_per_minute=100)), new=500, by_now=fail))
        await eventually(lambda: asked_for >= 2)
    assert "could not be renewed or charged" in caplog.text


async def test_an_answer_that_ends_while_redis_is_away_is_told_when_it_is_back(server: RedisServer) -> None:
    who = identity(Quota(tokens_per_minute=1000, concurrent_streams=1))
    async with routers(server.url, 1) as (quotas,):
        account = await quotas.open(asked(who, prompt=100, new=900))
        pause(server, [quotas])
        await lose(quotas)
        account.settle(ending(prompt=100, completion=0))
        go_on(server, [quotas])
        await eventually(lambda: not quotas.is_local)
        standing = await quotas.look(who)
        assert standing is not None
        assert standing.tenant_streams == 0
        assert standing.left(0) >= 900


@pytest.mark.parametrize("is_resumed", [False, True])
async def test_what_redis_gave_and_told_too_late_is_given_back(server: RedisServer, is_resumed: bool) -> None:
    quota = Quota(requests_per_minute=100, tokens_per_minute=1000, concurrent_streams=10)
    who = identity(quota, quota)
    async with late_redis(server.url) as late, routers(late.url, 1) as (quotas,):
        async with routers(server.url, 1) as (lost,):
            await lost.open(asked(who, prompt=100, new=200, response_id="cmpl-1"))
        await quotas.look(who)  # so that it is connected
        late.holds_replies = True
        wait_for_redis([quotas], WAIT_S)
        response_id = "cmpl-1" if is_resumed else "cmpl-2"
        again = await quotas.open(asked(who, prompt=100, new=200, response_id=response_id, is_resumed=is_resumed))
        assert quotas.is_local
        late.holds_replies = False
        wait_for_redis([quotas], A_WHILE_S)
        await eventually(lambda: not quotas.is_local)
        standing = await quotas.look(who)
        assert standing is not None
        assert standing.tenant_streams == standing.key_streams == (1 if is_resumed else 2)
        again.settle(ending(prompt=100, completion=200))
        standing = await quotas.look(who)
        assert standing is not None
        left = {rate.name: standing.left(index) for index, rate in enumerate(standing.bounds.rates)}
        assert standing.tenant_streams == standing.key_streams == (0 if is_resumed else 1)
        assert left["tokens"] >= (700 if is_resumed else 400)  # 300 were taken each time
        assert left["requests"] >= (99 if is_resumed else 98)


@pytest.mark.parametrize("begins_where", ["in redis", "in its share"])
async def test_a_stream_that_is_taken_up_while_redis_is_away_has_one_place(
    server: RedisServer, begins_where: str
) -> None:
    quota = Quota(requests_per_minute=100, tokens_per_minute=1000, concurrent_streams=2)
    who = identity(quota, quota)
    one, another = (partial(asked, who, prompt=100, new=300, response_id=name) for name in ("cmpl-1", "cmpl-2"))
    async with routers(server.url, 1) as (other,):
        async with routers(server.url, 1) as (dead,):
            if begins_where == "in its share":
                await lose_with_paused(server, dead)
            for stream in (one, another):
                await dead.open(stream())
            go_on(server, [dead])
            await eventually(lambda: not dead.is_local)
        await other.look(who)
        pause(server, [other])
        await lose(other)
        again = await other.open(one(is_resumed=True))
        go_on(server, [other])
        await eventually(lambda: not other.is_local)
        await other.open(another(is_resumed=True))  # all places are taken, and one of them is its own
        again.settle(ending(prompt=100, completion=100))
        standing = await other.look(who)
        assert standing is not None
        assert standing.tenant_streams == standing.key_streams == 1
        left = {rate.name: standing.left(index) for index, rate in enumerate(standing.bounds.rates)}
        assert left["tokens"] >= (400 if begins_where == "in redis" else 200)  # 400 were taken twice, 200 given back
        assert left["requests"] >= 98


async def test_an_answer_that_was_held_is_forgotten_in_time(server: RedisServer) -> None:
    """Else its client would come back to it for an hour, and not be charged."""
    who = identity(Quota(tokens_per_minute=1000))
    async with routers(server.url, 1) as (quotas,):
        await lose_with_paused(server, quotas)
        account = await quotas.open(asked(who, prompt=100, new=300, response_id="cmpl-1"))
        go_on(server, [quotas])
        await eventually(lambda: not quotas.is_local)
        account.settle(ending(prompt=100, completion=100))
        client, answer = connect(server.url), QuotaKeys(who.tenant.tenant_id).answer("cmpl-1")

        async def is_kept_for_a_stream() -> bool:
            return 0 < await client.pttl(answer) <= RESUMABLE_MS

        await until(is_kept_for_a_stream)
        await client.aclose()


async def test_what_is_told_of_a_share_counts_once_however_late_redis_says_that_it_heard(server: RedisServer) -> None:
    who = identity(Quota(requests_per_minute=100))
    async with late_redis(server.url) as late, routers(late.url, 1) as (quotas,):
        await quotas.look(who)  # so that it is connected
        late.holds_replies = True
        wait_for_redis([quotas], WAIT_S)
        for _ in range(10):
            await quotas.open(asked(who))
        late.holds_replies, late.marks_late = False, b":done:"
        num_held = late.num_held
        await eventually(lambda: late.num_held >= num_held + 3)  # it has told it again and again
        late.marks_late = None
        wait_for_redis([quotas], A_WHILE_S)
        await eventually(lambda: not quotas.is_local)
        standing = await quotas.look(who)
        assert standing is not None
        assert 90 <= standing.left(0) <= 100


async def test_a_server_that_cannot_be_reached_at_all_is_no_reason_to_refuse(tmp_path: Path) -> None:
    client = connect(f"unix://{tmp_path}/none.sock")
    quotas = Quotas(client, lambda: 4, wait_s=WAIT_S)
    quotas.start()
    admitted = await count_admitted([quotas], Quota(requests_per_minute=40), 20)
    assert 10 <= admitted[0] <= 11
    await quotas.stop()
    await client.aclose()
