"""Whether this router can serve a token: proved by having served one a moment ago."""

from __future__ import annotations

import asyncio
import time

from ..workers.messages import SamplingParams, SequenceError
from .config import RouterConfig
from .dispatch import Dispatcher
from .metrics import Metrics

PROBE_TENANT = "system"
_PROBE = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


class Readiness:
    """A client's token counts as proof, so a busy router is not probed. Concurrent checks share one probe."""

    def __init__(self, config: RouterConfig, dispatcher: Dispatcher, metrics: Metrics) -> None:
        self._config = config
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._probed_at: float | None = None  # time.perf_counter() of the last success
        self._lock = asyncio.Lock()

    async def problem(self) -> str | None:
        """Why no token can be served now; None: one can."""
        if self._dispatcher.gang() is None:
            return "no gang of workers is connected"
        async with self._lock:
            if self._is_proved():
                return None
            problem = await self._probe()
            if problem is None:
                self._probed_at = time.perf_counter()
            return problem

    def _is_proved(self) -> bool:
        times = [at for at in (self._probed_at, self._metrics.last_token_at) if at is not None]
        return bool(times) and time.perf_counter() - max(times) < self._config.ready_interval_s

    async def _probe(self) -> str | None:
        error: SequenceError | None = None
        stream = self._dispatcher.submit([0], _PROBE, PROBE_TENANT, None)
        try:
            async with asyncio.timeout(self._config.ready_timeout_s):
                async for update in stream:
                    if update.token_ids:
                        return None
                    error = update.error or error
        except TimeoutError:
            return f"no token was served within {self._config.ready_timeout_s:g} s"
        finally:
            stream.cancel()
        return f"no token can be served: {error.message if error is not None else 'the sequence ended without one'}"
