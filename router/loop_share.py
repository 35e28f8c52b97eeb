"""Long work on the event loop in pieces, with room for others between them."""

from __future__ import annotations

import asyncio
import time
from typing import Final

PIECE_S: Final = 0.002


class LoopShare:
    """One for each piece of work that may be long, made when the work begins."""

    def __init__(self) -> None:
        self._since = time.perf_counter()

    async def pause(self) -> None:
        """Lets others have their turn, if the work has had the loop for a while since the last time."""
        if time.perf_counter() - self._since >= PIECE_S:
            await asyncio.sleep(0)
            self._since = time.perf_counter()
