"""Where a gang's time goes: routers estimate from it what a queue and a cold load cost there."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from .messages import EngineLoad


class StepTimes:
    """Seconds spent inside steps, and seconds with an adapter coming, since the engine's start."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._busy_s = self._loading_s = 0.0
        self._began_at = self._ended_at = clock()
        self._load = EngineLoad()  # after the last step

    def begin_step(self) -> None:
        self._began_at = self._clock()

    def end_step(self, load: EngineLoad) -> EngineLoad:
        """The load after the step that ends now, with the times filled in."""
        now = self._clock()
        self._busy_s += now - self._began_at
        if self._load.num_coming_adapters:
            self._loading_s += now - self._ended_at  # the engine may have slept in between, the loader has not
        elif load.num_adapter_loads > self._load.num_adapter_loads:
            self._loading_s += now - self._began_at
        self._ended_at, self._load = now, load
        return msgspec.structs.replace(load, busy_s=self._busy_s, loading_s=self._loading_s)
