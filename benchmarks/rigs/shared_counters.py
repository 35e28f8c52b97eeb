"""Gangs that share virtual token counters through their routers, in simulated time.

Gangs choose by the product's `TenantCounters`, and routers pass on reports by its `FleetShares`. Only the work is
simulated: in each step a gang serves a number of tokens, in pieces, each to the tenant with the least counter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from motet.router.fleet.fair_queue import FleetShares
from motet.workers.fairness.tenant_counters import TenantCounter, TenantCounters
from motet.workers.wire.engine_load import TenantShare

STEP_S = 0.05
STEP_TOKENS = 512
PIECE_TOKENS = 64


@dataclass(frozen=True)
class Backlog:
    """A tenant that has always more to do at these gangs, from one time to another."""

    tenant: str
    gangs: Sequence[int]
    weight: float = 1.0
    from_s: float = 0.0
    until_s: float = float("inf")


@dataclass
class _Gang:
    counters: TenantCounters
    here: dict[str, TenantCounter] = field(default_factory=dict)

    def step(self, served: dict[str, float]) -> None:
        """Serves a step's tokens; `served`: by tenant, of all gangs."""
        for _ in range(STEP_TOKENS // PIECE_TOKENS if self.here else 0):
            counter = min(self.here.values(), key=lambda one: one.value)
            self.counters.charge(counter, PIECE_TOKENS)
            served[counter.tenant] = served.get(counter.tenant, 0.0) + PIECE_TOKENS

    def shares(self) -> list[TenantShare]:
        return [
            TenantShare(one.tenant, one.value, 1, 1, 0, weight=one.weight, served=one.served)
            for one in self.counters.take_changed(1000)
        ]


def simulate(
    backlogs: Sequence[Backlog], num_gangs: int, duration_s: float, news_s: float = 0.25, num_routers: int = 2
) -> list[Mapping[str, float]]:
    """What each tenant was served by all gangs together, in tokens, after each step.

    `news_s`: the interval at which a gang sends all routers its tenants' shares and receives from them what other gangs
    have sent, which is up to one interval old. Infinite: nothing is sent, and each gang is fair alone.
    """
    gangs = [_Gang(TenantCounters(STEP_TOKENS)) for _ in range(num_gangs)]
    routers = [FleetShares() for _ in range(num_routers)]
    served: dict[str, float] = {}
    after: list[Mapping[str, float]] = []
    news_every = max(1, round(news_s / STEP_S)) if news_s < duration_s else 0
    for step in range(round(duration_s / STEP_S)):
        now_s = step * STEP_S
        present = [backlog for backlog in backlogs if backlog.from_s <= now_s < backlog.until_s]
        for number, gang in enumerate(gangs):
            wanting = {backlog.tenant: backlog.weight for backlog in present if number in backlog.gangs}
            for tenant in gang.here.keys() - wanting.keys():
                gang.counters.leave(gang.here.pop(tenant))
            for tenant in wanting.keys() - gang.here.keys():
                gang.here[tenant] = gang.counters.join(tenant, wanting[tenant])
            gang.step(served)
            if news_every and (step + number) % news_every == 0:  # gangs send at different times
                shares = gang.shares()
                for router in routers:
                    router.receive(str(number), shares)
                for router in routers:
                    gang.counters.charge_elsewhere(router.take_due(str(number), gang.here))
        after.append(dict(served))
    return after


def worst_difference(after: Sequence[Mapping[str, float]], one: Backlog, other: Backlog, from_s: float = 0.0) -> float:
    """The most by which service of two tenants, over their weights, differs in any span of time from `from_s` on."""
    ahead = [
        then.get(one.tenant, 0.0) / one.weight - then.get(other.tenant, 0.0) / other.weight
        for then in after[round(from_s / STEP_S) :]
    ]
    lowest = highest = ahead[0]
    worst = 0.0
    for value in ahead:
        lowest, highest = min(lowest, value), max(highest, value)
        worst = max(worst, value - lowest, highest - value)
    return worst
