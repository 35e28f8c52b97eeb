"""How much of a rate is left: the generic cell rate algorithm (ITU-T I.371), as a leaky bucket that is a meter.

A bucket holds what was taken and has not drained yet, its `backlog`, in the time that it takes to drain. It drains at
the rate of its limit, and is full at a minute's worth. So a limit of n a minute lets n through at once, and n more
evenly over each minute. `quota_scripts.py` says the same in Lua, for buckets that all routers share.
"""

from __future__ import annotations

from dataclasses import dataclass

PERIOD_US = 60_000_000.0
SLACK_US = 1.0  # which sums may be off by


@dataclass(frozen=True, slots=True)
class Bucket:
    """`backlog_us` as of the moment `at_us`. A clock that goes back only stops the draining."""

    backlog_us: float = 0.0
    at_us: float = 0.0

    def drained(self, now_us: float) -> Bucket:
        return Bucket(max(0.0, self.backlog_us - max(0.0, now_us - self.at_us)), now_us)


def step_us(limit: float) -> float:
    """What one unit adds to the backlog. `limit`: units a minute, above 0."""
    return PERIOD_US / limit


def reserved(cost: float, limit: float) -> float:
    """What is taken for a cost: no more than the whole bucket, so that nothing is too large for ever.

    What such an answer uses beyond that is charged as it uses it.
    """
    return min(cost, limit)


def admits(bucket: Bucket, now_us: float, cost: float, limit: float) -> bool:
    return limit > 0 and wait_us(bucket, now_us, cost, limit) <= SLACK_US


def wait_us(bucket: Bucket, now_us: float, cost: float, limit: float) -> float:
    """Until the bucket admits the cost, if nobody else takes any. `limit`: above 0."""
    return bucket.drained(now_us).backlog_us + reserved(cost, limit) * step_us(limit) - PERIOD_US


def taken(bucket: Bucket, now_us: float, amount: float, limit: float) -> Bucket:
    """After `amount` was taken, which may be more than there is room for: that is a debt."""
    drained = bucket.drained(now_us)
    return Bucket(drained.backlog_us + amount * step_us(limit), now_us)


def given_back(bucket: Bucket, now_us: float, amount: float, limit: float, end_us: float) -> Bucket:
    """After `amount` of what was taken was not used. `end_us`: the end of the backlog when it had been taken.

    What the bucket has drained by itself since then was given back by that already.
    """
    drained = bucket.drained(now_us)
    back_us = min(amount * step_us(limit), max(0.0, end_us - now_us))
    return Bucket(max(0.0, drained.backlog_us - back_us), now_us)


def remaining(bucket: Bucket, now_us: float, limit: float) -> int:
    """Whole units that may be taken at once."""
    free_us = PERIOD_US - bucket.drained(now_us).backlog_us
    return max(0, int(free_us / step_us(limit) + 1e-6)) if limit > 0 else 0
