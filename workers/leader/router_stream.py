"""One router's connection as the leader knows it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ..wire.engine_load import EngineLoad
from ..wire.messages import Frame, OrphanChange, ResidencyChange, SequenceUpdate
from .residency import Residency


@dataclass(eq=False)
class RouterStream:
    """What is to be written to one router. Owned by the frame server's event loop."""

    number: int
    router: str = ""  # of which connection of a router; empty: it did not say
    num_connects: int = 0  # of that connection, this one included
    live: dict[int, int] = field(default_factory=dict)  # unfinished sequences: the router's ids to the engine's
    pending: list[SequenceUpdate] = field(default_factory=list)  # not yet written
    moved: set[str] = field(default_factory=set)  # adapters that came or went; not yet written
    moved_pages: set[int] = field(default_factory=set)  # full pages of KV that came or went; not yet written
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

    def tell_moved(self, residency: ResidencyChange) -> None:
        """A step was made. The router hears of it soon if an adapter moved, else with its next frame or beat."""
        self.load_is_stale = True
        self.moved_pages.update(residency.pages_came, residency.pages_went)
        if residency.came or residency.went:
            self.moved.update(residency.came, residency.went)
            self.wake.set()

    def tell_orphans(self, keys: Iterable[str]) -> None:
        """Orphans with these keys have come or gone; the router hears of it soon."""
        self.moved_orphans.update(keys)
        self.refresh()

    def refresh(self) -> None:
        """Writes a frame soon, whether sequences have anything to say or not."""
        self.load_is_stale = True
        self.wake.set()

    def fail(self, message: str) -> None:
        self.failure = self.failure or message
        self.wake.set()

    def take_frame(self, load: EngineLoad, residency: Residency, orphans: Callable[[], Iterable[str]]) -> Frame:
        """All that happened since the last frame. `load`, `residency` and `orphans`: the gang's of now."""
        updates, self.pending = self.pending, []
        moved, self.moved = self.moved, set()
        pages, self.moved_pages = self.moved_pages, set()
        moved_orphans, self.moved_orphans = self.moved_orphans, set()
        self.load_is_stale = False
        orphan_change = None
        if moved_orphans:
            came = moved_orphans.intersection(orphans())
            orphan_change = OrphanChange(sorted(came), sorted(moved_orphans - came))
        return Frame(updates, load, residency.change_of(moved, pages), orphan_change, self.last_submitted)
