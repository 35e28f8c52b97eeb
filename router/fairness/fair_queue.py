"""How much is computed before a tenant's next sequence in one gang's fair order, by the gang's reports.

A gang serves first whose counter is least (virtual token counters, arXiv 2401.00588 §4). So a sequence has its turn
when its tenant's counter has grown by the tenant's own tokens before it, and until then any other tenant gets no more
than what takes its counter to the same level: at most its weight times the distance, and no more than it has there.
That is max-min fair sharing as of a fluid. However much another tenant sends, it does not get further than that level.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping

import numpy as np

from ...workers.wire.fair_shares import TenantShare

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
        unseen: Mapping[str, int] | None = None,
        num_more: int = 0,
    ) -> int:
        """Tokens that the gang computes before the turn of a sequence of the tenant that comes now.

        `num_queued_tokens`: of all tenants, by what was reported or sent last; the result is never more than these, and
        exactly these for a tenant that is alone, or if the gang does not go by shares. `weight`: the tenant's, used if
        none was reported. `unseen`: tokens by tenant that are not in the shares yet. `num_more`: of the tenant, beside
        these; negative: fewer.
        """
        if not (self.has_shares or self._is_fair):
            return num_queued_tokens
        unseen = unseen or {}
        own = self._active.get(tenant)
        has_others = len(self._active) > (own is not None) or len(unseen) > (tenant in unseen)
        if not has_others and own is not None:
            return num_queued_tokens
        if self._fluid is None:
            self._fluid = _Fluid(self._columns)
        if own is None:  # its counter is at least the lowest of those that are there
            resting = self._resting.get(tenant)
            weight = weight if resting is None else resting.weight
            counter = max(self._fluid.least, self._fluid.least if resting is None else resting.counter)
            num_reported = 0
        else:
            weight, counter, num_reported = own.weight, own.counter, _num_tokens(own)
        num_own = max(0, num_reported + unseen.get(tenant, 0) + num_more)
        if not num_own and counter <= self._fluid.least:
            return 0
        level = counter + num_own / weight
        others = self._fluid.num_tokens_below(level)
        if own is not None:
            others -= _below(level, own, num_reported)
        for other, number in unseen.items():
            if other == tenant:
                continue
            share = self._active.get(other)
            if share is None:
                others += max(0.0, min(number, level - self._fluid.least))
            else:
                reported = _num_tokens(share)
                others += _below(level, share, reported + number) - _below(level, share, reported)
        return min(num_queued_tokens, num_own + max(0, round(others)))


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
        self.least = float(counters.min()) if counters.size else 0.0  # counter of all
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
