"""Updates about adapters in the workers' host memory that the next plan carries."""

from __future__ import annotations

from collections.abc import Mapping

from ..plan import StepPlan

_MAX_OUTDATED = 1024  # digests that wait for a step; the oldest beyond are dropped


class PendingHostUpdates:
    def __init__(self) -> None:
        self._outdated: list[str] = []
        self._pins: dict[str, bool] = {}

    def outdate(self, digest: str) -> None:
        """The adapter has no name any more."""
        self._outdated = [*self._outdated[-_MAX_OUTDATED:], digest]

    def pin(self, changes: Mapping[str, bool]) -> None:
        """Pins (True) or unpins adapters in host memory."""
        self._pins |= changes

    def take(self, *, computes: bool) -> tuple[tuple[str, ...], dict[str, bool]]:
        """The outdated digests and the pins for a plan. `computes`: it has sequences."""
        pins, self._pins = (self._pins, {}) if self._pins else ({}, self._pins)
        if not computes:
            return (), pins
        outdated, self._outdated = tuple(self._outdated), []
        return outdated, pins

    def put_back(self, plan: StepPlan) -> None:
        """Restores the updates of a plan that is not executed."""
        self._outdated = [*plan.outdated, *self._outdated]
        self._pins = {**plan.pins, **self._pins}
