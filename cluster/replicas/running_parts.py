"""The parts of a replica that were started, and how they are stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from contextlib import AsyncExitStack
from typing import Any, Protocol, TypeVar

from ...adapters.ended_tasks import end_tasks


class Part(Protocol):
    """Something that works in the background between its start and its stop. Either may be a coroutine function."""

    def start(self) -> Awaitable[None] | None: ...
    def stop(self) -> Awaitable[None] | None: ...


P = TypeVar("P", bound=Part)


class RunningParts(AsyncExitStack):
    """Stops on `aclose` what was started, the last part first. A stop that fails does not keep others from stopping.

    As a context manager it stops everything if the start of a later part fails; `pop_all` ends that.
    """

    async def start(self, part: P) -> P:
        """Returns the part once it has started."""
        if (starting := part.start()) is not None:
            await starting
        self.push_async_callback(_stop, part)
        return part

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Has the work done in the background. It is cancelled and has ended before what was started earlier stops."""
        self.push_async_callback(end_tasks, asyncio.create_task(work))


async def _stop(part: Part) -> None:
    if (stopping := part.stop()) is not None:
        await stopping
