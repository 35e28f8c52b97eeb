"""For how long sequences hold pages of the pool: integrals that are updated only when pages are taken or released.

So a step costs nothing, however many sequences run. Each sequence is charged in full for its pages of KV, shared ones
included. An adapter's pages are divided equally among the sequences that run with it. An adapter without running
sequences, and pages of KV that no sequence holds, are charged to no sequence.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ..wire.messages import SequenceUsage


class _SharedPages:
    """An adapter's pages while sequences run with it."""

    __slots__ = ("_each_s", "_since", "digest", "num_pages", "num_users")

    def __init__(self, digest: str, num_pages: int) -> None:
        self.digest, self.num_pages, self.num_users = digest, num_pages, 0
        self._each_s = self._since = 0.0  # page-seconds of a user since the beginning, as of `_since`

    def each_s(self, now: float) -> float:
        """Page-seconds of a user since the beginning; the difference of two calls is a user's part between them."""
        if not self.num_users:
            return self._each_s
        return self._each_s + self.num_pages * (now - self._since) / self.num_users

    def change_users(self, number: int, now: float) -> float:
        self._each_s, self._since = self.each_s(now), now
        self.num_users += number
        return self._each_s


class HeldPages:
    """What one sequence holds. `PageTimes` owns what is written here."""

    __slots__ = ("adapter", "adapter_from", "adapter_s", "kv_s", "num_pages", "taken_s")

    def __init__(self, before: SequenceUsage | None = None) -> None:
        """`before`: at the gangs where the sequence was before."""
        before = before or SequenceUsage()
        self.kv_s, self.adapter_s = before.kv_page_s, before.adapter_page_s  # counted already, of earlier runs too
        self.num_pages, self.taken_s = (
            0,
            0.0,
        )  # pages that it holds, and the sum of the times since which they are counted
        self.adapter: _SharedPages | None = None
        self.adapter_from = 0.0  # the adapter's `each_s` when the run began


class PageTimes:
    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """`clock`: seconds; it never goes back."""
        self._clock = clock
        self._shared: dict[str, _SharedPages] = {}  # by digest; only adapters with running sequences

    def start(self, pages: HeldPages, num_pages: int, adapter: str | None = None, num_adapter_pages: int = 0) -> None:
        """A sequence begins to run, on `num_pages` pages and with the adapter of this digest."""
        assert not pages.num_pages and pages.adapter is None
        now = self._clock()
        pages.num_pages, pages.taken_s = num_pages, num_pages * now
        if adapter is not None:
            shared = self._shared.get(adapter)
            if shared is None:
                shared = self._shared[adapter] = _SharedPages(adapter, num_adapter_pages)
            pages.adapter, pages.adapter_from = shared, shared.change_users(1, now)

    def grow(self, pages: HeldPages, num_pages: int) -> None:
        """A running sequence takes `num_pages` more pages."""
        pages.num_pages += num_pages
        pages.taken_s += num_pages * self._clock()

    def shrink(self, pages: HeldPages, num_pages: int) -> None:
        """A running sequence gives `num_pages` of its pages back."""
        now = self._clock()
        pages.kv_s += pages.num_pages * now - pages.taken_s
        pages.num_pages -= num_pages
        pages.taken_s = pages.num_pages * now  # the rest is counted from here on

    def stop(self, pages: HeldPages) -> None:
        """The sequence stops running and releases all its pages."""
        now, shared = self._clock(), pages.adapter
        pages.kv_s += pages.num_pages * now - pages.taken_s
        pages.num_pages, pages.taken_s = 0, 0.0
        if shared is not None:
            pages.adapter_s += shared.change_users(-1, now) - pages.adapter_from
            pages.adapter = None
            if not shared.num_users:
                del self._shared[shared.digest]

    def usage(self, pages: HeldPages) -> SequenceUsage:
        """The part of the sequence's usage that is of pages."""
        now, shared = self._clock(), pages.adapter
        kv_s = pages.kv_s + pages.num_pages * now - pages.taken_s
        if shared is None:
            return SequenceUsage(kv_s, pages.adapter_s, pages.num_pages)
        adapter_s = pages.adapter_s + shared.each_s(now) - pages.adapter_from
        return SequenceUsage(kv_s, adapter_s, pages.num_pages, shared.num_pages / shared.num_users)

    def users(self) -> dict[str, int]:
        """Sequences that run by their adapters' digests, for integrity checks."""
        return {digest: shared.num_users for digest, shared in self._shared.items()}
