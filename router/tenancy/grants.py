"""What one router holds of a limit: units that were deducted from the tenant's budget in Redis before they are needed.

A message to Redis has what was used, what is given back and what is wanted. The next one is made when it was answered.
A message that may have been lost is sent again under its number, and Redis counts it once.
Times are this router's microseconds.
"""

from __future__ import annotations

import itertools
import math
from asyncio import Future
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from ...adapters.registry.lua_script import LuaScript
from ...adapters.registry.tenants.records import Quota
from ..http.auth import Identity

# Which quotas limit a request: those of its tenant, of its user, and of its key; and how much of each is left.

Kind = Literal["requests", "tokens", "streams", "uploads"]
Owner = Literal["tenant", "user", "key"]

_NONE: Final = Quota()
PERIOD_US: Final = 60_000_000.0
_SLACK_US: Final = 1.0  # rounding of sums


@dataclass(frozen=True, slots=True)
class Limit:
    """`limit` units a minute, or for `streams` that many answers at once. `name`: among the limits of a tenant.

    `uploads` limits uploads of adapters, and all others limit answers.
    """

    name: str
    kind: Kind
    owner: Owner
    limit: int

    @property
    def is_rate(self) -> bool:
        return self.kind != "streams"

    @property
    def unit_us(self) -> float:
        """The time in which the bucket of a rate drains by one unit. The limit is above 0."""
        return PERIOD_US / self.limit

    def reserved(self, cost: int) -> int:
        """Units that are taken for a cost: at most a full bucket, so that no request is refused for ever.

        What an answer uses beyond that is charged as it is used.
        """
        return min(cost, self.limit)


def quotas_of(identity: Identity) -> tuple[tuple[Owner, Quota, str], ...]:
    """With what follows a limit's kind in its name. All users of a tenant have the same quota, each for itself."""
    return (
        ("tenant", identity.tenant.quota, ""),
        ("user", identity.tenant.user_quota if identity.user else _NONE, f":~{identity.user}"),
        ("key", identity.key.quota, f":{identity.key.key_id}"),
    )


def limits_of(identity: Identity) -> tuple[Limit, ...]:
    """Empty: its requests have no limit."""
    limits = []
    for owner, quota, suffix in quotas_of(identity):
        kinds: tuple[tuple[Kind, int | None], ...] = (
            ("requests", quota.requests_per_minute),
            ("tokens", quota.tokens_per_minute),
            ("streams", quota.concurrent_streams),
            ("uploads", quota.uploads_per_minute),
        )
        limits += [Limit(kind + suffix, kind, owner, limit) for kind, limit in kinds if limit is not None]
    return tuple(limits)


@dataclass(frozen=True, slots=True)
class Level:
    """How full a limit is: `backlog_us` of a rate's bucket, which is full at a minute, or answers `in_use`."""

    limit: Limit
    backlog_us: float = 0.0
    in_use: int = 0

    @property
    def num_left(self) -> int:
        """Whole units that may be taken at once."""
        if not self.limit.limit:
            return 0
        if not self.limit.is_rate:
            return max(0, self.limit.limit - self.in_use)
        return max(0, math.floor((PERIOD_US - self.backlog_us) / self.limit.unit_us + 1e-6))

    @property
    def full_in_s(self) -> float:
        """Until all of a rate is left again, if nothing is taken."""
        return max(0.0, self.backlog_us) / 1e6

    def wait_s(self, cost: int) -> float:
        """Until a rate has the cost, if nothing else is taken; 0: it has. The limit is above 0."""
        wait_us = self.backlog_us + self.limit.reserved(cost) * self.limit.unit_us - PERIOD_US
        return 0.0 if wait_us <= _SLACK_US else wait_us / 1e6


EXCHANGE: Final = LuaScript(Path(__file__).with_name("exchange.lua"), allow_oom=True)  # a tenant's grants stay small
REPORT_INTERVAL_US: Final = 250_000.0  # between messages of a grant for which no request waits
IDLE_US: Final = REPORT_INTERVAL_US / 2  # units that were unused for this time are returned with the next message
LEASE_US: Final = 20_000_000  # after which a router that did not renew its grant has lost it
_RECENT_US: Final = 1_000_000.0  # time constant of what was taken recently


