"""Tasks end when they are cancelled, also where one cancellation is lost."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from motet.adapters.ended_tasks import end_tasks


async def test_a_cancellation_that_wait_for_hides() -> None:
    """It comes in the moment in which what is waited for is done (python/cpython#86296, up to Python 3.11)."""
    written = [asyncio.get_running_loop().create_future() for _ in range(2)]

    async def writes() -> None:
        for each in written:
            await asyncio.wait_for(each, 3600)

    task = asyncio.create_task(writes())
    await asyncio.sleep(0)
    written[0].set_result(None)
    await end_tasks(task)
    assert task.cancelled()


async def test_all_end_whichever_takes_longest() -> None:
    hidden = []

    async def goes_on(times: int) -> None:
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                hidden.append(times)
                if hidden.count(times) > times:
                    raise

    tasks = [asyncio.create_task(goes_on(times)) for times in (0, 1, 2)]
    await asyncio.sleep(0)
    await end_tasks(*tasks, None)
    assert all(task.cancelled() for task in tasks)


async def test_who_is_cancelled_as_it_ends_tasks_ends_after_them() -> None:
    """As it is where its own end takes longer than a second: it is cancelled again then."""
    may_end, ended = asyncio.Event(), []

    async def closes_slowly() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            while not may_end.is_set():
                with suppress(asyncio.CancelledError):
                    await may_end.wait()
            ended.append("inner")

    async def ends_it(inner: asyncio.Task[None]) -> None:
        try:
            await end_tasks(inner)
        finally:
            ended.append("outer")

    inner = asyncio.create_task(closes_slowly())
    await asyncio.sleep(0)
    outer = asyncio.create_task(ends_it(inner))
    for _ in range(3):
        await asyncio.sleep(0)
        outer.cancel()
    may_end.set()
    await asyncio.wait((outer,))
    assert outer.cancelled() and ended == ["inner", "outer"]


async def test_what_has_ended_and_what_was_never_begun() -> None:
    task = asyncio.create_task(asyncio.sleep(0))
    await task
    await end_tasks(task, None)
    await end_tasks()
