"""Takes half of each core for as long as another process lives, to see how tests fare on a busy machine.

    python scripts/busy_loops.py PID

On each core that this process may use runs one loop, which computes for a tenth of a second and rests for the next.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time

BUSY_S = 0.1


def main(pid: int) -> None:
    """Returns when the process has ended."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    loops = [multiprocessing.Process(target=take_half, args=(core, pid), daemon=True) for core in cores]
    for loop in loops:
        loop.start()
    for loop in loops:
        loop.join()


def take_half(core: int, pid: int) -> None:
    """Of this core, or of any where processes cannot be bound to one."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})
    while is_alive(pid):
        end = time.monotonic() + BUSY_S
        while time.monotonic() < end:
            pass
        time.sleep(BUSY_S)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    main(int(sys.argv[1]))
