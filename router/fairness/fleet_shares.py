"""What each tenant was served at all gangs, by their frames, so that each gang can be sent what the others served."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import nlargest

from ...workers.wire.fair_shares import TenantShare

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
        self._here: dict[str, dict[str, float]] = {}  # by gang and tenant: of the total, what this gang served
        self._last: dict[str, dict[str, float]] = {}  # by gang and tenant: what the gang reported last
        self._sent: dict[str, dict[str, float]] = {}  # by gang and tenant: the total elsewhere that it was sent

    def receive(self, gang_id: str, shares: Iterable[TenantShare]) -> None:
        """Takes in a gang's report. `gang_id`: of its process, not of its address."""
        here, last = self._here.setdefault(gang_id, {}), self._last.setdefault(gang_id, {})
        for share in shares:
            tenant, before = share.tenant, last.get(share.tenant, 0.0)
            last[tenant] = share.served
            growth = share.served - before if share.served >= before else share.served
            if growth > 0:
                self._totals[tenant] = self._totals.pop(tenant, 0.0) + growth
                here[tenant] = here.get(tenant, 0.0) + growth
        while len(self._totals) > _MAX_TENANTS:
            self._forget_tenant(next(iter(self._totals)))

    def forget(self, gang_id: str) -> None:
        """Removes a gang that has ended. Its service still counts at the others."""
        for known in (self._here, self._last, self._sent):
            known.pop(gang_id, None)

    def elsewhere(self, gang_id: str, tenant: str) -> float:
        """What the tenant was served at all gangs but this one."""
        here = self._here.get(gang_id, {}).get(tenant, 0.0)
        return max(0.0, self._totals.get(tenant, 0.0) - here)

    def take_due(self, gang_id: str, tenants: Iterable[str], most: int = MAX_SENT) -> list[tuple[str, float]]:
        """What to send the gang of these tenants: the totals elsewhere that have grown since they were last sent.

        If they are more than `most`, those that have grown most; the others are due the next time. A tenant that the
        gang was never sent comes first, since a gang charges only what grows.
        """
        sent = self._sent.setdefault(gang_id, {})
        due: list[tuple[float, str, float]] = []
        for tenant in tenants:
            total = self.elsewhere(gang_id, tenant)
            known = sent.get(tenant)
            if total > (known or 0.0):
                due.append((float("inf") if known is None else total - known, tenant, total))
        chosen = due if len(due) <= most else nlargest(most, due)
        for _, tenant, total in chosen:
            sent[tenant] = total
        return [(tenant, total) for _, tenant, total in chosen]

    def _forget_tenant(self, tenant: str) -> None:
        del self._totals[tenant]
        for known in (self._here, self._last, self._sent):
            for of_gang in known.values():
                of_gang.pop(tenant, None)
