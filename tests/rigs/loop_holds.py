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

USUAL_S = 0.00011  # for what `slowness` does


@dataclass
class LoopHolds:
    """The longest that one callback took, and what it was. A step of a task is a callback."""

    longest_s: float = 0.0
    what: str = ""
    all_s: list[float] = field(default_factory=list)  # those over a millisecond


@contextmanager
def measured_holds() -> Iterator[LoopHolds]:
    """Measures every callback of asyncio's own loop, on the thread that this is called on, until the block ends."""
    holds = LoopHolds()
    was_enabled = gc.isenabled()
    gc.disable()
    plain_run = asyncio.events.Handle._run

    running: tuple[asyncio.Handle, float] | None = None  # and when it began
    is_over = False

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
        if not is_over:
            note(*running)

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


def slowness() -> float:
    """How many times slower than a usual machine this one computes now; at least 1."""
    text = json.dumps([{"role": "user", "content": "hello"}] * 500)
    fastest_s = float("inf")
    for _ in range(5):
        began_at = time.thread_time()
        json.loads(text)
        fastest_s = min(fastest_s, time.thread_time() - began_at)
    return max(1.0, fastest_s / USUAL_S)
