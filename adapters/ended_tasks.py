"""Cancels tasks that run until they are cancelled."""

from __future__ import annotations

import asyncio
from typing import Any, Final

_AGAIN_S: Final = 1.0


async def end_tasks(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancels tasks, and returns once all have ended. None stands for a task that was not started.

    One cancellation may not be enough: up to Python 3.11 `asyncio.wait_for` swallows a cancellation that arrives as the
    awaited future completes (python/cpython#86296), and redis-py uses it for writes. A task in a loop would then run
    for ever, and so would this wait.

    A caller that is itself cancelled ends after them: what it closes next is theirs, too.
    """
    running = {task for task in tasks if task is not None}
    assert asyncio.current_task() not in running, "a task cannot wait for its own end"
    is_cancelled = False
    while running:
        for task in running:
            task.cancel()
        try:
            _, running = await asyncio.wait(running, timeout=_AGAIN_S)
        except asyncio.CancelledError:
            is_cancelled = True
    if is_cancelled:
        raise asyncio.CancelledError
