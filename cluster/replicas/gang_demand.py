"""Shows Ray Serve that a gang is wanted while there is none."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

POLL_S = 0.2

_log = logging.getLogger(__name__)


class GangDemand:
    """Keeps one call to the gangs waiting in Serve for as long as sequences of this router wait for a gang.

    Tokens do not pass through Serve, so Serve does not see the demand. A call that finds no replica waits at the
    handle, which notifies the controller at once. The controller starts a gang, the call ends, and the sequences go to
    the gang directly. Belongs to one event loop.
    """

    def __init__(self, gang: Any, num_waiting: Callable[[], int]) -> None:
        """`gang`: Serve's handle of the gangs. `num_waiting`: sequences of this router that wait for a gang now."""
        self._gang = gang
        self._num_waiting = num_waiting
        self._task: asyncio.Task[None] | None = None

    def show(self) -> None:
        """Call it when a sequence begins to wait."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._call_while_waiting(), name="gang demand")

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _call_while_waiting(self) -> None:
        while self._num_waiting():
            call = self._gang.wake.remote()
            answer = asyncio.ensure_future(_answer(call))
            try:
                while self._num_waiting() and not answer.done():
                    await asyncio.wait([answer], timeout=POLL_S)
            finally:
                if not answer.done():
                    call.cancel()  # no sequence waits any more
                    answer.cancel()
            await asyncio.sleep(POLL_S)  # a gang that answered is connected to in a moment


async def _answer(call: Any) -> None:
    try:
        await call
    except Exception as error:  # the gang may have died: while sequences wait, the next round calls again
        _log.warning("a call to the gangs failed: %r", error)
