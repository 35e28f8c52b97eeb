"""A process for `ChildProcesses`: `python -m motet.tests.rigs.scripted_child`. Each question is what it is to do."""

from __future__ import annotations

import os
import sys

from motet.adapters.processes.child_processes import (
    LAST,
    NOT_LAST,
    bound_cpu,
    bound_memory,
    read_frames,
    resident_bytes,
    write_frames,
)

MEMORY_BYTES = 256 << 20


def main() -> None:
    bound_memory(MEMORY_BYTES)
    while frames := read_frames(sys.stdin.buffer):
        what, *rest = frames
        answer = [str(os.getpid()).encode(), *rest]
        if what == b"end":
            return
        if what == b"spin":
            bound_cpu(0.1)
            while True:
                pass
        if what == b"grow":
            try:
                answer.append(b"%d" % len(bytes(2 * MEMORY_BYTES)))
            except MemoryError:
                answer.append(b"no memory")
        if what == b"sleep":
            sys.stdin.buffer.read()
        assert resident_bytes() < MEMORY_BYTES
        write_frames(sys.stdout.buffer, [LAST if what == b"last" else NOT_LAST, *answer])


if __name__ == "__main__":
    main()
