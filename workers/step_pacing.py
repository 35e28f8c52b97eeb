"""How late in a step the next plan can be made, learnt from how steps went."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

_LATE = 0.1  # a plan should be ready this part of the expected time before the running step ends
_LEAST_SPARE, _MOST_SPARE, _MORE_SPARE = 0.05, 0.85, 0.01  # parts of the expected time


class StepPacing:
    """Times steps, of which the next one may begin while one runs."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began_at = self._planned_at = 0.0  # the running step; the plan after it
        self._expected_s: deque[float] = deque()  # of the running step, and of the one begun after it
        self._spare = _LEAST_SPARE  # part of a step's expected time for which the next plan can wait

    def begin(self, expected_s: float) -> None:
        """A step begins; its execution waits for the running one, if there is one."""
        if not self._expected_s:
            self._began_at = self._clock()
        self._expected_s.append(expected_s)

    @property
    def spare_s(self) -> float:
        """For how long the next plan can still wait, as far as the running step takes what such steps took."""
        return max(0.0, self._began_at + self._spare * self._expected_s[0] - self._clock())

    def planned(self) -> None:
        """The plan after the running step is made: nothing is left to do but to wait for the step."""
        self._planned_at = self._clock()

    def end(self) -> float:
        """The running step has ended: the seconds that it took. The step begun after it now runs."""
        now, expected_s = self._clock(), self._expected_s.popleft()
        left_s = now - self._planned_at
        if left_s < _LATE * expected_s:  # the device had to wait for the next plan, or nearly so
            self._spare = max(_LEAST_SPARE, self._spare * (0.9 if left_s > 0.1 * _LATE * expected_s else 0.5))
        else:
            self._spare = min(_MOST_SPARE, self._spare + _MORE_SPARE)
        took_s, self._began_at = now - self._began_at, now
        return took_s
