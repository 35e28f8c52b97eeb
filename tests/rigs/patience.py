"""How tests wait: for a condition, with a deadline that only what is broken misses."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

# Nothing that works takes so long, however slow and busy the machine is; a test that fails may.
PATIENCE_S = 300.0


def eventually(check: Callable[[], object], what: Callable[[], str] = lambda: "it did not come about") -> None:
    """Returns once the check holds; fails with `what` if it never does."""
    deadline, pause_s = time.monotonic() + PATIENCE_S, 0.01
    while not check():
        assert time.monotonic() < deadline, f"{what()} within {PATIENCE_S:g} s"
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.2)  # looking on must not keep what is looked at from getting on


async def eventually_in_loop(check: Callable[[], object]) -> None:
    """The same, while this event loop turns."""
    async with asyncio.timeout(PATIENCE_S):
        while not check():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
