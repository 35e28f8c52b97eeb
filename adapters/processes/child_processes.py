"""Child processes for work that would hold this process' GIL for long."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Final, TypeVar

from .process_frames import LAST, read_frames, write_frames

T = TypeVar("T")
_log = logging.getLogger(__name__)
_ONE_THREAD: Final = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}  # of libraries in the processes


class ChildEnded(EOFError):  # noqa: N818
    """The process ended before it answered. `status`: its exit status, or a signal below 0."""

    def __init__(self, status: int) -> None:
        super().__init__(f"the process ended with status {status}")
        self.status = status


class ChildProcesses:
    """At most `most` processes at once of `python -m module`, which answer requests one after the other.

    Requests and answers are lists of frames; the first frame of an answer is LAST or NOT_LAST. Processes start at first
    use, and end with this object. Belongs to one event loop.
    """

    def __init__(self, module: str, most: int, deadline_s: float) -> None:
        """`deadline_s`: for one request."""
        self._command = (sys.executable, "-m", module)
        self._deadline_s = deadline_s
        self._threads = ThreadPoolExecutor(most, thread_name_prefix=module.rpartition(".")[2])
        self._places = asyncio.Semaphore(most)
        self._idle: list[subprocess.Popen[bytes]] = []
        weakref.finalize(self, _end_all, self._idle)

    @asynccontextmanager
    async def process(self) -> AsyncIterator[ChildProcess]:
        """A process for related requests. It is killed unless all of them were answered."""
        async with self._places:
            process = self._idle_process()
            if process is None:
                process = await asyncio.get_running_loop().run_in_executor(self._threads, self._started)
            child = ChildProcess(process, self._threads, self._deadline_s)
            try:
                yield child
            finally:
                if child.is_last:
                    process.kill()
                    self._threads.submit(_end, process)  # the wait may be long, for its disk
                else:
                    self._idle.append(process)

    def _idle_process(self) -> subprocess.Popen[bytes] | None:
        """An idle process; None: there is none."""
        while self._idle:
            process = self._idle.pop()
            if process.poll() is None:
                return process
            _end(process)
        return None

    def _started(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | _ONE_THREAD
        )


class ChildProcess:
    def __init__(self, process: subprocess.Popen[bytes], threads: ThreadPoolExecutor, deadline_s: float) -> None:
        self.is_last = False  # it accepts no more requests
        self._process, self._threads, self._deadline_s = process, threads, deadline_s

    async def ask(self, frames: Sequence[bytes | bytearray], read: Callable[[list[bytes]], T]) -> T:
        """Returns `read` of the answer's other frames, called in a thread.

        Raises TimeoutError, ChildEnded and OSError.
        """
        assert not self.is_last
        self.is_last = True  # also after a cancellation, when the process still works on this request
        async with asyncio.timeout(self._deadline_s):
            loop = asyncio.get_running_loop()
            answer, is_last = await loop.run_in_executor(self._threads, self._answer, frames, read)
        self.is_last = is_last
        return answer

    def _answer(self, frames: Sequence[bytes | bytearray], read: Callable[[list[bytes]], T]) -> tuple[T, bool]:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            write_frames(process.stdin, frames)
            answer = read_frames(process.stdout)
        except (BrokenPipeError, EOFError):
            answer = []
        if not answer:
            raise ChildEnded(process.wait())
        state, *rest = answer
        return read(rest), state == LAST


def _end_all(processes: list[subprocess.Popen[bytes]]) -> None:
    while processes:
        _end(processes.pop())


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except OSError:  # the buffer cannot be flushed any more
                pass