def spare_target(recent: float, idle_us: float, num_left: int, num_routers: int) -> int:
    """How many units a router should hold beyond those that wait for them.

    As many as it took in the last second (`recent`, without the last request, so that one alone needs none), and all
    routers together at most half of `num_left`. None once it took nothing for `IDLE_US`.
    """
    if idle_us >= IDLE_US:
        return 0
    return max(0, min(int(recent), num_left // (2 * max(num_routers, 1))))


@dataclass(slots=True)
class Waiter:
    """A request that needs `cost` units. `is_short` gets whether Redis had less than was wanted."""

    cost: int
    is_short: Future[bool]
    is_resumed: bool = False


class Taken(NamedTuple):
    """Units of a rate that an answer reserved, and their place in the queue of the bucket that has this epoch."""

    units: int
    unit_us: float
    epoch: int
    position_us: float


@dataclass(frozen=True, slots=True)
class GrantMessage:
    """`parameters`: of the script. `charged_us`: what was used beyond the grant."""

    parameters: dict[str, Any]
    charged_us: float
    waiters: Sequence[Waiter]


class Grant:
    """The grant of one limit of a tenant at one router. `key`: of the limit in Redis. `limit` is above 0."""

    _numbers = itertools.count()

    def __init__(self, key: str, limit: Limit, router: str) -> None:
        self.key, self.limit = key, limit
        self.spare = 0  # units that may be taken; below 0: places that other routers have taken over
        self.in_use = 0  # answers at once
        self.waiters: list[Waiter] = []
        self.pending: GrantMessage | None = None  # sent, and perhaps not arrived
        self._router = router
        self._used_us = self._charged_us = 0.0  # of the grant, and beyond it, which is in no message yet
        self._refunds: list[Taken] = []
        self._recent, self._last_units, self._taken_at_us = 0.0, 0, -math.inf
        self._is_changed = False  # something must be reported although none of the numbers above shows it
        # As of Redis's last reply. Before the first one nothing counts as used.
        self._epoch, self._tail_us, self._backlog_us, self._known_at_us = 0, 0.0, 0.0, 0.0
        self._held_elsewhere = self._in_use_elsewhere = 0
        self._restart()

    def _restart(self) -> None:
        """Begins under another name: Redis counts, or will count, all that was held under the old one as used."""
        self._name = f"router:{self._router}.{next(self._numbers)}"
        self._number, self._lease_ends_us = 0, -math.inf
        self.spare, self._used_us = 0, 0.0
        if self.pending is not None:
            self._charged_us += self.pending.charged_us
            self.pending = None

    def update(self, limit: Limit) -> None:
        """The limit was changed: what is held of the old one goes back."""
        if limit.limit != self.limit.limit:
            self.limit, self.spare, self._is_changed = limit, min(self.spare, 0), True

    def has(self, units: int, now_us: float) -> bool:
        return units <= self.spare and now_us <= self._lease_ends_us

    def take(self, units: int, now_us: float) -> Taken:
        """Takes units that it has. Those of `streams` are in use until `release`."""
        assert self.has(units, now_us)
        decay = math.exp((self._taken_at_us - now_us) / _RECENT_US)
        self._recent, self._last_units, self._taken_at_us = (self._recent + self._last_units) * decay, units, now_us
        self.spare -= units
        if self.limit.is_rate:
            self._used_us += units * self.limit.unit_us
        else:
            self.in_use += units
        return Taken(units, self.limit.unit_us, self._epoch, self._tail_us + self._unreported_us)

    def add_place(self) -> None:
        """Uses a place that was not granted: for a resumed stream, which had one elsewhere."""
        self.in_use, self._is_changed = self.in_use + 1, True

    def release(self, now_us: float, *, is_reusable: bool) -> None:
        """An answer has ended. `is_reusable`: its place is this router's, and may not be another's by now."""
        self.in_use, self._is_changed = self.in_use - 1, True
        if is_reusable and now_us <= self._lease_ends_us:
            self.spare += 1
        self.spare = max(self.spare, -self.in_use)

    def settle(self, reservation: Taken, used: int) -> Taken:
        """Charges what was used beyond what was taken, or gives back the rest. Returns what is charged by now."""
        if used > reservation.units:
            self._charged_us += (used - reservation.units) * self.limit.unit_us
        elif used < reservation.units and reservation.epoch == self._epoch:
            self._refunds.append(reservation._replace(units=reservation.units - used))
            self._is_changed = True
        return reservation._replace(units=used)

    @property
    def needs_report(self) -> bool:
        """Whether something should be reported to Redis soon."""
        return bool(self.waiters or self.pending or self.spare > 0 or self._unreported_us or self._is_changed)

    @property
    def is_idle(self) -> bool:
        return not self.needs_report and not self.in_use

    def level(self, now_us: float, *, with_held: bool = True) -> Level:
        """How full the limit is, as this router knows it. `with_held`: units that other routers hold count as used."""
        num_elsewhere = self._held_elsewhere if with_held else 0
        if not self.limit.is_rate:
            return Level(self.limit, in_use=self.in_use + self._in_use_elsewhere + num_elsewhere)
        drained_us = max(0.0, self._backlog_us - max(0.0, now_us - self._known_at_us))
        return Level(self.limit, drained_us + self._unreported_us + num_elsewhere * self.limit.unit_us)

    def message(self, now_us: float, num_routers: int) -> GrantMessage:
        """The message to send now: the pending one again, if there is one."""
        if self._number and now_us > self._lease_ends_us > -math.inf:
            self._restart()
        if self.pending is None:
            self.pending = self._compose(now_us, num_routers)
        return self.pending

    def _compose(self, now_us: float, num_routers: int) -> GrantMessage:
        needed = sum(waiter.cost for waiter in self.waiters)
        target = spare_target(self._recent, now_us - self._taken_at_us, self.level(now_us).num_left, num_routers)
        num_needed = needed + target - self.spare if self.spare < needed + target / 2 else 0
        self.spare = min(self.spare, needed + target)
        self._number += 1
        parameters = {
            "limit_key": self.key,
            "router": self._name,
            "number": self._number,
            "lease_us": LEASE_US,
            "limit": self.limit.limit,
            "is_rate": self.limit.is_rate,
            "epoch": self._epoch,
            "held": self.spare,
            "in_use": self.in_use,
            "used_us": self._used_us + self._charged_us,
            "least": min((waiter.cost - self.spare for waiter in self.waiters if waiter.cost > self.spare), default=1),
            "wanted": num_needed,
            "takeovers": sum(waiter.is_resumed for waiter in self.waiters),
            "refunds_us": [
                part
                for refund in self._refunds
                if refund.epoch == self._epoch
                for part in (refund.units * refund.unit_us, refund.position_us)
            ],
        }
        message = GrantMessage(parameters, self._charged_us, self.waiters)
        self._used_us = self._charged_us = 0.0
        self._refunds, self.waiters, self._is_changed = [], [], False
        return message

    def apply(self, message: GrantMessage, reply: Sequence[Any], sent_at_us: float) -> None:
        """Takes in Redis's reply to the pending message, which was sent at that moment."""
        assert message is self.pending
        is_known, epoch, num_granted, tail_us, backlog_us, self._held_elsewhere, self._in_use_elsewhere = reply
        if epoch != self._epoch:
            self._refunds = []
        self._epoch, self._known_at_us = epoch, sent_at_us
        self._tail_us, self._backlog_us = float(tail_us), float(backlog_us)
        granted = num_granted - message.parameters["held"]
        if is_known:
            self.pending, self._lease_ends_us = None, sent_at_us + LEASE_US
            if message.parameters["limit"] == self.limit.limit or granted < 0:
                self.spare += granted
            else:
                self._is_changed = True  # and it is given back
            self.spare = max(self.spare, 0 if self.limit.is_rate else -self.in_use)
        else:
            self._restart()
        for waiter in message.waiters:
            if not waiter.is_short.done():
                waiter.is_short.set_result(bool(is_known) and granted < message.parameters["wanted"])

    def fail(self, error: Exception) -> None:
        """Redis has not answered: requests stop waiting, and the pending message is sent again later."""
        waiting = [*self.waiters, *(self.pending.waiters if self.pending else ())]
        self.waiters = []
        for waiter in waiting:
            if not waiter.is_short.done():
                waiter.is_short.set_exception(error)

    @property
    def _unreported_us(self) -> float:
        """What was used and Redis has not confirmed."""
        sent_us: float = self.pending.parameters["used_us"] if self.pending else 0.0
        return self._used_us + self._charged_us + sent_us
