"""One router's connection as the leader knows it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from ..wire.messages import SequenceUpdate


@dataclass(eq=False)
class RouterStream:
    """What is to be written to one router. Owned by the frame server's event loop."""

    number: int
    live: dict[int, int] = field(default_factory=dict)  # unfinished sequences: the router's ids to the engine's
    pending: list[SequenceUpdate] = field(default_factory=list)  # not yet written
    moved: set[str] = field(default_factory=set)  # adapters that came or went; not yet written
    moved_pages: set[int] = field(default_factory=set)  # full pages of KV, likewise
    moved_orphans: set[str] = field(default_factory=set)  # keys of orphans that came or went; not yet written
    last_submitted: int = 0  # id of the newest sequence that came from the router
    load_is_stale: bool = False
    is_ending: bool = False  # what is pending is the last that is written
    failure: str | None = None
    wake: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def has_news(self) -> bool:
        return bool(self.pending or self.load_is_stale)

    def tell(self, update: SequenceUpdate) -> None:
        self.pending.append(update)
        self.wake.set()

    def refresh(self) -> None:
        """Writes a frame soon, whether sequences have anything to say or not."""
        self.load_is_stale = True
        self.wake.set()

    def fail(self, message: str) -> None:
        self.failure = self.failure or message
        self.wake.set()
