"""Grants of routers against the script in Redis: messages are lost, late or sent twice, on the clock of the test."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st
from limits import RateLimitItemPerMinute
from limits.storage import MemoryStorage
from limits.strategies import MovingWindowRateLimiter

from motet.router.tenancy.grants import (
    EXCHANGE,
    IDLE_US,
    LEASE_US,
    PERIOD_US,
    Grant,
    GrantMessage,
    Kind,
    Level,
    Limit,
    Taken,
    Waiter,
    spare_target,
)

NUM_ROUTERS = 4
RENEW_US = 5e6
LONGEST_LOSS_US = LEASE_US + PERIOD_US  # after which nothing that a dead router held is lacking
# The script with the clock of the test, so that minutes pass at once.
SOURCE = EXCHANGE.source.replace("redis.call('TIME')", "{0, redis.call('GET', 'now')}")
assert EXCHANGE.source != SOURCE

UNTROUBLED: Any = SimpleNamespace(random=lambda: 0.9)  # no message is lost

costs = st.integers(0, 1_000_000)


@given(st.floats(0, 1e9), st.floats(0, 1e6), costs, st.lists(st.floats(0, 1e9), min_size=1, max_size=9))
def test_reserves_are_part_of_what_is_needed_and_of_what_is_left(
    recent: float, idle_us: float, left: int, all_recent: list[float]
) -> None:
    target = spare_target(recent, idle_us, left, 1)
    assert 0 <= target <= min(recent, left / 2)
    assert idle_us < IDLE_US or target == 0
    assert sum(spare_target(one, 0.0, left, len(all_recent)) for one in all_recent) <= left / 2
    assert spare_target(recent + 1, idle_us, left, 1) >= target


def test_one_request_alone_has_no_reserve_and_a_series_has() -> None:
    grant = Grant("key", Limit("requests", "requests", "tenant", 600), "r")
    wanted = []
    for number in range(20):
        now_us = number * 20_000.0
        grant.waiters.append(waiter(1))
        message = grant.message(now_us, NUM_ROUTERS)
        wanted.append(message.parameters["wanted"])
        grant.apply(message, [1, 1, message.parameters["held"] + wanted[-1], "0", "0", 0, 0], now_us)
        grant.take(1, now_us)
    assert wanted[:2] == [1, 1]
    assert max(wanted) > 5


def waiter(cost: int) -> Waiter:
    is_short: Any = Future()
    return Waiter(cost, is_short)


@dataclass
class Answer:
    at_us: float
    units: int
    used: int
    grant: Grant
    taken: Taken | None = None


@dataclass
class World:
    """One limit, the routers that hold grants of it, and what they let through."""

    client: redis.Redis
    limit: Limit
    draw: random.Random
    now_us: float = 1.7e15
    is_away: bool = False
    grants: list[Grant] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)  # that were let through
    open_: list[Answer] = field(default_factory=list)
    late: list[GrantMessage] = field(default_factory=list)  # that Redis will read in a while, once more
    num_refused: int = 0
    most_in_use: int = 0

    def grant(self) -> Grant:
        return Grant("limit", self.limit, f"r{self.draw.random()}")

    def run(self, message: GrantMessage) -> list[Any]:
        keys, args = EXCHANGE.parameters(**message.parameters)
        self.client.set("now", f"{self.now_us:.0f}")
        reply: Any = self.client.eval(SOURCE, len(keys), *keys, *args)
        return list(reply)

    def say(self, grant: Grant) -> bool:
        """Sends the grant's message, and returns whether it was answered."""
        message, sent_at_us = grant.message(self.now_us, NUM_ROUTERS), self.now_us
        luck = self.draw.random()
        if self.is_away or luck < 0.1:
            if self.draw.random() < 0.5:
                self.late.append(message)
            grant.fail(ConnectionError())
            return False
        reply = self.run(message)
        self.now_us += self.draw.random() * 1000
        if luck < 0.2:
            grant.fail(ConnectionError())
            return False
        grant.apply(message, reply, sent_at_us)
        return True

    def request(self, grant: Grant, cost: int, used: int) -> None:
        """Lets a request through if it may be. A router refuses one if Redis has answered that it has too little."""
        units = self.limit.reserved(cost)
        if not grant.has(units, self.now_us):
            one, sent_at_us = waiter(units), self.now_us
            grant.waiters.append(one)
            is_short = self.say(grant) and one.is_short.done() and one.is_short.result()
            if is_short and not grant.has(units, self.now_us):
                assert grant.level(sent_at_us).num_left < units, (
                    "refused what is neither used nor held by other routers"
                )
        if not grant.has(units, self.now_us):
            self.num_refused += 1
            return
        taken = grant.take(units, self.now_us)
        answer = Answer(self.now_us, units, min(used, units), grant, taken)
        self.answers.append(answer)
        self.open_.append(answer)
        self.most_in_use = max(self.most_in_use, sum(one.grant in self.grants for one in self.open_))
        assert self.limit.is_rate or self.most_in_use <= self.limit.limit

    def end(self, answer: Answer) -> None:
        self.open_.remove(answer)
        if answer.grant not in self.grants:
            answer.used = 0  # its router has died: what it used may be lost with it
        elif not self.limit.is_rate:
            answer.grant.release(self.now_us, is_reusable=self.draw.random() < 0.8)
        elif self.limit.kind == "tokens":
            answer.grant.settle(answer.taken or Taken(0, 0.0, 0, 0.0), answer.used)


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        client.flushall()
        yield client


