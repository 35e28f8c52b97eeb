"""The end of tasks that go on until they are cancelled."""

from __future__ import annotations

import asyncio
from typing import Any, Final

_AGAIN_S: Final = 1.0


async def end_tasks(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancels tasks, and returns once all have ended. None stands for one that was not begun.

    One cancellation may not do: up to Python 3.11 `asyncio.wait_for` hides one that comes in the very moment in which
    what it waits for is done (python/cpython#86296), and redis-py waits so for what it writes. A task in a loop would
    go on for ever, and whoever waits for it.
    """
    going_on = {task for task in tasks if task is not None}
    while going_on:
        for task in going_on:
            task.cancel()
        _, going_on = await asyncio.wait(going_on, timeout=_AGAIN_S)
