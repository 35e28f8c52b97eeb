"""What one router may let through of each quota while it cannot ask Redis: its share of what the fleet may have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from uuid import uuid4

from .bounds import Bounds, RateBound
from .gcra import Bucket, admits, given_back, reserved, step_us, taken
from .standing import Costs, Standing


@dataclass(slots=True)
class _Share:
    """A bucket with the router's part of a limit, and what Redis has not heard of it.

    The limits are the last ones above 0, at which all that is in the buckets was taken; 0: there was none yet.
    """

    limit: float
    fleet_limit: int
    bucket: Bucket
    unheard: Bucket


@dataclass(frozen=True, slots=True)
class Report:
    """Units of a rate that were let through and have not drained. `life`: of the tenant."""

    life: str
    name: str
    limit: int
    units: float
    report_id: str = field(default_factory=lambda: uuid4().hex)


@dataclass(frozen=True, slots=True)
class Held:
    """What an answer was given of one rate. `end_us`: the end of the backlog with it."""

    name: str
    units: float
    end_us: float


class LocalShares:
    """Times are microseconds of one clock. A share begins with the part that was left when Redis was last heard.

    What no router can tell, as how others of them use their shares, is left out: all of them together let through what
    the fleet may, if each has the same share.
    """

    def __init__(self) -> None:
        self._shares: dict[tuple[str, str], _Share] = {}
        # Told, and perhaps not heard: a bucket of what of it has not drained, by id.
        self._told: dict[str, tuple[Report, Bucket]] = {}

    def open(
        self,
        bounds: Bounds,
        known: Sequence[Bucket],
        costs: Costs,
        now_us: float,
        num_routers: int,
    ) -> tuple[bool, Standing, list[Held]]:
        """Takes all costs, by kind, or nothing, and says which. `known`: of each rate, as Redis has last told it.

        Streams are not looked at.
        """
        shares = [
            self._share(bounds.life, rate, bucket, now_us, num_routers)
            for rate, bucket in zip(bounds.rates, known, strict=True)
        ]
        wanted = [costs.get(rate.kind, 0) for rate in bounds.rates]
        admitted = all(
            not cost or (rate.limit > 0 and admits(share.bucket, now_us, cost, share.limit))
            for rate, share, cost in zip(bounds.rates, shares, wanted, strict=True)
        )
        held = []
        if admitted:
            for rate, share, cost in zip(bounds.rates, shares, wanted, strict=True):
                if not cost:
                    continue
                # A request is one, even where the share of a minute is less: the next one waits for longer.
                amount = float(cost) if rate.kind == "requests" else reserved(cost, share.limit)
                self._take(share, amount, now_us)
                if rate.kind == "tokens":
                    held.append(Held(rate.name, amount, share.bucket.at_us + share.bucket.backlog_us))
        limits = [share.limit if rate.limit > 0 else 0.0 for rate, share in zip(bounds.rates, shares, strict=True)]
        standing = Standing(bounds, now_us, [share.bucket for share in shares], limits, 0, 0)
        return admitted, standing, held

    def use(self, life: str, held: Held, used: int, now_us: float, *, has_ended: bool) -> Held:
        """Charges what an answer has used beyond what it was given, or gives back what it has not used in the end."""
        share = self._shares.get((life, held.name))
        if share is None or not share.limit or (used <= held.units and not has_ended):
            return held
        more = used - held.units
        if more > 0:
            self._take(share, more, now_us)
        else:
            share.bucket = given_back(share.bucket, now_us, -more, share.limit, held.end_us)
            share.unheard = given_back(share.unheard, now_us, -more, share.limit, held.end_us)
        return Held(held.name, float(used), share.bucket.at_us + share.bucket.backlog_us)

    def reports(self, now_us: float) -> list[Report]:
        """What Redis has not heard. A report comes again until it is `heard`, as far as it has not drained."""
        for (life, name), share in self._shares.items():
            unheard, share.unheard = share.unheard.drained(now_us), Bucket(0.0, now_us)
            if unheard.backlog_us > 0:
                report = Report(life, name, share.fleet_limit, unheard.backlog_us / step_us(share.limit))
                self._told[report.report_id] = report, unheard
        found = []
        for report, told in [*self._told.values()]:
            left_us = told.drained(now_us).backlog_us
            if left_us > 0:
                found.append(replace(report, units=report.units * left_us / told.backlog_us))
            else:
                self.heard(report)
        return found

    def heard(self, report: Report) -> None:
        """Redis has it."""
        self._told.pop(report.report_id, None)

    def clear(self) -> None:
        """Begins anew. What Redis may not have heard is still told."""
        self._shares.clear()

    def _take(self, share: _Share, amount: float, now_us: float) -> None:
        share.bucket = taken(share.bucket, now_us, amount, share.limit)
        share.unheard = taken(share.unheard, now_us, amount, share.limit)

    def _share(self, life: str, rate: RateBound, known: Bucket, now_us: float, num_routers: int) -> _Share:
        limit = max(rate.limit, 0) / max(num_routers, 1)
        share = self._shares.get((life, rate.name))
        if share is None:
            bucket = known.drained(now_us)
            if rate.kind == "requests" and 0 < limit < 1:  # less than one is left, so the first one has to wait
                bucket = taken(bucket, now_us, 1 - limit, limit)
            share = self._shares[life, rate.name] = _Share(limit, rate.limit, bucket, Bucket(0.0, now_us))
        if limit > 0:
            share.limit, share.fleet_limit = limit, rate.limit
        return share
