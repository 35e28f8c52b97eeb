"""How much of a processor each tenant may take, and how long it rests after it has taken more."""

from __future__ import annotations

import time
from collections.abc import Callable


class CpuShares:
    """Keeps only tenants that have taken something lately."""

    def __init__(self, share: float, burst_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`share`: of one processor. `burst_s`: seconds of it that may be taken at once."""
        self._share, self._burst_s, self._clock = share, burst_s, clock
        self._paid_at: dict[str, float] = {}  # when what a tenant has taken is made up for

    def used_s(self, tenant: str) -> float:
        """Seconds that the tenant has taken lately beyond its share."""
        return max(0.0, self._paid_at.get(tenant, 0.0) - self._clock()) * self._share

    def rest_s(self, tenant: str, cpu_s: float) -> float:
        """The tenant has taken this: how long it must take nothing now."""
        now = self._clock()
        self._paid_at = {one: paid_at for one, paid_at in self._paid_at.items() if paid_at > now}
        self._paid_at[tenant] = paid_at = self._paid_at.get(tenant, now) + cpu_s / self._share
        return max(0.0, paid_at - now - self._burst_s / self._share)
