"""All of a gang's pages, with those that are idle competing to stay."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet

from ..plan import AdapterLoad
from ..wire.messages import AdapterRef, ResidencyChange
from ..wire.page_keys import PageKey, short_key
from .adapter_cache import AdapterCache
from .idle_order import IdleOrder, Item
from .page_allocator import PageAllocator
from .prefix_cache import PrefixCache


class PagedMemory:
    """One allocator, one reference count, one eviction for KV, kept prefixes and adapters."""

    def __init__(
        self,
        num_pages: int,
        adapter_page_s: Callable[[], float],
        prefix_page_s: Callable[[PageKey], float],
        idle: IdleOrder | None = None,
    ) -> None:
        """What it costs to have an evicted page back, in seconds: one of an adapter, and one of KV.

        `idle`: another order of eviction, to compare with.
        """
        self.allocator = PageAllocator(num_pages)
        self._idle = IdleOrder() if idle is None else idle
        self.adapters = AdapterCache(self.allocator, self._idle, adapter_page_s)
        self.prefixes = PrefixCache(self.allocator, self._idle, prefix_page_s)
        self._soon: tuple[str, ...] = ()

    @property
    def num_pages_to_take(self) -> int:
        """Free, or idle."""
        return self.allocator.num_free + self._idle.num_pages

    def want_soon(self, digests: Iterable[str]) -> None:
        """Adapters that will be used soon, the most urgent first: they go after all else, the least urgent first."""
        self._soon = tuple(digests)

    def has_room(self, num_pages: int, keep: AbstractSet[Item], found: Sequence[int] = ()) -> bool:
        """Whether `make_room` would do, were the pages `found`, of which some are idle, held by somebody."""
        num_kept = self._idle.num_pages_of(keep) + sum(page in self._idle and page not in keep for page in found)
        return num_pages <= self.allocator.num_free + self._idle.num_pages - num_kept

    def make_room(self, num_pages: int, keep: AbstractSet[Item]) -> bool:
        """Evicts what is idle and not in `keep`, adapters or pages of KV, least worth first, until so many are free.

        What is wanted soon goes only if the rest is not enough: it would be back at once, and push that rest out.
        False, and nothing evicted, if all that may go would not be enough.
        """
        short = num_pages - self.allocator.num_free
        if short <= 0:
            return True
        if not self.has_room(num_pages, keep):
            return False
        soon = list(self._soon)
        while (going := self._idle.take(short, keep | set(soon))) is None:
            soon.pop()
        for item in going:
            if isinstance(item, str):
                self.adapters.evict(item)
            else:
                self.prefixes.evict(item)
        return True

    def begin_load(self, ref: AdapterRef, num_pages: int, keep: AbstractSet[Item]) -> AdapterLoad | None:
        """Pages for an absent adapter, evicting as `make_room` does; None if that is not enough."""
        if not self.make_room(num_pages, keep):
            return None
        return self.adapters.begin_load(ref, num_pages)

    @property
    def num_idle_prefix_pages(self) -> int:
        """Pages of kept prefixes that eviction could free."""
        return self._idle.num_pages - self.adapters.num_idle_pages

    def take_residency_changes(self) -> ResidencyChange:
        """What came into the pool and what went since the last call."""
        came, went = self.adapters.take_changes()
        pages_came, pages_went = self.prefixes.take_changes()
        return ResidencyChange(came, went, [*map(short_key, pages_came)], [*map(short_key, pages_went)])

    def check_integrity(self, held: Iterable[Sequence[int]]) -> None:
        """Raises AssertionError if a page leaked or its holders are miscounted. `held`: the pages of each sequence."""
        self.allocator.check_integrity([*held, *self.adapters.holders(), *self.prefixes.holders()])
        self.prefixes.check_integrity()
        num_idle = sum(self.allocator.num_holders(page) == 1 for pages in self.prefixes.holders() for page in pages)
        assert self.num_idle_prefix_pages == num_idle, "idle pages are miscounted"
