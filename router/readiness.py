"""Whether this router can serve tokens: it can if it has served one a moment ago."""

from __future__ import annotations

import asyncio
import time

from ..workers.wire.messages import GangInfo
from .config import CurrentConfig
from .fleet.dispatch import Dispatcher
from .fleet.probe import probe
from .metrics import Metrics


class Readiness:
    """Probes a gang by asking it for one token, unless a client's request just got one. Checks share a probe.

    Where gangs scale from zero, a router without a gang is ready, because a request makes a gang start. Each gang is
    then probed only once: further probes would count as demand and keep the gang from being stopped.
    """

    def __init__(self, config: CurrentConfig, dispatcher: Dispatcher, metrics: Metrics) -> None:
        self._config = config
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._probed_at: float | None = None  # time.perf_counter() of the last success
        self._probed_gang_id: str | None = None  # the gang that was there then
        self._lock = asyncio.Lock()

    async def problem(self) -> str | None:
        """Why no token can be served now; None: one can."""
        gang = self._dispatcher.gang()
        if gang is None:
            return None if self._config.now.scales_from_zero else "no gang of workers is connected"
        async with self._lock:
            if self._is_proved(gang):
                return None
            problem = await self._probe()
            if problem is None:
                self._probed_at = time.perf_counter()
                self._probed_gang_id = gang.gang_id
            return problem

    def _is_proved(self, gang: GangInfo) -> bool:
        if self._config.now.scales_from_zero and self._probed_gang_id == gang.gang_id:
            return True
        times = [at for at in (self._probed_at, self._metrics.last_token_at) if at is not None]
        return bool(times) and time.perf_counter() - max(times) < self._config.now.ready_interval_s

    async def _probe(self) -> str | None:
        try:
            async with asyncio.timeout(self._config.now.ready_timeout_s):
                return await probe(self._dispatcher)
        except TimeoutError:
            return f"no token was served within {self._config.now.ready_timeout_s:g} s"
