"""What workers have not heard yet of the adapters in their host memory: it travels with the next plan."""

from __future__ import annotations

from collections.abc import Mapping

from ..plan import StepPlan

_MAX_OUTDATED = 1024  # digests that wait for a step; of more the oldest are forgotten


class PendingHostUpdates:
    def __init__(self) -> None:
        self._outdated: list[str] = []
        self._pins: dict[str, bool] = {}

    def outdate(self, digest: str) -> None:
        """No name points to the adapter any more."""
        self._outdated = [*self._outdated[-_MAX_OUTDATED:], digest]

    def pin(self, changes: Mapping[str, bool]) -> None:
        """Adapters that host memory must keep from now on (True), or need not keep any more."""
        self._pins |= changes

    def take(self, *, computes: bool) -> tuple[tuple[str, ...], dict[str, bool]]:
        """The outdated digests and the pins for a plan. `computes`: it has sequences."""
        pins, self._pins = (self._pins, {}) if self._pins else ({}, self._pins)
        if not computes:
            return (), pins
        outdated, self._outdated = tuple(self._outdated), []
        return outdated, pins

    def put_back(self, plan: StepPlan) -> None:
        """The plan is not executed."""
        self._outdated = [*plan.outdated, *self._outdated]
        self._pins = {**plan.pins, **self._pins}