def play(world: World, num_steps: int, *, longest_outage_us: float = 60e6) -> None:
    """Random requests, ends, pauses, deaths of routers, lost and late messages, and outages of Redis."""
    draw, limit = world.draw, world.limit.limit
    world.grants = [world.grant() for _ in range(NUM_ROUTERS)]
    said_at_us = dict.fromkeys(world.grants, world.now_us)
    for _ in range(num_steps):
        deed, grant = draw.random(), draw.choice(world.grants)
        if deed < 0.5:
            cost = (
                1 if world.limit.kind != "tokens" else draw.choice([1, 10, limit // 20 + 1, limit // 3 + 1, 2 * limit])
            )
            world.request(grant, cost, draw.choice([0, cost // 2, cost]))
        elif deed < 0.75:
            if world.open_:
                world.end(draw.choice(world.open_))
        elif deed < 0.76:
            world.grants[world.grants.index(grant)] = born = world.grant()  # its router has died, another one starts
            said_at_us[born] = world.now_us
        elif deed < 0.78 and not world.is_away:
            world.is_away, back_at_us = True, world.now_us + draw.choice([0.05, 1.0]) * longest_outage_us
            while world.now_us < back_at_us:
                world.now_us += draw.random() * longest_outage_us / 10
                world.request(draw.choice(world.grants), 1, 1)
                if world.open_:
                    world.end(draw.choice(world.open_))
            world.is_away = False
            for one in world.grants:
                while not world.say(one):
                    pass
                said_at_us[one] = world.now_us
        elif deed < 0.8 and world.late:
            world.run(world.late.pop(draw.randrange(len(world.late))))
        else:
            world.now_us += draw.choice([1e3, 1e5, 3e5, 2e6])
        for one in world.grants:
            due_us = 250_000.0 if one.needs_report else RENEW_US
            if world.now_us - said_at_us[one] >= due_us:
                world.say(one)
                said_at_us[one] = world.now_us
        for one in world.grants:
            assert world.limit.is_rate or one.in_use == sum(answer.grant is one for answer in world.open_)
            assert one.spare >= -one.in_use


def check_windows(answers: list[Answer], limit: int) -> None:
    """In no window more was used than the limit and what drains in it, counted when it was let through."""
    backlog_us, at_us = 0.0, 0.0
    for answer in answers:
        backlog_us = max(0.0, backlog_us - (answer.at_us - at_us)) + answer.used * PERIOD_US / limit
        at_us = answer.at_us
        assert backlog_us <= PERIOD_US * (1 + 1e-6) + 10


@pytest.mark.parametrize("kind", ["requests", "tokens"])
@pytest.mark.parametrize("limit", [1, 7, 600, 100_000])
def test_rates_are_never_exceeded_and_nothing_is_lost(
    client: redis.Redis, kind: Kind, limit: int, pytestconfig: pytest.Config
) -> None:
    first_seed = pytestconfig.getoption("first_seed")
    for seed in range(first_seed, first_seed + 2):
        client.flushall()
        world = World(client, Limit(kind, kind, "tenant", limit), random.Random(f"{kind} {limit} {seed}"))
        play(world, 500)
        all_comes_back(world)
        check_windows(world.answers, limit)


def test_places_are_never_exceeded_and_none_is_lost(client: redis.Redis, pytestconfig: pytest.Config) -> None:
    for limit in (1, 3, 20, 300):
        client.flushall()
        draw = random.Random(f"{limit} {pytestconfig.getoption('first_seed')}")
        world = World(client, Limit("streams", "streams", "tenant", limit), draw)
        play(world, 600, longest_outage_us=LEASE_US / 2.5)  # longer ones end the leases of all
        assert world.most_in_use >= max(1, min(limit, 10) // 2), "the routers have too little to do to show anything"
        all_comes_back(world)


def all_comes_back(world: World) -> None:
    """Once no message is lost, each router in turn is let through all of the limit, and refused more."""
    for answer in list(world.open_):
        world.end(answer)
    for _ in range(10):
        world.now_us += IDLE_US
        for grant in world.grants:
            while not world.say(grant):
                pass
    assert all(grant.is_idle for grant in world.grants)
    world.draw, world.now_us = UNTROUBLED, world.now_us + LONGEST_LOSS_US
    limit = world.limit.limit
    costs = [limit] if world.limit.is_rate else [1] * limit
    for grant in world.grants:
        num_answers, num_refused = len(world.answers), world.num_refused
        for cost in (*costs, costs[0]):
            world.request(grant, cost, cost)
        assert (len(world.answers), world.num_refused) == (num_answers + len(costs), num_refused + 1)
        for answer in list(world.open_):
            world.end(answer)
        for _ in range(math.ceil(PERIOD_US / RENEW_US) + 1):
            for one in world.grants:
                assert world.say(one)
            world.now_us += RENEW_US


def test_redis_without_its_data_learns_again_what_is_in_use(client: redis.Redis) -> None:
    world = World(client, Limit("streams", "streams", "tenant", 10), UNTROUBLED)
    first, second = world.grants = [world.grant(), world.grant()]
    for _ in range(6):
        world.request(first, 1, 1)
    client.flushall()
    world.say(first)
    for _ in range(6):
        world.request(second, 1, 1)
    assert len(world.answers) == 10


def test_a_router_that_was_silent_for_longer_than_its_lease_uses_nothing_of_it(client: redis.Redis) -> None:
    world = World(client, Limit("requests", "requests", "tenant", 100), UNTROUBLED)
    grant, other = world.grants = [world.grant(), world.grant()]
    grant.waiters.append(waiter(50))
    world.say(grant)
    assert grant.has(50, world.now_us)
    world.now_us += LEASE_US + 1
    assert not grant.has(1, world.now_us)
    other.waiters.append(waiter(50))
    world.say(other)
    assert other.has(50, world.now_us)
    other.waiters.append(waiter(100))
    world.say(other)
    assert not other.has(51, world.now_us), "the first router may have used its 50 until now"
    world.say(grant)
    assert grant.spare == 0
    world.now_us += PERIOD_US
    assert grant.level(world.now_us).num_left == 50  # the other one's are still held


def test_reserved_tokens_come_back_less_what_has_drained(client: redis.Redis) -> None:
    world = World(client, Limit("tokens", "tokens", "tenant", 60), UNTROUBLED)
    (grant,) = world.grants = [world.grant()]
    for _ in range(2):
        world.request(grant, 30, 0)
    world.say(grant)
    first, second = world.open_
    world.now_us += 20e6
    world.end(first)  # 10 of its 30 are left in the bucket, which has 40
    world.say(grant)
    assert grant.level(world.now_us).num_left == 30
    world.now_us += 24e6  # 6 of the second are left
    world.request(grant, 20, 20)
    world.say(grant)
    world.end(second)
    world.say(grant)
    assert 39 <= grant.level(world.now_us).num_left <= 40, "all but the last 20"


@pytest.mark.parametrize("limit", [1, 7, 600])
def test_over_whole_minutes_it_lets_through_what_a_moving_window_does(
    client: redis.Redis, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`limits` is the oracle. Both are asked for more than they give, several times a second."""
    world = World(client, Limit("requests", "requests", "tenant", limit), UNTROUBLED, now_us=1e9)
    (grant,) = world.grants = [world.grant()]
    now_s = 1000.0
    monkeypatch.setattr("limits.storage.memory.time", SimpleNamespace(time=lambda: now_s))
    oracle, item = MovingWindowRateLimiter(MemoryStorage()), RateLimitItemPerMinute(limit)
    its = 0
    for tick in range(3 * 60 * 4):
        now_s, before = 1000.0 + tick / 4, its
        world.now_us = now_s * 1e6
        while oracle.hit(item, "acme"):
            its += 1
        num_refused = world.num_refused
        while world.num_refused == num_refused:
            world.request(grant, 1, 1)
        if its > before:  # a window begins, in which the oracle lets through no more
            assert len(world.answers) == pytest.approx(its, rel=0.01, abs=1)
    assert its == 3 * limit


@given(st.integers(1, 1_000_000), st.floats(0, 2 * PERIOD_US), st.integers(1, 10_000_000))
def test_the_wait_that_is_reported_is_true(limit: int, backlog_us: float, cost: int) -> None:
    bound = Limit("tokens", "tokens", "tenant", limit)
    wait_us = Level(bound, backlog_us).wait_s(cost) * 1e6
    if wait_us:
        assert Level(bound, max(0.0, backlog_us - wait_us)).wait_s(cost) <= 1e-5
        assert Level(bound, backlog_us - wait_us + 10).wait_s(cost) > 0
    else:
        assert Level(bound, backlog_us).num_left >= bound.reserved(cost) - 1
    assert Level(bound).wait_s(cost) == 0, "nothing is too large for a full bucket"


def test_a_failed_message_ends_the_wait_of_requests() -> None:
    async def wait() -> None:
        grant = Grant("key", Limit("requests", "requests", "tenant", 600), "r")
        one = Waiter(1, asyncio.get_running_loop().create_future())
        grant.waiters.append(one)
        first = grant.message(0.0, 1)
        grant.fail(ConnectionError())
        with pytest.raises(ConnectionError):
            await one.is_short
        assert grant.message(1.0, 1) is first, "it is sent again as it was"

    asyncio.run(wait())
