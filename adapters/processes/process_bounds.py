"""Priority and resource limits of a process beside a router, most of them set in that process."""

from __future__ import annotations

import os
import resource
import signal
import sys
from contextlib import suppress
from pathlib import Path


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


def resident_bytes() -> int:
    """Resident memory now. Not its peak, which on Linux includes that of the router that started this process."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * resource.getpagesize() if statm.exists() else 0
