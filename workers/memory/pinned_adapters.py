"""Which adapters the gang is to keep in host memory: what any of its routers says."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final

from ..wire.messages import Pinned

FORGET_S: Final = 30.0  # after a router's stream has ended, until its word is worth nothing: it may come back


class PinnedAdapters:
    """The last word of each router. What changes is told as the engine hears it: True is pinned, False is no more."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._told: dict[str, set[str]] = {}  # digests, by router
        self._num_routers: Counter[str] = Counter()  # that say so, by digest
        self._left_at: dict[str, float] = {}  # routers whose streams have ended

    def hear(self, router: str, message: Pinned) -> dict[str, bool]:
        """A router has told something; what changes by that."""
        self._left_at.pop(router, None)
        told = self._told.setdefault(router, set())
        came = set(message.came) - told
        went = (told - set(message.came)) if message.is_whole else told.intersection(message.went)
        return self._change(router, came, went)

    def leave(self, router: str) -> None:
        """The router's stream has ended."""
        if router in self._told:
            self._left_at[router] = self._clock()

    def expire(self) -> dict[str, bool]:
        """Forgets routers that have been away for too long; what changes by that."""
        changes: dict[str, bool] = {}
        if self._left_at:
            since = self._clock() - FORGET_S
            for router in [router for router, left_at in self._left_at.items() if left_at <= since]:
                del self._left_at[router]
                changes |= self._change(router, (), set(self._told[router]))
        return changes

    def _change(self, router: str, came: Iterable[str], went: Iterable[str]) -> dict[str, bool]:
        told, changes = self._told[router], dict[str, bool]()
        for digest in sorted(came):
            told.add(digest)
            self._num_routers[digest] += 1
            if self._num_routers[digest] == 1:
                changes[digest] = True
        for digest in sorted(went):
            told.discard(digest)
            self._num_routers[digest] -= 1
            if not self._num_routers[digest]:
                del self._num_routers[digest]
                changes[digest] = False
        if not told:
            del self._told[router]
        return changes
