"""How long callbacks hold an event loop, in CPU time of its thread: a busy machine does not count, a slow one does.

Searches for garbage do not count either: a router's process makes them rare (`cluster/replicas/ingress.py`), and a test
process holds a lot that a router does not.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

PROBE = json.dumps([{"role": "user", "content": "hello"}] * 1500)
COLD = memoryview(bytearray(b"1") * (64 << 20))  # more than its own caches keep
USUAL_S, USUAL_COLD_S = 0.00033, 0.000065  # for `json.loads` of the probe, and for 1,024 cache lines from memory
PAUSE_S = 0.002  # between two probes


@dataclass
class LoopHolds:
    """The longest that one callback took, and what it was. A step of a task is a callback."""

    longest_s: float = 0.0
    what: str = ""
    all_s: list[float] = field(default_factory=list)  # those over a millisecond
    probes_s: list[float] = field(default_factory=list)  # what the same little work took from time to time
    cold_s: list[float] = field(default_factory=list)  # and the same reads of memory

    def within(self, most_s: float) -> bool:
        """No callback would have taken longer on a usual machine that is left alone.

        A virtual machine counts time that its host takes from it as its own. So a callback may have taken longer by as
        much as the slowest probe did, and by as much as memory is slower, which other machines of the host use too.
        """
        fastest_s, slowest_s = min(self.probes_s), max(self.probes_s)
        slower = max(1.0, fastest_s / USUAL_S, statistics.median(self.cold_s) / USUAL_COLD_S)
        return self.longest_s <= most_s * slower + slowest_s - fastest_s


@contextmanager
def measured_holds() -> Iterator[LoopHolds]:
    """Measures every callback of asyncio's own loop, on the thread that this is called on, until the block ends."""
    holds = LoopHolds()
    was_enabled = gc.isenabled()
    gc.disable()
    plain_run = asyncio.events.Handle._run

    running: tuple[asyncio.Handle, float] | None = None  # and when it began
    is_over = False
    offsets = itertools.cycle(64 * line + (part << 22) for line in range(64) for part in range(16))

    def probe() -> None:
        began_at = time.thread_time()
        json.loads(PROBE)
        read_at = time.thread_time()
        holds.probes_s.append(read_at - began_at)
        offset = next(offsets)
        bytes(COLD[offset : offset + (4 << 20) : 4096])
        holds.cold_s.append(time.thread_time() - read_at)
        if not is_over:
            loop.call_later(PAUSE_S, probe)

    def note(handle: asyncio.Handle, began_at: float) -> None:
        held_s = time.thread_time() - began_at
        if held_s > 0.001:
            holds.all_s.append(held_s)
        if held_s > holds.longest_s:
            holds.longest_s, holds.what = held_s, repr(handle)[:600]

    def run(self: asyncio.Handle) -> None:
        nonlocal running
        running = self, time.thread_time()
        plain_run(self)
        if not is_over and self._callback is not probe:  # type: ignore[attr-defined]
            note(*running)

    loop = asyncio.get_running_loop()
    probe()
    asyncio.events.Handle._run = run  # type: ignore[method-assign]
    try:
        yield holds
    finally:
        asyncio.events.Handle._run = plain_run  # type: ignore[method-assign]
        is_over = True  # the callback that is here goes on with the test itself, and with a search for garbage
        if running is not None:
            note(*running)
        if was_enabled:
            gc.enable()
