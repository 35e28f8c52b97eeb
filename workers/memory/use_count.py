"""A decaying count of uses."""

from __future__ import annotations

import msgspec

HALF_LIFE = 32.0  # in rounds of the idle order
MOST = 32.0  # so an unused item is evicted after this many rounds at the latest


class UseCount(msgspec.Struct, gc=False):
    """Ageing after Robinson and Devarakonda (SIGMETRICS 1990): without it, once popular items would stay."""

    _sum: float = 0.0
    _since: float = 0.0  # round as of which the uses are summed

    def add(self, now: float) -> None:
        """One more use. `now`: rounds so far."""
        if now - self._since > 1.0:
            self._sum *= 0.5 ** ((now - self._since) / HALF_LIFE)
            self._since = now
        self._sum += 1.0

    @property
    def value(self) -> float:
        """As of the last use; at least 1."""
        return min(max(self._sum, 1.0), MOST)
