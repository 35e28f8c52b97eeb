"""The pure rule of rates: what it lets through, when, and what is given back."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from limits import RateLimitItemPerMinute
from limits.storage import MemoryStorage
from limits.strategies import MovingWindowRateLimiter

from motet.router.quotas.gcra import (
    PERIOD_US,
    Bucket,
    admits,
    given_back,
    remaining,
    reserved,
    step_us,
    taken,
    wait_us,
)

limits = st.integers(1, 1_000_000)
pauses_us = st.floats(0, 2 * PERIOD_US)
asks = st.lists(st.tuples(pauses_us, st.integers(1, 50)), min_size=1, max_size=60)


@given(limits, asks)
def test_no_window_lets_more_through_than_the_limit_and_what_drains_in_it(
    limit: int, asked: list[tuple[float, int]]
) -> None:
    bucket, now_us = Bucket(), 0.0
    let_through: list[tuple[float, float]] = []
    for pause_us, cost in asked:
        now_us += pause_us
        if admits(bucket, now_us, cost, limit):
            amount = reserved(cost, limit)
            bucket = taken(bucket, now_us, amount, limit)
            let_through.append((now_us, amount))
    for start, (from_us, _) in enumerate(let_through):
        total = 0.0
        for until_us, amount in let_through[start:]:
            total += amount
            assert total <= limit * (1 + (until_us - from_us) / PERIOD_US) * (1 + 1e-6)


@given(limits, asks)
def test_the_wait_that_is_told_is_true(limit: int, asked: list[tuple[float, int]]) -> None:
    bucket, now_us = Bucket(), 0.0
    for pause_us, cost in asked:
        now_us += pause_us
        wait = wait_us(bucket, now_us, cost, limit)
        if admits(bucket, now_us, cost, limit):
            bucket = taken(bucket, now_us, reserved(cost, limit), limit)
            continue
        assert not admits(bucket, now_us + wait - 10, cost, limit)
        assert admits(bucket, now_us + wait + 10, cost, limit)
        assert wait <= PERIOD_US + 1  # nobody waits for more than a whole bucket


@given(limits, st.integers(1, 10_000_000))
def test_nothing_is_too_large_for_a_full_bucket(limit: int, cost: int) -> None:
    assert admits(Bucket(), 0.0, cost, limit)


def test_a_limit_of_zero_lets_nothing_through() -> None:
    assert not admits(Bucket(), 0.0, 1, 0)
    assert remaining(Bucket(), 0.0, 0) == 0


@given(limits, st.floats(0, PERIOD_US), st.floats(0, 2 * PERIOD_US), st.floats(0, 1))
def test_what_is_given_back_is_as_if_it_had_never_been_taken(
    limit: int, before_us: float, later_us: float, share: float
) -> None:
    """Without others in between: whatever time passes, no more and no less comes back than was held."""
    start = Bucket(before_us, 0.0)
    whole = taken(start, 0.0, limit, limit)
    back = given_back(whole, later_us, limit * share, limit, whole.at_us + whole.backlog_us)
    less = taken(start, 0.0, limit * (1 - share), limit).drained(later_us)
    assert back.backlog_us == pytest.approx(less.backlog_us, abs=1.0)


def test_what_has_drained_by_itself_is_not_given_back_on_top() -> None:
    """A reservation that nobody used for a minute is no second bucket for the next one."""
    first = taken(Bucket(), 0.0, 100, 100)
    second = taken(first, PERIOD_US, 100, 100)
    assert given_back(second, PERIOD_US, 100, 100, first.at_us + first.backlog_us) == second


def test_a_clock_that_goes_back_stops_the_draining_and_no_more() -> None:
    bucket = taken(Bucket(0.0, 10 * PERIOD_US), 10 * PERIOD_US, 50, 100)
    earlier = bucket.drained(PERIOD_US)
    assert earlier.backlog_us == bucket.backlog_us
    assert earlier.drained(2 * PERIOD_US).backlog_us == 0


def test_what_is_left_counts_whole_units() -> None:
    bucket = taken(Bucket(), 0.0, 7, 10)
    assert remaining(bucket, 0.0, 10) == 3
    assert remaining(bucket, step_us(10) / 2, 10) == 3
    assert remaining(bucket, step_us(10), 10) == 4


@pytest.mark.parametrize("limit", [1, 7, 600])
def test_over_whole_minutes_it_lets_through_what_a_moving_window_does(
    limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`limits` is the oracle. Both are asked for more than they give, several times a second."""
    now_s = 1000.0
    monkeypatch.setattr("limits.storage.memory.time", SimpleNamespace(time=lambda: now_s))
    oracle, item = MovingWindowRateLimiter(MemoryStorage()), RateLimitItemPerMinute(limit)
    bucket, mine, its = Bucket(), 0, 0
    for tick in range(4 * 60 * 4):
        now_s, before = 1000.0 + tick / 4, its
        while oracle.hit(item, "acme"):
            its += 1
        while admits(bucket, now_s * 1e6, 1, limit):
            bucket, mine = taken(bucket, now_s * 1e6, 1, limit), mine + 1
        if its > before:  # a window begins, in which the oracle lets through no more
            assert mine == pytest.approx(its, rel=0.01, abs=1)
    assert its == 4 * limit
