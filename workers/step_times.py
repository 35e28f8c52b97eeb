"""Times of a gang's steps and loads, from which routers estimate waits."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from .wire.engine_load import EngineLoad


class StepTimes:
    """Seconds inside steps, and seconds of adapters' loads, since the engine's start.

    An adapter counts from the beginning of the step that starts its load to the end of the step that commits it, as
    long as its sequences wait. Concurrent loads count each.
    """

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
        # Between two steps the engine may have slept; the loader has not.
        before, self._load = self._load, load
        self._loading_s += before.gauges.num_coming_adapters * (now - self._ended_at)
        num_loads = load.counters.num_adapter_loads - before.counters.num_adapter_loads
        self._loading_s += num_loads * (now - self._began_at)
        self._ended_at = now
        return self.filled_in(load)

    def filled_in(self, load: EngineLoad) -> EngineLoad:
        """The load with the times as of the last step: no counter of an engine ever falls."""
        counters = msgspec.structs.replace(load.counters, busy_s=self._busy_s, loading_s=self._loading_s)
        return EngineLoad(load.gauges, counters)
