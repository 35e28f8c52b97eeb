"""Uses half of each core while another process runs, to test on a busy machine.

    python scripts/busy_loops.py PID

One loop runs on each core that this process may use, and alternates between computing and sleeping every 0.1 s.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time

SLICE_S = 0.1


def main(pid: int) -> None:
    """Returns when the process has ended."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    loops = [multiprocessing.Process(target=take_half, args=(core, pid), daemon=True) for core in cores]
    for loop in loops:
        loop.start()
    for loop in loops:
        loop.join()


def take_half(core: int, pid: int) -> None:
    """Uses half of this core, or of any core if processes cannot be bound to one; of a full core, its fair share."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})
    began_at, taken_before_s = time.monotonic(), time.process_time()
    while is_alive(pid):
        owed_s = (time.monotonic() - began_at) / 2 - (time.process_time() - taken_before_s)
        if owed_s <= 0:
            time.sleep(SLICE_S)
        end = time.process_time() + min(owed_s, SLICE_S)
        while time.process_time() < end:
            pass


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    main(int(sys.argv[1]))
