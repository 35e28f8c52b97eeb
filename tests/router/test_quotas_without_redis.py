"""Quotas while Redis is stopped, paused or slow: routers use the grants that they hold, and nothing counts twice."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from motet.adapters.ended_tasks import end_tasks
from motet.adapters.registry.registry import connect
from motet.adapters.registry.tenants.records import Quota
from motet.cluster.launch.redis_server import RedisServer
from motet.router.http.auth import Identity
from motet.router.http.errors import ApiError
from motet.router.tenancy.account import Progress
from motet.router.tenancy.grants import PERIOD_US
from motet.router.tenancy.quotas import Quotas
from motet.tests.rigs.late_redis import late_redis
from motet.tests.rigs.patience import PATIENCE_S
from motet.tests.rigs.patience import eventually_in_loop as eventually
from motet.tests.rigs.quota_rig import (
    A_WHILE_S,
    ending,
    identity,
    is_left,
    left,
    requested,
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


async def let_through(quotas: Quotas, quota: Quota, each: int) -> tuple[int, ApiError | None]:
    """How many of so many requests the router lets through, and the last refusal."""
    results = [await try_open(quotas, requested(identity(quota))) for _ in range(each)]
    refusals = [result for result in results if isinstance(result, ApiError)]
    return each - len(refusals), refusals[-1] if refusals else None


async def is_back(quotas: Quotas, caller: Identity) -> bool:
    return (await quotas.look(caller))[1]


async def test_the_grant_is_what_there_is_without_redis(server: RedisServer) -> None:
    quota = Quota(requests_per_minute=6000, concurrent_streams=500)
    async with routers(server.url, 1) as (quotas,):
        for _ in range(50):
            (await quotas.open(requested(identity(quota)))).settle(ending())
        held = min(grant.spare for grant in quotas._grants.values())
        assert held > 0
        pause(server, [quotas])
        during, refused = await let_through(quotas, quota, 200)
        assert during >= held * 0.5  # some went back when Redis was just there
        assert refused is not None and during < 150
        assert (refused.status_code, refused.detail.code) == (503, "registry_unavailable")
        assert refused.headers["Retry-After"] == "1"
        go_on(server, [quotas])
        await until(partial(is_back, quotas, identity(quota)))
        after, _ = await let_through(quotas, quota, 10)
        assert after == 10


async def test_it_waits_for_redis_once_and_not_for_each_request(server: RedisServer) -> None:
    caller = identity(Quota(requests_per_minute=100))
    async with routers(server.url, 1) as (quotas,):
        await quotas.open(requested(caller))
        pause(server, [quotas])
        began = time.monotonic()
        assert isinstance(await try_open(quotas, requested(caller)), ApiError)
        assert time.monotonic() - began >= WAIT_S * 0.9
        began, refused = time.monotonic(), 0
        while time.monotonic() - began < 2.0:
            refused += isinstance(await try_open(quotas, requested(caller)), ApiError)
        assert refused > 20  # some four of them waited


@pytest.mark.parametrize("how", ["paused", "killed"])
async def test_an_outage_lets_nothing_through_twice(server: RedisServer, how: str) -> None:
    quota = Quota(requests_per_minute=60, concurrent_streams=500)
    async with routers(server.url, 2) as fleet:
        began, total = time.monotonic(), 0
        for quotas in fleet:
            total += (await let_through(quotas, quota, 10))[0]
        pause(server, fleet)
        for quotas in fleet:
            total += (await let_through(quotas, quota, 20))[0]
        if how == "killed":
            assert server.pid is not None
            pid = server.pid
            os.kill(pid, signal.SIGKILL)  # and it is started again
            await eventually(lambda: server.pid not in (None, pid))
        go_on(server, fleet)
        for quotas in fleet:
            await until(partial(is_back, quotas, identity(quota)))
            total += (await let_through(quotas, quota, 60))[0]
        assert 50 <= total <= 60 * (1 + (time.monotonic() - began) * 1e6 / PERIOD_US) + 1

        async def all_count() -> bool:  # also those that were let through without Redis
            return (await left(fleet[0], identity(quota)))["streams"] == 500 - total

        await until(all_count)


async def test_a_stream_is_resumed_without_redis(server: RedisServer) -> None:
    caller = identity(Quota(requests_per_minute=2, tokens_per_minute=1000, concurrent_streams=2))
    async with routers(server.url, 2) as (other, quotas):
        await other.open(requested(caller, prompt=100, new=400, response_id="cmpl-1"))
        await quotas.look(caller)
        pause(server, [quotas])
        quotas.precheck(caller, is_resuming=True)
        again = await quotas.open(requested(caller, prompt=100, new=400, response_id="cmpl-1", is_resumed=True))
        assert isinstance(await try_open(quotas, requested(caller)), ApiError)
        go_on(server, [quotas])
        await until(partial(is_back, quotas, caller))
        await asyncio.sleep(0.5)
        assert (await left(quotas, caller))["streams"] == 0  # its own, and that of the other router, which lives
        again.settle(ending(prompt=100, completion=100))
        await until(partial(is_left, quotas, caller, {"streams": 1}))


async def test_an_answer_that_ends_while_redis_is_away_is_settled_when_it_is_back(server: RedisServer) -> None:
    caller = identity(Quota(tokens_per_minute=1000, concurrent_streams=1))
    async with routers(server.url, 2) as (quotas, other):
        account = await quotas.open(requested(caller, prompt=100, new=900))
        pause(server, [quotas, other])
        assert isinstance(await try_open(quotas, requested(caller)), ApiError)
        account.settle(ending(prompt=100, completion=0))
        go_on(server, [quotas, other])
        await until(partial(is_left, other, caller, {"tokens": 900, "streams": 1}))


async def test_what_redis_gave_and_reported_too_late_is_given_back(server: RedisServer) -> None:
    quota = Quota(requests_per_minute=100, tokens_per_minute=1000, concurrent_streams=10)
    caller = identity(quota, quota)
    async with late_redis(server.url) as late, routers(late.url, 1) as (quotas,), routers(server.url, 1) as (other,):
        await quotas.look(identity(Quota(requests_per_minute=1), name="zenith"))  # so that it is connected
        late.holds_replies = True
        wait_for_redis([quotas], WAIT_S)
        refused = await try_open(quotas, requested(caller, prompt=100, new=200))
        assert isinstance(refused, ApiError) and refused.status_code == 503
        assert (await left(other, caller))["tokens"] == 700, "Redis has given it"
        late.holds_replies = False
        wait_for_redis([quotas], A_WHILE_S)
        full = {"requests": 100, "requests:k1": 100, "tokens": 1000, "tokens:k1": 1000, "streams": 10, "streams:k1": 10}
        await until(partial(is_left, other, caller, full))


async def test_what_is_said_counts_once_however_late_redis_answers(server: RedisServer) -> None:
    caller = identity(Quota(requests_per_minute=100))
    async with late_redis(server.url) as late, routers(late.url, 1) as (quotas,), routers(server.url, 1) as (other,):
        for _ in range(10):
            await quotas.open(requested(caller))
        late.holds_replies = True
        wait_for_redis([quotas], WAIT_S)
        num_held = late.num_held
        await eventually(lambda: late.num_held >= num_held + 3)  # it has said it again and again
        late.holds_replies = False
        wait_for_redis([quotas], A_WHILE_S)
        await until(partial(is_left, other, caller, {"requests": 90}))
        assert 90 <= (await left(other, caller))["requests"] < 100


async def test_late_answers_refuse_nothing(server: RedisServer) -> None:
    quota = Quota(requests_per_minute=6000)
    numbers = itertools.count()
    async with late_redis(server.url) as late, routers(late.url, 1, wait_s=PATIENCE_S) as (quotas,):
        late.delay_s = lambda: 0.15 if next(numbers) % 10 == 5 else 0.0
        tenants = [identity(quota, name=f"t{number}") for number in range(10)]
        opened = await asyncio.gather(*(try_open(quotas, requested(one)) for _ in range(5) for one in tenants))
        for one in tenants:  # after a late answer, too
            opened.append(await try_open(quotas, requested(one)))
        assert not [one for one in opened if isinstance(one, ApiError)]
        assert quotas.call_outcomes["late"] and not quotas.call_outcomes["unanswered"]


async def test_a_late_answer_delays_no_other_tenant(server: RedisServer) -> None:
    slow, quick = (identity(Quota(requests_per_minute=60), name=name) for name in ("slow", "quick"))
    async with late_redis(server.url) as late, routers(late.url, 1) as (quotas,):
        late.marks_late = b"tenant:slow"
        opening = asyncio.create_task(try_open(quotas, requested(slow)))
        await eventually(lambda: late.num_held > 0)
        assert not isinstance(await try_open(quotas, requested(quick)), ApiError)
        assert not opening.done()
        wait_for_redis([quotas], 0.0)
        await end_tasks(opening)


async def test_each_tenant_waits_once_for_a_redis_that_hangs(server: RedisServer) -> None:
    tenants = [identity(Quota(requests_per_minute=6000), name=f"t{number}") for number in range(3)]
    async with routers(server.url, 1) as (quotas,):
        await quotas.look(tenants[0])
        pause(server, [quotas])
        for caller in tenants:
            waited: list[float] = []
            for _ in range(20):
                began = time.monotonic()
                assert isinstance(await try_open(quotas, requested(caller)), ApiError)
                waited.append(time.monotonic() - began)
            assert waited[0] >= WAIT_S * 0.9 and sum(one >= WAIT_S * 0.9 for one in waited) == 1
        assert quotas.call_outcomes["unanswered"] and not quotas.call_outcomes["unreachable"]
        go_on(server, [quotas])
        for caller in tenants:
            await until(partial(is_back, quotas, caller))
            assert not isinstance(await try_open(quotas, requested(caller)), ApiError)


async def test_requests_wait_no_longer_than_their_own_deadline_and_a_bounded_number_of_them(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller = identity(Quota(requests_per_minute=6000))
    monkeypatch.setattr("motet.router.tenancy.quotas.MAX_WAITING", 3)
    async with late_redis(server.url) as late, routers(late.url, 1) as (quotas,):
        await quotas.look(caller)
        late.holds_replies = True
        soon = replace(requested(caller), deadline=time.perf_counter() + 0.05)
        assert isinstance(await try_open(quotas, soon), ApiError)
        waiting = [asyncio.create_task(try_open(quotas, requested(caller))) for _ in range(3)]
        await asyncio.sleep(0)
        assert isinstance(await try_open(quotas, requested(caller)), ApiError)
        assert not any(one.done() for one in waiting)  # its own deadline is no outage of the tenant
        wait_for_redis([quotas], 0.0)
        await end_tasks(*waiting)


async def test_a_connection_that_breaks_refuses_nothing(server: RedisServer) -> None:
    caller = identity(Quota(requests_per_minute=60))
    num_broken = 0

    async def break_twice(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_broken
        if num_broken < 2:
            num_broken += 1
            await reader.read(1)
            writer.close()
        else:
            await late.connect(reader, writer)

    async with late_redis(server.url) as late:
        proxy = await asyncio.start_server(break_twice, "127.0.0.1", 0)
        host, port = proxy.sockets[0].getsockname()[:2]
        async with routers(f"redis://{host}:{port}", 1) as (quotas,):
            assert not isinstance(await try_open(quotas, requested(caller)), ApiError)
            assert num_broken == 2
        proxy.close()


async def test_an_answer_that_cannot_be_charged_does_not_end_the_renewing(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("motet.router.tenancy.quotas.RENEW_S", 0.02)
    num_calls = 0

    def fail() -> Progress:
        nonlocal num_calls
        num_calls += 1
        raise RuntimeError("a fault")

    async with routers(server.url, 1) as (quotas,):
        await quotas.open(requested(identity(Quota(tokens_per_minute=100)), new=500, by_now=fail))
        await eventually(lambda: num_calls >= 2)
    assert "could not be renewed or charged" in caplog.text


async def test_a_reply_that_cannot_be_read_is_a_redis_that_is_away(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with routers(server.url, 1) as (quotas,):
        monkeypatch.setattr("motet.router.tenancy.grants.Grant.apply", lambda *_: 1 / 0)
        refused = await try_open(quotas, requested(identity(Quota(requests_per_minute=5))))
        assert isinstance(refused, ApiError) and refused.status_code == 503
        monkeypatch.undo()
        await until(partial(is_back, quotas, identity(Quota(requests_per_minute=5))))
        assert not isinstance(await try_open(quotas, requested(identity(Quota(requests_per_minute=5)))), ApiError)
    assert "could not be read" in caplog.text


async def test_a_server_that_cannot_be_reached_at_all(tmp_path: Path) -> None:
    client = connect(f"unix://{tmp_path}/none.sock")
    quotas = Quotas(client, lambda: 4, wait_s=WAIT_S)
    quotas.start()
    admitted, refused = await let_through(quotas, Quota(requests_per_minute=40), 20)
    assert admitted == 0
    assert refused is not None and refused.status_code == 503
    assert quotas.call_outcomes["unreachable"] and not quotas.call_outcomes["unanswered"]
    assert await try_open(quotas, requested(identity())), "a tenant without quotas"
    await quotas.stop()
    await client.aclose()
