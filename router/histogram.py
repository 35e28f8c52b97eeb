"""A histogram without a lock: cheap enough to count every update of a sequence."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class Histogram:
    """Counts values by bucket. One thread writes, and others may read.

    `bounds`: upper bounds of the buckets, ascending; one more bucket has no bound.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, number of values up to it) of each bucket, as Prometheus expects them."""
        total = 0
        found = []
        counts = self._counts[:]  # of one moment: +Inf, which is also their number, is the sum of what stands before it
        for bound, count in zip([*map(str, map(float, self._bounds)), "+Inf"], counts, strict=True):
            total += count
            found.append((bound, float(total)))
        return found
