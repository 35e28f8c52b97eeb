"""The time after which a step counts as hung: shorter on a gang whose steps were short so far."""

from __future__ import annotations

LEAST_S = 30.0  # a busy machine, or a prompt after many short steps, must not look like a hang
FACTOR = 20.0  # of the longest step so far


class StepDeadline:
    """Learns from the steps of one engine. Before the first one has ended nothing is known, and the limit holds."""

    def __init__(self, limit_s: float) -> None:
        """`limit_s`: no step may take longer, whatever those before it took."""
        self._limit_s = self._deadline_s = limit_s
        self._longest_s = 0.0

    @property
    def seconds(self) -> float:
        return self._deadline_s

    def observe(self, step_s: float) -> None:
        """A step has ended, after this time."""
        self._longest_s = max(self._longest_s, step_s)
        self._deadline_s = min(self._limit_s, max(LEAST_S, FACTOR * self._longest_s))
