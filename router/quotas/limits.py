"""Which quotas limit a request: those of its tenant, of its user, and of its key; and how much of each is left."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

from ...adapters.registry.tenants.records import Quota
from ..tenants.identity import Identity

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
    found = []
    for owner, quota, suffix in quotas_of(identity):
        kinds: tuple[tuple[Kind, int | None], ...] = (
            ("requests", quota.requests_per_minute),
            ("tokens", quota.tokens_per_minute),
            ("streams", quota.concurrent_streams),
            ("uploads", quota.uploads_per_minute),
        )
        found += [Limit(kind + suffix, kind, owner, limit) for kind, limit in kinds if limit is not None]
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Level:
    """How full a limit is: `backlog_us` of a rate's bucket, which is full at a minute, or answers `in_use`."""

    limit: Limit
    backlog_us: float = 0.0
    in_use: int = 0

    @property
    def left(self) -> int:
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
