"""Child processes for work that would hold this process' GIL for long."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import struct
import subprocess
import sys
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import IO, Final, TypeVar

# Lists of byte strings through a pipe: their number, the length of each, then the bytes.

LAST: Final = b"last"  # the first frame of an answer: the process answers no other question
NOT_LAST: Final = b""

_NUMBER: Final = struct.Struct("<Q")


def write_frames(sink: IO[bytes], frames: Sequence[bytes | bytearray]) -> None:
    """Blocking. Raises OSError if the other end is closed."""
    sink.write(b"".join(map(_NUMBER.pack, (len(frames), *map(len, frames)))))
    for frame in frames:
        sink.write(frame)
    sink.flush()


def read_frames(source: IO[bytes]) -> list[bytes]:
    """The frames that were written together; empty at the end. Blocking. Raises EOFError if they are cut off."""
    start = source.read(_NUMBER.size)
    if not start:
        return []
    num_frames = _number(start)
    lengths = [_number(source.read(_NUMBER.size)) for _ in range(num_frames)]
    frames = [source.read(length) for length in lengths]
    if list(map(len, frames)) != lengths:
        raise EOFError("the frames were cut off")
    return frames


def _number(data: bytes) -> int:
    if len(data) < _NUMBER.size:
        raise EOFError("the frames were cut off")
    (number,) = _NUMBER.unpack(data)
    return int(number)


# Priority and resource limits of a process beside a router, most of them set in that process.


def yield_to_others(niceness: int) -> None:
    """Lowers this process's CPU priority."""
    os.nice(niceness)


def yield_wholly(process_id: int) -> None:
    """Has another process run only while a processor would be idle; any process that wakes preempts it at once."""
    if sys.platform == "linux":
        os.sched_setscheduler(process_id, os.SCHED_IDLE, os.sched_param(0))
    else:
        os.setpriority(os.PRIO_PROCESS, process_id, 19)


def bound_memory(num_bytes: int) -> None:
    """Limits private memory, without mapped files: more raises MemoryError. A no-op on systems without such a limit."""
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_DATA, (num_bytes, num_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def bound_stack(num_bytes: int) -> None:
    """Limits the stack of the main thread: using more ends the process by SIGSEGV."""
    _, hard = resource.getrlimit(resource.RLIMIT_STACK)
    resource.setrlimit(resource.RLIMIT_STACK, (num_bytes, hard))


def bound_cpu(seconds: float) -> None:
    """Ends this process by SIGPROF after this much more CPU time."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


def extend_cpu(seconds: float) -> None:
    """Lets this process take this much more than `bound_cpu` has let it."""
    left_s, _ = signal.getitimer(signal.ITIMER_PROF)
    if left_s:
        signal.setitimer(signal.ITIMER_PROF, left_s + seconds)


def resident_bytes() -> int:
    """Resident memory now. Not its peak, which on Linux includes that of the router that started this process."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * resource.getpagesize() if statm.exists() else 0


T = TypeVar("T")
_log = logging.getLogger(__name__)
_ONE_THREAD: Final = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}  # of libraries in the processes


class ChildEnded(EOFError):  # noqa: N818
    """The process ended before it answered. `status`: its exit status, or a signal below 0."""

    def __init__(self, status: int) -> None:
        super().__init__(f"the process ended with status {status}")
        self.status = status


class ChildProcesses:
    """At most `max_processes` processes at once of `python -m module`, which answer requests one after the other.

    Requests and answers are lists of frames; the first frame of an answer is LAST or NOT_LAST. Processes start at first
    use, and end with this object. Belongs to one event loop.
    """

    def __init__(self, module: str, max_processes: int, deadline_s: float) -> None:
        """`deadline_s`: for one request."""
        self._command = (sys.executable, "-m", module)
        self._deadline_s = deadline_s
        self._threads = ThreadPoolExecutor(max_processes, thread_name_prefix=module.rpartition(".")[2])
        self._places = asyncio.Semaphore(max_processes)
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
        state, *reply_frames = answer
        return read(reply_frames), state == LAST


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
