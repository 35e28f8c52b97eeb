"""What one router has last heard of the buckets that Redis keeps."""

from __future__ import annotations

from typing import Final

from .bounds import Bounds
from .gcra import Bucket
from .standing import Standing

MAX_TENANTS: Final = 20_000


class KnownBuckets:
    """Times are this router's microseconds. What is not known is taken for full of room."""

    def __init__(self) -> None:
        self._tenants: dict[str, dict[str, Bucket]] = {}

    def keep(self, standing: Standing, asked_at_us: float) -> None:
        """What Redis said when it was asked. As of the question, so that less seems to be taken than is, never more."""
        known = self._tenants.pop(standing.bounds.life, None) or {}
        for rate, bucket in zip(standing.bounds.rates, standing.buckets, strict=True):
            known[rate.name] = Bucket(bucket.backlog_us, asked_at_us)
        if len(self._tenants) >= MAX_TENANTS:  # the one that was heard of longest ago
            del self._tenants[next(iter(self._tenants))]
        self._tenants[standing.bounds.life] = known

    def of(self, bounds: Bounds) -> list[Bucket]:
        """One for each of its rates."""
        known = self._tenants.get(bounds.life, {})
        return [known.get(rate.name, Bucket()) for rate in bounds.rates]

    def forget_full(self, now_us: float) -> None:
        """Forgets tenants that may ask for all they may have."""
        for tenant in [
            name
            for name, known in self._tenants.items()
            if all(bucket.drained(now_us).backlog_us <= 0 for bucket in known.values())
        ]:
            del self._tenants[tenant]
