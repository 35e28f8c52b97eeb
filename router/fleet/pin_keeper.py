"""Sends gangs the adapters that they must keep in host memory, and knows the state of each."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from hashlib import blake2b
from typing import Final, Protocol

from ...adapters.ended_tasks import end_tasks
from ...adapters.registry.versions.pins import KnownPins
from ...workers.wire.messages import GangInfo, News, Pinned

# Which gangs keep a pinned adapter: a function of the adapter and the gangs, so that all routers agree.


def places_of(digest: str, gangs: Iterable[str], num: int) -> list[str]:
    """`num` of these gangs, or all if there are fewer: those of the highest weights, in descending order.

    Highest random weight (Thaler and Ravishankar 1998): when a gang leaves, only its adapters move; when one joins,
    only those that it gets.
    """
    return [gang for _, gang in _heaviest(digest, gangs, num)]


def _weight(digest: str, gang: str) -> tuple[int, str]:
    return int.from_bytes(blake2b(f"{digest} {gang}".encode(), digest_size=8).digest()), gang


def _heaviest(digest: str, gangs: Iterable[str], num: int) -> list[tuple[int, str]]:
    return sorted([_weight(digest, gang) for gang in gangs], reverse=True)[:num]


class PinPlaces:
    """The places of all pins, updated as pins and gangs change. A new gang costs one weight for each pin."""

    def __init__(self) -> None:
        self._nums: dict[str, int] = {}  # gangs that must keep each digest
        self._places: dict[str, list[tuple[int, str]]] = {}  # by digest, the highest weight first
        self._at: dict[str, set[str]] = {}  # digests, by gang
        self._changes: dict[str, dict[str, bool]] = {}  # not taken yet, by gang: digest -> whether to keep it

    @property
    def gangs(self) -> Set[str]:
        return self._at.keys()

    def pin(self, digest: str, num_gangs: int) -> None:
        """Pins the adapter at `num_gangs`; 0: it is not pinned any more."""
        if num_gangs:
            self._nums[digest] = num_gangs
            self._place(digest, _heaviest(digest, self._at, num_gangs))
        elif self._nums.pop(digest, None) is not None:
            self._place(digest, [])
            del self._places[digest]

    def set_gangs(self, gangs: Collection[str]) -> None:
        """Sets the gangs that there are, and moves the pins of gangs that have gone."""
        ended_gangs, new = self._at.keys() - set(gangs), sorted(set(gangs) - self._at.keys())
        moved = {digest for gang in ended_gangs for digest in self._at[gang]}
        for gang in ended_gangs:
            del self._at[gang]
            self._changes.pop(gang, None)
        for gang in new:
            self._at[gang] = set()
        for digest, num in self._nums.items():
            if digest in moved:
                self._place(digest, _heaviest(digest, self._at, num))
            elif new:
                places, weights = self._places[digest], _heaviest(digest, new, num)
                if len(places) < num or weights[0] > places[-1]:
                    self._place(digest, sorted([*places, *weights], reverse=True)[:num])

    def at(self, gang: str) -> Set[str]:
        """Digests of the pins that the gang must keep."""
        return self._at.get(gang, set())

    def of(self, digest: str) -> list[str]:
        """The gangs that must keep the adapter."""
        return [gang for _, gang in self._places.get(digest, ())]

    def take_changes(self, gang: str) -> dict[str, bool]:
        """Digests that the gang must keep (True) or may drop (False) since the last call."""
        return self._changes.pop(gang, {})

    def _place(self, digest: str, places: list[tuple[int, str]]) -> None:
        before, now = set(self.of(digest)), {gang for _, gang in places}
        self._places[digest] = places
        for gang in before - now:
            if gang in self._at:
                self._at[gang].discard(digest)
                self._changes.setdefault(gang, {})[digest] = False
        for gang in now - before:
            self._at[gang].add(digest)
            self._changes.setdefault(gang, {})[digest] = True

    def check_integrity(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        for digest, num in self._nums.items():
            assert self.of(digest) == places_of(digest, self._at, num)
        assert self._places.keys() == self._nums.keys()
        for gang, digests in self._at.items():
            assert digests == {digest for digest in self._nums if gang in self.of(digest)}


INTERVAL_S: Final = 0.25
# Pins are placed again once gangs have not changed for this time: a gang that is lost may reconnect at once.
SETTLE_S: Final = 1.0
MOST_UNSETTLED_S: Final = 5.0  # after which they are placed at the current gangs anyway
_log = logging.getLogger(__name__)


class KnownPinned(Protocol):
    """What a router knows of a gang's host memory."""

    def is_hosted(self, digest: str) -> bool: ...

    def pin_failure(self, digest: str) -> str | None: ...


