"""Which adapters the gang keeps in host memory: those that any of its routers has pinned."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from typing import Final

from ..wire.messages import Pinned

FORGET_S: Final = 30.0  # a router's pins last this long after its stream has ended, as it may reconnect


class PinnedAdapters:
    """Pins of each router. Methods return changes for the engine: True is pinned, False is unpinned."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pins: dict[str, set[str]] = {}  # digests, by router
        self._num_routers: Counter[str] = Counter()  # that pin it, by digest
        self._left_at: dict[str, float] = {}  # routers whose streams have ended

    @property
    def digests(self) -> AbstractSet[str]:
        """Of all adapters that a router has pinned."""
        return self._num_routers.keys()

    def receive(self, router: str, message: Pinned) -> dict[str, bool]:
        """Takes a router's message; returns the changes."""
        self._left_at.pop(router, None)
        pins = self._pins.setdefault(router, set())
        came = set(message.came) - pins
        went = (pins - set(message.came)) if message.is_whole else pins.intersection(message.went)
        return self._change(router, came, went)

    def leave(self, router: str) -> None:
        """The router's stream has ended."""
        if router in self._pins:
            self._left_at[router] = self._clock()

    def expire(self) -> dict[str, bool]:
        """Drops the pins of routers that have been away for FORGET_S; returns the changes."""
        changes: dict[str, bool] = {}
        if self._left_at:
            since = self._clock() - FORGET_S
            for router in [router for router, left_at in self._left_at.items() if left_at <= since]:
                del self._left_at[router]
                changes |= self._change(router, (), set(self._pins[router]))
        return changes

    def _change(self, router: str, came: Iterable[str], went: Iterable[str]) -> dict[str, bool]:
        pins, changes = self._pins[router], dict[str, bool]()
        for digest in sorted(came):
            pins.add(digest)
            self._num_routers[digest] += 1
            if self._num_routers[digest] == 1:
                changes[digest] = True
        for digest in sorted(went):
            pins.discard(digest)
            self._num_routers[digest] -= 1
            if not self._num_routers[digest]:
                del self._num_routers[digest]
                changes[digest] = False
        if not pins:
            del self._pins[router]
        return changes
