"""How long callbacks hold an event loop, in CPU time of its thread: a busy machine does not count, a slow one does.

Searches for garbage do not count either: a router's process makes them rare (`cluster/replicas/ingress.py`), and a test
process holds a lot that a router does not.
"""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

PROBE = json.dumps([{"role": "user", "content": "hello"}] * 1500)
USUAL_S = 0.00033  # for `json.loads` of the probe
PAUSE_S = 0.002  # between two probes


@dataclass
class LoopHolds:
    """The longest that one callback took, and what it was. A step of a task is a callback."""

    longest_s: float = 0.0
    what: str = ""
    all_s: list[float] = field(default_factory=list)  # those over a millisecond
    probes_s: list[float] = field(default_factory=list)  # what the same little work took from time to time

    def within(self, most_s: float) -> bool:
        """No callback would have taken longer on a usual machine that is left alone.

        A virtual machine counts time that its host takes from it as its own. So a callback may have taken longer by as
        much as the slowest probe did.
        """
        fastest_s, slowest_s = min(self.probes_s), max(self.probes_s)
        return self.longest_s <= most_s * max(1.0, fastest_s / USUAL_S) + slowest_s - fastest_s


@contextmanager
def measured_holds() -> Iterator[LoopHolds]:
    """Measures every callback of asyncio's own loop, on the thread that this is called on, until the block ends."""
    holds = LoopHolds()
    was_enabled = gc.isenabled()
    gc.disable()
    plain_run = asyncio.events.Handle._run

    running: tuple[asyncio.Handle, float] | None = None  # and when it began
    is_over = False

    def probe() -> None:
        began_at = time.thread_time()
        json.loads(PROBE)
        holds.probes_s.append(time.thread_time() - began_at)
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