class PinnedGang(Protocol):
    """The connection to a gang."""

    @property
    def info(self) -> GangInfo | None:
        """None: not connected. Another object after each greeting."""

    @property
    def known_gang(self) -> KnownPinned: ...

    def send(self, news: News) -> None: ...


class PinKeeper:
    """Owned by one event loop. It checks a few times a second, and sends only changes."""

    def __init__(self, pins: KnownPins, gangs: Callable[[], Sequence[PinnedGang]]) -> None:
        """`gangs`: those that are connected."""
        self._pins, self._gangs = pins, gangs
        self._places = PinPlaces()
        self._greetings: dict[str, GangInfo] = {}  # gangs that were sent pins, by id, with their greetings
        self._seen: frozenset[str] = frozenset()
        self._seen_since = 0.0
        self._unsettled_since: float | None = None  # None: pins are placed at the connected gangs
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._update_forever(), name="pins")

    async def stop(self) -> None:
        await end_tasks(self._task)

    def states(self, digest: str) -> Mapping[str, str | None]:
        """The gangs that must keep the adapter, by id. None: it is there; empty: it is coming; else what failed."""
        gang_states: dict[str, str | None] = {}
        by_id = self._connected()
        for gang_id in self._places.of(digest):
            if (gang := by_id.get(gang_id)) is not None:
                failure = gang.known_gang.pin_failure(digest)
                gang_states[gang_id] = failure or (None if gang.known_gang.is_hosted(digest) else "")
        return gang_states

    def update(self, now: float) -> None:
        """Sends the gangs what has changed. `now`: seconds, monotonic."""
        gangs = self._connected()
        self._settle(frozenset(gangs), now)
        for digest in self._pins.take_changed():
            self._places.pin(digest, self._pins.num_gangs(digest))
        for gang_id, gang in gangs.items():
            if gang_id in self._places.gangs:
                self._send_changes(gang_id, gang)
        for gang_id in [gang_id for gang_id in self._greetings if gang_id not in self._places.gangs]:
            del self._greetings[gang_id]

    def _connected(self) -> dict[str, PinnedGang]:
        return {gang.info.gang_id: gang for gang in self._gangs() if gang.info is not None}

    def _settle(self, seen: frozenset[str], now: float) -> None:
        if seen == self._places.gangs:
            self._seen, self._unsettled_since = seen, None
            return
        if self._unsettled_since is None:
            self._unsettled_since = now
        if seen != self._seen:
            self._seen, self._seen_since = seen, now
        if now - self._seen_since >= SETTLE_S or now - self._unsettled_since >= MOST_UNSETTLED_S:
            self._places.set_gangs(seen)

    def _send_changes(self, gang_id: str, gang: PinnedGang) -> None:
        changes = self._places.take_changes(gang_id)
        assert gang.info is not None
        if self._greetings.get(gang_id) is not gang.info:
            if gang_id in self._greetings or self._places.at(gang_id):
                gang.send(Pinned(sorted(self._places.at(gang_id)), is_whole=True))
                self._greetings[gang_id] = gang.info
        elif changes:
            gang.send(
                Pinned(
                    [digest for digest, is_there in changes.items() if is_there],
                    [digest for digest, is_there in changes.items() if not is_there],
                )
            )

    async def _update_forever(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(INTERVAL_S)
            try:
                self.update(loop.time())
            except Exception:
                _log.exception("pins cannot be sent to gangs")
