"""How slowly the body of a request may arrive: a pure policy of bytes and seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ArrivalPace:
    """A body that falls behind is given up, so that nobody holds a place by sending a byte now and then."""

    grace_s: float  # before anything need have come
    bytes_per_s: float  # the least rate, on average, after that
    deadline_s: float  # for the whole body

    def latest_s(self, num_bytes: int) -> float:
        """By when, in seconds since the request began, more must have come than `num_bytes`."""
        return min(self.grace_s + num_bytes / self.bytes_per_s, self.deadline_s)
