"""How much is computed before a tenant's next sequence in one gang's fair order, by the gang's reports.

A gang serves first whose counter is least (virtual token counters, arXiv 2401.00588 §4). So a sequence has its turn
when its tenant's counter has grown by the tenant's own tokens before it, and until then any other tenant gets no more
than what takes its counter to the same level: at most its weight times the distance, and no more than it has there.
That is max-min fair sharing as of a fluid. However much another tenant sends, it does not get further than that level.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from heapq import nlargest

import numpy as np

from ...workers.wire.engine_load import TenantShare

# Which tenant loses a place in a full queue: the one that uses most of it, by its weight.
#
# Longest queue drop (Suter et al., INFOCOM 1998), as in a gang's queue: no tenant is refused because of the queue of a
# tenant that has more there.


@dataclass(slots=True)
class QueueUse:
    """Places that a tenant has in a queue. `num_committed`: of these, those that it cannot lose any more."""

    num: int = 0
    num_committed: int = 0
    weight: float = 1.0


def tenant_to_preempt(tenant: str, weight: float, uses: Mapping[str, QueueUse]) -> str | None:
    """The tenant that loses a place to `tenant`, which wants one more; None: no tenant has more than it would have.

    >>> uses = {"acme": QueueUse(num=6), "zoo": QueueUse(num=9, weight=3.0)}
    >>> tenant_to_preempt("new", 1.0, uses)
    'acme'
    >>> tenant_to_preempt("acme", 1.0, uses) is None
    True
    """
    highest = _load(tenant, weight, uses)
    victim: str | None = None
    for other, use in uses.items():
        if other != tenant and use.num > use.num_committed and use.num / use.weight > highest:
            victim, highest = other, use.num / use.weight
    return victim


def is_in_share(tenant: str, weight: float, uses: Mapping[str, QueueUse], num_places: int) -> bool:
    """Whether the tenant has no more than its share of `num_places` once it has one more.

    It shares them by weight with the tenants that have any. Each may have one.

    >>> uses = {"acme": QueueUse(num=4), "zoo": QueueUse(num=3)}
    >>> is_in_share("acme", 1.0, uses, num_places=8), is_in_share("acme", 3.0, uses, num_places=8)
    (False, True)
    """
    total = weight + sum(use.weight for other, use in uses.items() if other != tenant)
    return _load(tenant, weight, uses) * weight <= max(1.0, num_places * weight / total)


def _load(tenant: str, weight: float, uses: Mapping[str, QueueUse]) -> float:
    """The tenant's places with one more, divided by its weight."""
    return ((uses[tenant].num if tenant in uses else 0) + 1) / weight


# What each tenant was served at all gangs, by their frames, so that each gang can be sent what the others served.

MAX_SENT = 256  # tenants in one message to a gang: those whose totals have grown most
_MAX_TENANTS = 1 << 16  # that are kept; the one that was served longest ago is forgotten first


