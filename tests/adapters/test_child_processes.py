"""Processes that take calls: they live on, are replaced when they end, and are bounded."""

from __future__ import annotations

import asyncio
import signal

import psutil
import pytest

from motet.adapters.processes.child_processes import ChildEnded, ChildProcesses
from motet.tests.rigs.patience import PATIENCE_S, eventually_in_loop

CHILD = "motet.tests.rigs.scripted_child"


async def ask(processes: ChildProcesses, *frames: bytes) -> list[bytes]:
    async with processes.process() as process:
        return await process.ask(frames, list)


async def pid_of(processes: ChildProcesses) -> int:
    return int((await ask(processes, b"say"))[0])


async def test_a_process_answers_one_question_after_the_other() -> None:
    processes = ChildProcesses(CHILD, 1, PATIENCE_S)
    pid = await pid_of(processes)
    assert (await ask(processes, b"say", b"", b"x" * 100_000))[1:] == [b"", b"x" * 100_000]
    async with processes.process() as process:
        assert [int((await process.ask([b"say"], list))[0]) for _ in range(3)] == [pid] * 3
    assert int((await ask(processes, b"last"))[0]) == pid
    assert await pid_of(processes) != pid


async def test_one_that_ends_or_is_given_up_is_replaced() -> None:
    processes = ChildProcesses(CHILD, 2, PATIENCE_S)
    pid = await pid_of(processes)
    with pytest.raises(ChildEnded) as ended:
        await ask(processes, b"end")
    assert ended.value.status == 0
    given_up = await pid_of(processes)
    assert given_up != pid
    task = asyncio.create_task(ask(processes, b"sleep"))
    await eventually_in_loop(lambda: not processes._idle)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await eventually_in_loop(lambda: not psutil.pid_exists(given_up))
    processes._deadline_s = 0.01
    with pytest.raises(TimeoutError):
        await ask(processes, b"sleep")
    processes._deadline_s = PATIENCE_S
    assert await pid_of(processes) not in (pid, given_up)


async def test_processes_are_bounded_in_memory_and_cpu() -> None:
    processes = ChildProcesses(CHILD, 1, PATIENCE_S)
    assert (await ask(processes, b"grow"))[-1] == b"no memory"
    with pytest.raises(ChildEnded) as ended:
        await ask(processes, b"spin")
    assert ended.value.status == -signal.SIGPROF


async def test_they_end_with_what_has_started_them() -> None:
    processes = ChildProcesses(CHILD, 1, PATIENCE_S)
    pid = await pid_of(processes)
    del processes
    await eventually_in_loop(lambda: not psutil.pid_exists(pid))
