"""How often something in the pool was used, where uses of long ago count less."""

from __future__ import annotations

from dataclasses import dataclass

HALF_LIFE = 32.0  # rounds of the idle order, in each of which as much went as is idle
MOST = 32.0  # an item that is not used any more goes after so many rounds at the latest


@dataclass(slots=True)
class UseCount:
    """Ageing after Robinson and Devarakonda (SIGMETRICS 1990): without it, what was once popular stays."""

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
        """As of the last use. At least 1: what is here was asked for."""
        return min(max(self._sum, 1.0), MOST)

    def reset(self) -> None:
        """Nobody is expected to use it again."""
        self._sum = 0.0
