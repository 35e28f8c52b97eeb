"""The patience of a replica that starts while something is away: Redis, the model, a volume, a GPU.

What comes back is waited for within the start. After a start that has failed Ray Serve begins another one, in another
process, at once and without end (`MAX_FAILED_STARTS`), so the failed one pauses first. Both pauses grow. A start by
hand fails at once all the same: `motet serve` looks at model and Redis before it starts anything, and gives up at the
first failure that Serve reports.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import count
from types import TracebackType
from typing import Any, Final, TypeVar

from ...adapters.errors import RegistryUnavailable
from ...adapters.registry.registry import connect
from ...adapters.registry.starts import Kind, StartReport, Starts
from ..application.model_source import ModelUnavailable
from ..launch_secrets import LaunchSecrets
from ..progress_log import OnEvent, ignore_event
from .start_page import StartPage

MAX_FAILED_STARTS: Final = 1_000_000  # of a deployment, in a row: Serve begins no other one after them
AWAY: Final = (RegistryUnavailable, ModelUnavailable, OSError)  # what is needed may be there later
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
LOG_INTERVAL_S = 300.0

Answer = TypeVar("Answer")

_log = logging.getLogger(__name__)


def pause_s(num_failures: int) -> float:
    """How long to wait after `num_failures` in a row."""
    return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(num_failures - 1, 30))


class ReplicaStart:
    """One start of a replica, as a context manager around its constructor. Belongs to one event loop."""

    def __init__(
        self,
        kind: Kind,
        replica: str,
        cluster: str,
        on_event: OnEvent = ignore_event,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        page: StartPage | None = None,
    ) -> None:
        """`replica`, `cluster`: ids. `on_event`: gets what is waited for. `page`: shown once there are secrets."""
        self._kind, self._replica, self._cluster = kind, replica, cluster
        self._on_event, self._sleep = on_event, sleep
        self._began_at = time.time()
        self._page = page
        self.secrets: LaunchSecrets | None = None  # once they are known; reports are stored in their Redis

    async def __aenter__(self) -> ReplicaStart:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            await self.failed(error)

    async def until(self, what: str, ask: Callable[[], Awaitable[Answer]]) -> Answer:
        """What `ask` returns, which is called until what it asks for is not away. `what`: "the model", "Redis"."""
        try:
            return await ask()
        except AWAY as error:
            why = error
        self._on_event(f"waiting for {what}", 0, 1)
        try:
            return await self._until(what, ask, why)
        finally:
            self._on_event(f"waiting for {what}", 1, 1)
            if self._page is not None:
                await self._page.stop()

    async def _until(self, what: str, ask: Callable[[], Awaitable[Answer]], why: Exception) -> Answer:
        said, said_at = "", 0.0
        for pause in map(pause_s, count(1)):
            if str(why) != said or time.monotonic() - said_at >= LOG_INTERVAL_S:
                said, said_at = str(why), time.monotonic()
                _log.warning("this %s waits for %s: %s", self._kind, what, why)
            await self._report(f"it waits for {what}: {why}", has_failed=False)
            await self._sleep(pause)
            try:
                return await ask()
            except AWAY as error:
                why = error
        raise AssertionError("there is always another pause")

    async def failed(self, error: Exception) -> None:
        """Reports why, if Redis is there, and returns when another start may begin."""
        num_failures: int | None = None
        try:
            await self._report(str(error) or type(error).__name__, has_failed=True)
            num_failures = await self._with_registry(self._num_failures)
        except Exception as why:  # such as an invalid URL
            _log.warning("the failed start of this %s cannot be reported: %s", self._kind, why)
        pause = pause_s(num_failures or 1)
        _log.error("this %s cannot start; the next one begins in %.0f s: %s", self._kind, pause, error)
        await self._sleep(pause)
        if self._page is not None:
            await self._page.stop()

    async def succeeded(self) -> None:
        """The replica serves: deletes what was reported."""
        await self._with_registry(lambda starts: starts.succeeded(self._kind, self._replica))

    async def _report(self, reason: str, *, has_failed: bool) -> None:
        report = StartReport(
            kind=self._kind,
            replica=self._replica,
            reason=reason,
            has_failed=has_failed,
            began_at=self._began_at,
            reported_at=time.time(),
        )
        if self._page is not None and self.secrets is not None:
            await self._page.show(self.secrets.operator_key, has_failed=has_failed)
        await self._with_registry(lambda starts: starts.report(report))

    async def _num_failures(self, starts: Starts) -> int:
        return sum(one.has_failed and one.kind == self._kind for one in await starts.reports())

    async def _with_registry(self, ask: Callable[[Starts], Awaitable[Answer]]) -> Answer | None:
        """None: there is no Redis that answers; then the log has it alone."""
        if self.secrets is None:
            return None
        client: Any = connect(self.secrets.redis_url)
        try:
            with suppress(RegistryUnavailable):
                return await ask(Starts(client, self._cluster))
        finally:
            with suppress(Exception):  # what cannot be closed is gone
                await client.aclose()
        return None
