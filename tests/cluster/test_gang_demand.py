"""Calls to Serve that last as long as sequences wait."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Any

from motet.cluster.replicas.serve_watch import POLL_S, GangDemand
from motet.tests.rigs.patience import eventually_in_loop as eventually


class Call:
    """The answer of a handle, which comes when the test lets it."""

    def __init__(self) -> None:
        self.result: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_cancelled = False

    def __await__(self) -> Generator[Any, None, None]:
        return self.result.__await__()

    def cancel(self) -> None:
        self.is_cancelled = True


class Handle:
    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.wake = self

    def remote(self) -> Call:
        self.calls.append(Call())
        return self.calls[-1]


class Waiting:
    """A router with this number of waiting sequences."""

    def __init__(self) -> None:
        self.num = 0
        self.handle = Handle()
        self.demand = GangDemand(self.handle, lambda: self.num)

    def begin(self) -> None:
        self.num += 1
        self.demand.show()


async def test_many_that_wait_make_one_call() -> None:
    router = Waiting()
    for _ in range(50):
        router.begin()
    await eventually(lambda: len(router.handle.calls) == 1)
    await asyncio.sleep(2 * POLL_S)  # a second call would come within one: a slow machine sees less, and never fails
    assert len(router.handle.calls) == 1
    router.num = 0
    router.handle.calls[0].result.set_result(None)
    await eventually(lambda: router.demand._task is not None and router.demand._task.done())
    assert len(router.handle.calls) == 1  # all are served
    router.begin()
    await eventually(lambda: len(router.handle.calls) == 2)
    router.demand.stop()


async def test_the_call_ends_when_no_sequence_waits_any_more() -> None:
    router = Waiting()
    router.begin()
    await eventually(lambda: len(router.handle.calls) == 1)
    router.num = 0
    await eventually(lambda: router.handle.calls[0].is_cancelled)


async def test_a_call_that_fails_is_made_again() -> None:
    router = Waiting()
    router.begin()
    await eventually(lambda: len(router.handle.calls) == 1)
    router.handle.calls[0].result.set_exception(RuntimeError("the replica died"))
    await eventually(lambda: len(router.handle.calls) == 2)
    router.demand.stop()


async def test_a_router_that_ends_takes_its_call_back() -> None:
    router = Waiting()
    router.begin()
    await eventually(lambda: len(router.handle.calls) == 1)
    router.demand.stop()
    await eventually(lambda: router.handle.calls[0].is_cancelled)
