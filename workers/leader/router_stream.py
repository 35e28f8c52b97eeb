"""One router's connection as the leader knows it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeVar

from ..wire.engine_load import EngineLoad, TenantShare
from ..wire.messages import Frame, GangInfo, Hello, OrphanChange, ResidencyChange, SequenceUpdate, SequenceUsage
from ..wire.unread_update import UnreadUpdate, update_bytes
from .residency import KnownShares, Residency

# Updates that were not sent to one router yet, and the part of them that the next frame holds.
#
# A frame holds at most about half a megabyte: short updates first, then a piece of each long one in turn. So neither a
# stream that is resumed after many tokens, nor a router that was slow for a moment, delays other sequences' tokens.

FRAME_BYTES: Final = 1 << 19  # of a frame's updates
PIECE_BYTES: Final = FRAME_BYTES // 16  # of one sequence in a frame, at most
_LONG_BYTES: Final = FRAME_BYTES // 2  # of a frame, reserved for pieces while there are any
_MAX_PLAIN: Final = 4096  # updates of one token and nothing else: less than 112 bytes each
MAX_UNREAD_VALUES: Final = 4 << 20  # tokens and log-probabilities that came while earlier ones were not yet sent
_MAX_LEFT_VALUES: Final = 2 * MAX_UNREAD_VALUES  # the same, of sequences that have ended


def tenants_to_give_back(num_values: Mapping[str, int], num_left_values: int) -> set[str]:
    """The tenants whose sequences are given back because their router does not read: a pure policy.

    `num_values`: unread values by tenant. The tenants with the most are chosen, until the others hold at most half.
    All are, if sequences that were given back have left too many unread values (`num_left_values`).
    """
    if num_left_values > _MAX_LEFT_VALUES:
        return {*num_values}
    remaining, chosen = sum(num_values.values()), set[str]()
    target = remaining // 2
    for tenant in sorted(num_values, key=lambda tenant: num_values[tenant], reverse=True):
        if remaining <= target:
            break
        chosen.add(tenant)
        remaining -= num_values[tenant]
    return chosen


class UnsentUpdates:
    """Unsent updates by the router's ids of sequences. Belongs to one event loop."""

    def __init__(self) -> None:
        self._by_id: dict[int, SequenceUpdate | UnreadUpdate] = {}
        self._is_plain = True  # each is a token and nothing else
        self._ended: set[int] = set()  # sequences that add no more, though their updates may not be sent
        self._num_unread_values = 0  # of sequences that have not ended
        self.num_left_values = 0  # of sequences that have ended

    def __bool__(self) -> bool:
        return bool(self._by_id)

    def __contains__(self, sequence_id: int) -> bool:
        return sequence_id in self._by_id

    @property
    def is_overfull(self) -> bool:
        """Whether so much is unread that sequences must be given back."""
        return self._num_unread_values > MAX_UNREAD_VALUES

    @property
    def num_values(self) -> dict[int, int]:
        """Tokens and log-probabilities that came while earlier ones were not sent, of sequences that have not ended."""
        unread = ((key, update) for key, update in self._by_id.items() if key not in self._ended)
        return {key: update.num_added_values for key, update in unread if isinstance(update, UnreadUpdate)}

    def add(self, update: SequenceUpdate) -> None:
        sequence_id = update.sequence_id
        before = self._by_id.get(sequence_id)
        if before is None:
            self._by_id[sequence_id] = update
            if (
                update.logprobs
                or update.error
                or update.prompt_scores
                or update.embedding
                or len(update.token_ids) > 1
                or update.beam_rounds
            ):
                self._is_plain = False
        else:
            self._merge(before, update)

    def begin(self, sequence_id: int, unread: UnreadUpdate) -> None:
        """Adds a sequence without unsent updates, with what it has generated before."""
        assert sequence_id not in self._by_id
        self._by_id[sequence_id] = unread
        self._is_plain = False

    def drop(self, sequence_id: int) -> SequenceUsage | None:
        """The router has cancelled the sequence. Returns the newest usage that is dropped, if there is any."""
        unsent = self._by_id.pop(sequence_id, None)
        if isinstance(unsent, UnreadUpdate) and sequence_id in self._ended:
            self.num_left_values -= unsent.num_added_values
        elif isinstance(unsent, UnreadUpdate):
            self._num_unread_values -= unsent.num_added_values
        self._ended.discard(sequence_id)
        return None if unsent is None else unsent.usage

    def end(self, sequence_id: int) -> None:
        """The sequence adds no more; its unsent updates are still sent."""
        unsent = self._by_id.get(sequence_id)
        if unsent is None or sequence_id in self._ended:
            return
        self._ended.add(sequence_id)
        if isinstance(unsent, UnreadUpdate):
            self._num_unread_values -= unsent.num_added_values
            self.num_left_values += unsent.num_added_values

    def take(self) -> list[SequenceUpdate]:
        """Removes and returns the updates of the next frame."""
        if self._is_plain and len(self._by_id) <= _MAX_PLAIN:
            plain, self._by_id = self._by_id, {}
            self._ended.clear()
            return [*plain.values()]  # type: ignore[list-item]  # what is unread is not plain
        updates = self._take_parts()
        self._is_plain = not self._by_id
        self._ended &= self._by_id.keys()
        self._count()
        return updates

    def _count(self) -> None:
        unread = [(key in self._ended, each) for key, each in self._by_id.items() if isinstance(each, UnreadUpdate)]
        self._num_unread_values = sum(each.num_added_values for has_ended, each in unread if not has_ended)
        self.num_left_values = sum(each.num_added_values for has_ended, each in unread if has_ended)

    def _merge(self, before: SequenceUpdate | UnreadUpdate, update: SequenceUpdate) -> None:
        if not isinstance(before, UnreadUpdate):
            before = self._by_id[update.sequence_id] = UnreadUpdate(before)
            self._is_plain = False
        num_values = before.num_added_values
        before.add(update)
        self._num_unread_values += before.num_added_values - num_values

    def _take_parts(self) -> list[SequenceUpdate]:
        updates: list[SequenceUpdate] = []
        long: list[int] = []
        num_bytes = 0
        for sequence_id, unsent in [*self._by_id.items()]:
            if isinstance(unsent, UnreadUpdate):
                if unsent.max_bytes > PIECE_BYTES:
                    long.append(sequence_id)
                    continue
                update, _ = unsent.take(PIECE_BYTES)
            elif update_bytes(unsent) > PIECE_BYTES and (len(unsent.token_ids) > 1 or unsent.prompt_scores):
                self._by_id[sequence_id] = UnreadUpdate(unsent)
                long.append(sequence_id)
                continue
            else:
                update = unsent
            num_bytes += update_bytes(update)
            updates.append(update)
            del self._by_id[sequence_id]
            if num_bytes > FRAME_BYTES - _LONG_BYTES:
                break
        for sequence_id in long:
            if num_bytes > FRAME_BYTES - PIECE_BYTES:
                break
            unsent = self._by_id.pop(sequence_id)
            assert isinstance(unsent, UnreadUpdate)
            piece, is_all = unsent.take(PIECE_BYTES)
            num_bytes += update_bytes(piece)
            updates.append(piece)
            if not is_all:
                self._by_id[sequence_id] = unsent  # behind the others: its turn comes again after theirs
        return updates


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
        self, load: EngineLoad, residency: Residency, orphans: Callable[[], Iterable[str]], known_shares: KnownShares
    ) -> Frame:
        """What happened since the last frame, if it fits. All that is given is the gang's of now."""
        updates = self.unsent.take()
        moved = _pop_some(self.moved, _MAX_ADAPTERS)
        pages = _pop_some(self.moved_pages, _MAX_PAGES)
        moved_orphans = _pop_some(self.moved_orphans, _MAX_ORPHANS)
        hosted = _pop_some(self.moved_hosted, _MAX_HOSTED) if self.moved_hosted else set[int]()
        pins = _pop_some(self.moved_pins, _MAX_PINS) if self.moved_pins else set[int]()
        self.load_is_stale = bool(
            self.moved or self.moved_pages or self.moved_orphans or self.moved_hosted or self.moved_pins
        )
        if self.has_news:
            self.wake.set()
        orphan_change = None
        if moved_orphans:
            came = moved_orphans.intersection(orphans())
            orphan_change = OrphanChange(sorted(came), sorted(moved_orphans - came))
        shares = known_shares.of(_pop_some(self.moved_shares, _MAX_SHARES)) if self.moved_shares else []
        return Frame(
            updates, load, residency.change_of(moved, pages, hosted, pins), orphan_change, self.last_submitted, shares
        )


_Moved = TypeVar("_Moved", str, int)


def _pop_some(moved: set[_Moved], count: int) -> set[_Moved]:
    """Removes that many of them, or all if there are no more."""
    return {moved.pop() for _ in range(min(count, len(moved)))}