class FleetShares:
    """Service in tokens' worth, divided by the tenant's weight. Totals never shrink, whatever gangs come and go.

    What a gang has served counts from its start, so that all routers send about the same. A gang whose service of a
    tenant has shrunk has forgotten it or is another one: that counts from zero, beside what was before. What a gang
    that went had served stays in the total.
    """

    def __init__(self) -> None:
        self._totals: dict[str, float] = {}  # by tenant, of all gangs that ever reported
        self._local: dict[str, dict[str, float]] = {}  # by gang and tenant: of the total, what this gang served
        self._last: dict[str, dict[str, float]] = {}  # by gang and tenant: what the gang reported last
        self._reports: dict[str, dict[str, float]] = {}  # by gang and tenant: the total elsewhere that it was sent

    def receive(self, gang_id: str, shares: Iterable[TenantShare]) -> None:
        """Takes in a gang's report. `gang_id`: of its process, not of its address."""
        local, last = self._local.setdefault(gang_id, {}), self._last.setdefault(gang_id, {})
        for share in shares:
            tenant, before = share.tenant, last.get(share.tenant, 0.0)
            last[tenant] = share.served
            growth = share.served - before if share.served >= before else share.served
            if growth > 0:
                self._totals[tenant] = self._totals.pop(tenant, 0.0) + growth
                local[tenant] = local.get(tenant, 0.0) + growth
        while len(self._totals) > _MAX_TENANTS:
            self._forget_tenant(next(iter(self._totals)))

    def forget(self, gang_id: str) -> None:
        """Removes a gang that has ended. Its service still counts at the others."""
        for table in (self._local, self._last, self._reports):
            table.pop(gang_id, None)

    def elsewhere(self, gang_id: str, tenant: str) -> float:
        """What the tenant was served at all gangs but this one."""
        local = self._local.get(gang_id, {}).get(tenant, 0.0)
        return max(0.0, self._totals.get(tenant, 0.0) - local)

    def take_due(self, gang_id: str, tenants: Iterable[str], limit: int = MAX_SENT) -> list[tuple[str, float]]:
        """What to send the gang of these tenants: the totals elsewhere that have grown since they were last sent.

        If they are more than `limit`, those that have grown most; the others are due the next time. A tenant that the
        gang was never sent comes first, since a gang charges only what grows.
        """
        reports = self._reports.setdefault(gang_id, {})
        due: list[tuple[float, str, float]] = []
        for tenant in tenants:
            total = self.elsewhere(gang_id, tenant)
            last_total = reports.get(tenant)
            if total > (last_total or 0.0):
                due.append((float("inf") if last_total is None else total - last_total, tenant, total))
        chosen = due if len(due) <= limit else nlargest(limit, due)
        for _, tenant, total in chosen:
            reports[tenant] = total
        return [(tenant, total) for _, tenant, total in chosen]

    def _forget_tenant(self, tenant: str) -> None:
        del self._totals[tenant]
        for table in (self._local, self._last, self._reports):
            for of_gang in table.values():
                of_gang.pop(tenant, None)


_MAX_RESTING = 1 << 12  # tenants of which a gang has nothing at present, but whose counters are known


class FairQueue:
    """The shares of one gang's tenants, and the sums over them. A question takes the logarithm of their number.

    The first question after a report takes as long as it takes to sort them.
    """

    def __init__(self, *, is_fair: bool = False) -> None:
        """`is_fair`: the gang goes by these shares, so that a tenant without a report has nothing queued."""
        self._is_fair = is_fair
        self._active: dict[str, TenantShare] = {}  # the gang has sequences of them
        self._resting: dict[str, TenantShare] = {}  # it has none; the latest reports are last
        self._columns = _Columns()  # of those that are active
        self._fluid: _Fluid | None = None  # None: shares have changed since

    @property
    def has_shares(self) -> bool:
        """The gang has reported the share of any tenant."""
        return bool(self._active or self._resting)

    @property
    def active(self) -> dict[str, TenantShare]:
        """The tenants of which the gang has sequences, as far as it has reported; the latest reports are last."""
        return self._active

    def share(self, tenant: str) -> TenantShare | None:
        """The tenant's share as last reported; None: never, or too long ago."""
        return self._active.get(tenant) or self._resting.get(tenant)

    def receive(self, shares: Iterable[TenantShare]) -> None:
        """Takes in what has changed."""
        for share in shares:
            self._fluid = None
            self._active.pop(share.tenant, None)
            self._resting.pop(share.tenant, None)
            is_active = share.num_running or share.num_waiting or _num_tokens(share)
            (self._active if is_active else self._resting)[share.tenant] = share
            if is_active:
                self._columns.put(share)
            else:
                self._columns.remove(share.tenant)
        while len(self._resting) > _MAX_RESTING:
            del self._resting[next(iter(self._resting))]

    def num_tokens_before(
        self,
        tenant: str,
        num_queued_tokens: int,
        weight: float = 1.0,
        unreported_tokens: Mapping[str, int] | None = None,
        num_more: int = 0,
    ) -> int:
        """Tokens that the gang computes before the turn of a sequence of the tenant that comes now.

        `num_queued_tokens`: of all tenants, by what was reported or sent last; the result is never more than these, and
        exactly these for a tenant that is alone, or if the gang does not go by shares. `weight`: the tenant's, used if
        none was reported. `unreported_tokens`: tokens by tenant that are not in the shares yet. `num_more`: of the
        tenant, beside these; negative: fewer.
        """
        if not (self.has_shares or self._is_fair):
            return num_queued_tokens
        unreported_tokens = unreported_tokens or {}
        tenant_share = self._active.get(tenant)
        has_others = len(self._active) > (tenant_share is not None) or len(unreported_tokens) > (
            tenant in unreported_tokens
        )
        if not has_others and tenant_share is not None:
            return num_queued_tokens
        if self._fluid is None:
            self._fluid = _Fluid(self._columns)
        if tenant_share is None:  # its counter is at least the lowest of those that are there
            resting = self._resting.get(tenant)
            weight = weight if resting is None else resting.weight
            counter = max(self._fluid.min_counter, self._fluid.min_counter if resting is None else resting.counter)
            num_reported = 0
        else:
            weight, counter, num_reported = tenant_share.weight, tenant_share.counter, _num_tokens(tenant_share)
        num_own = max(0, num_reported + unreported_tokens.get(tenant, 0) + num_more)
        if not num_own and counter <= self._fluid.min_counter:
            return 0
        level = counter + num_own / weight
        num_other_tokens = self._fluid.num_tokens_below(level)
        if tenant_share is not None:
            num_other_tokens -= _below(level, tenant_share, num_reported)
        for other, number in unreported_tokens.items():
            if other == tenant:
                continue
            share = self._active.get(other)
            if share is None:
                num_other_tokens += max(0.0, min(number, level - self._fluid.min_counter))
            else:
                reported = _num_tokens(share)
                num_other_tokens += _below(level, share, reported + number) - _below(level, share, reported)
        return min(num_queued_tokens, num_own + max(0, round(num_other_tokens)))


