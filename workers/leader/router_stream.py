"""One router's connection as the leader knows it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, TypeVar

from ..wire.engine_load import EngineLoad
from ..wire.fair_shares import TenantShare
from ..wire.messages import Frame, GangInfo, Hello, OrphanChange, ResidencyChange, SequenceUpdate
from ..wire.unread_update import UnreadUpdate
from .known_shares import KnownShares
from .residency import Residency
from .unsent_updates import UnsentUpdates

_MAX_ADAPTERS: Final = 4096  # in a message, some 66 bytes each
_MAX_PAGES: Final = 1 << 16  # 9 bytes each
_MAX_HOSTED: Final = 1 << 14  # adapters in host memory, 9 bytes each, in a message
_MAX_PINS: Final = 1024  # in a message, with their reasons, some 100 bytes each
_MAX_SHARES: Final = 512  # in a frame, some 60 bytes each; the others come with the next frames
_MAX_ORPHANS: Final = 1 << 14  # in a frame, some 50 bytes each


@dataclass(eq=False)
class RouterStream:
    """Frames to be written to one router. Owned by the frame server's event loop."""

    number: int
    router: str = ""  # of which connection of a router; empty: it did not say
    num_connects: int = 0  # of that connection, this one included
    live: dict[int, int] = field(default_factory=dict)  # unfinished sequences: the router's ids to the engine's
    unsent: UnsentUpdates = field(default_factory=UnsentUpdates)
    parts: dict[int, bytearray] = field(default_factory=dict)  # of requests that have come in part
    moved: set[str] = field(default_factory=set)  # adapters that came or went; not yet written
    moved_pages: set[int] = field(default_factory=set)  # full pages of KV that came or went; not yet written
    moved_hosted: set[int] = field(default_factory=set)  # adapters that came into host memory or went; not yet written
    moved_pins: set[int] = field(default_factory=set)  # pins that have failed, or are well again; not yet written
    moved_orphans: set[str] = field(default_factory=set)  # keys of orphans that came or went; not yet written
    moved_shares: set[str] = field(default_factory=set)  # tenants whose shares have changed; not yet written
    last_submitted: int = 0  # id of the newest sequence that came from the router
    load_is_stale: bool = False
    is_ending: bool = False  # what is pending is the last that is written
    failure: str | None = None
    wake: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def has_news(self) -> bool:
        return bool(self.unsent or self.load_is_stale)

    def send(self, update: SequenceUpdate) -> None:
        self.unsent.add(update)
        self.wake.set()

    def send_past(self, sequence_id: int, past: UnreadUpdate) -> None:
        """Sends what a sequence that begins on this stream has brought on another one."""
        self.unsent.begin(sequence_id, past)
        self.wake.set()

    def note_residency(self, residency: ResidencyChange) -> None:
        """A step was made. A frame says so soon if an adapter moved, else with the next frame or beat."""
        self.load_is_stale = True
        self.moved_pages.update(residency.pages_came, residency.pages_went)
        if residency.pin_news:
            self.moved_pins.update(residency.pin_news)
            self.wake.set()
        if residency.hosted_came or residency.hosted_went:
            self.moved_hosted.update(residency.hosted_came, residency.hosted_went)
        if residency.came or residency.went:
            self.moved.update(residency.came, residency.went)
            self.wake.set()

    def note_shares(self, shares: Iterable[TenantShare]) -> None:
        """Tenants' shares have changed. The next frame or beat says so."""
        self.moved_shares.update([share.tenant for share in shares])

    def note_orphans(self, keys: Iterable[str]) -> None:
        """Orphans with these keys have come or gone; a frame says so soon."""
        self.moved_orphans.update(keys)
        self.refresh()

    def refresh(self) -> None:
        """Writes a frame soon, whether sequences have anything to say or not."""
        self.load_is_stale = True
        self.wake.set()

    def fail(self, message: str) -> None:
        self.failure = self.failure or message
        self.wake.set()

    def greeting(self, info: GangInfo, residency: Residency, orphans: list[str]) -> Hello:
        """The first message; what is resident and does not fit comes with frames."""
        adapters, pages, hosted = sorted(residency.adapters), [*residency.pages], [*residency.hosted]
        self.moved.update(adapters[_MAX_ADAPTERS:])
        self.moved_pages.update(pages[_MAX_PAGES:])
        self.moved_hosted.update(hosted[_MAX_HOSTED:])
        self.moved_pins.update(residency.failed_pins)
        return Hello(info, adapters[:_MAX_ADAPTERS], pages[:_MAX_PAGES], orphans, hosted[:_MAX_HOSTED])

    def take_frame(
        self, load: EngineLoad, residency: Residency, orphans: Callable[[], Iterable[str]], known: KnownShares
    ) -> Frame:
        """What happened since the last frame, if it fits. All that is given is the gang's of now."""
        updates = self.unsent.take()
        moved = _taken(self.moved, _MAX_ADAPTERS)
        pages = _taken(self.moved_pages, _MAX_PAGES)
        moved_orphans = _taken(self.moved_orphans, _MAX_ORPHANS)
        hosted = _taken(self.moved_hosted, _MAX_HOSTED) if self.moved_hosted else set[int]()
        pins = _taken(self.moved_pins, _MAX_PINS) if self.moved_pins else set[int]()
        self.load_is_stale = bool(
            self.moved or self.moved_pages or self.moved_orphans or self.moved_hosted or self.moved_pins
        )
        if self.has_news:
            self.wake.set()
        orphan_change = None
        if moved_orphans:
            came = moved_orphans.intersection(orphans())
            orphan_change = OrphanChange(sorted(came), sorted(moved_orphans - came))
        shares = known.of(_taken(self.moved_shares, _MAX_SHARES)) if self.moved_shares else []
        return Frame(
            updates, load, residency.change_of(moved, pages, hosted, pins), orphan_change, self.last_submitted, shares
        )


_Moved = TypeVar("_Moved", str, int)


def _taken(moved: set[_Moved], count: int) -> set[_Moved]:
    """Removes that many of them, or all if there are no more."""
    return {moved.pop() for _ in range(min(count, len(moved)))}