class _Columns:
    """Counter, weight and tokens of each tenant, in arrays, so that thousands are summed up in a millisecond or two."""

    def __init__(self) -> None:
        self._tenants: list[str] = []
        self._place: dict[str, int] = {}
        self._values = np.zeros((3, 16))

    @property
    def values(self) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
        """[counter, weight, tokens; tenant]"""
        return self._values[:, : len(self._tenants)]

    def put(self, share: TenantShare) -> None:
        place = self._place.get(share.tenant)
        if place is None:
            place = self._place[share.tenant] = len(self._tenants)
            self._tenants.append(share.tenant)
            if place == self._values.shape[1]:
                self._values = np.hstack([self._values, np.zeros_like(self._values)])
        self._values[:, place] = share.counter, share.weight, _num_tokens(share)

    def remove(self, tenant: str) -> None:
        """No-op if it is not here. The last one takes its place."""
        if (place := self._place.pop(tenant, None)) is not None:
            last = self._tenants.pop()
            if last != tenant:
                self._tenants[place], self._place[last] = last, place
                self._values[:, place] = self._values[:, len(self._tenants)]


class _Fluid:
    """How many tokens all tenants are served until their counters reach a level, at most all that they have."""

    def __init__(self, columns: _Columns) -> None:
        counters, weights, tokens = columns.values
        self.min_counter = float(counters.min()) if counters.size else 0.0  # counter of all
        # Where the sum's slope changes: a tenant begins to be served at its counter, and has nothing more at the end.
        levels = np.concatenate([counters, counters + tokens / weights])
        order = np.argsort(levels, kind="stable")
        levels, slopes = levels[order], np.concatenate([weights, -weights])[order].cumsum()
        rises = slopes[:-1] * np.diff(levels)
        self._levels: list[float] = levels.tolist()
        self._slopes: list[float] = slopes.tolist()  # behind each bend
        self._tokens: list[float] = [0.0, *rises.cumsum().tolist()]  # at each bend

    def num_tokens_below(self, level: float) -> float:
        place = bisect_right(self._levels, level) - 1
        if place < 0:
            return 0.0
        return self._tokens[place] + self._slopes[place] * (level - self._levels[place])


def _num_tokens(share: TenantShare) -> int:
    return share.num_waiting_tokens + share.num_running_tokens


def _below(level: float, share: TenantShare, num_tokens: int) -> float:
    """How many of the tenant's `num_tokens` are served until its counter reaches the level."""
    return min(num_tokens, share.weight * max(0.0, level - share.counter))
