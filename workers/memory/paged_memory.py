"""All pages of a gang: KV of running sequences, kept prefixes, adapters, and the free ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet

from ..plan import AdapterLoad
from ..wire.messages import AdapterRef, ResidencyChange
from ..wire.page_keys import PageKey, short_digest, short_key
from .adapter_cache import AdapterCache
from .page_allocator import IdleOrder, Item, PageAllocator
from .prefix_cache import PrefixCache

MOST_EVICTED = 512  # pages in a step, for one sequence that starts while others run
_WANTED_PER_POOL = 32  # looks at the pages that waiting sequences want, while as many are evicted as the pool has
_LEAST_GIVEN_BACK = 64  # pages of ended sequences that are released at once where room is short


class PagedMemory:
    """One allocator, one count of holders and one order of eviction for all of them."""

    def __init__(
        self,
        num_pages: int,
        adapter_page_s: Callable[[], float],
        prefix_page_s: Callable[[PageKey], float],
        idle: IdleOrder | None = None,
        adapter_evicted: Callable[[str], None] = lambda digest: None,
        wanted_pages: Callable[[], Iterable[int]] = tuple,
        has_window: bool = False,
    ) -> None:
        """`adapter_page_s`, `prefix_page_s`: what it costs to bring back an evicted page of an adapter, or of KV.

        `idle`: another order of eviction, for comparisons. `adapter_evicted`: called with evicted adapters' digests.
        `wanted_pages`: pages of KV that waiting sequences will use, the most urgent first; they are evicted last.
        `has_window`: of the base's layers, some or all.
        """
        self.allocator = PageAllocator(num_pages)
        self._idle = IdleOrder() if idle is None else idle
        self.adapters = AdapterCache(self.allocator, self._idle, adapter_page_s)
        self.prefixes = PrefixCache(self.allocator, self._idle, prefix_page_s, has_window)
        self._adapter_went, self._wanted_pages = adapter_evicted, wanted_pages
        self._num_evictions_before = -num_pages  # evictions of pages of KV when `wanted_pages` was called last
        self.hosted: set[str] = set()  # digests of adapters in host memory, as the workers have reported
        self._host_changes: dict[str, bool] = {}  # digests added there (True) or removed, since the last report
        self._pin_news: dict[str, str] = {}  # by digest, since the last report

    @property
    def num_pages_to_take(self) -> int:
        """Pages that are free, or idle and could be evicted."""
        return self.allocator.num_free + self._idle.num_pages

    def want_soon(self, digests: Iterable[str]) -> None:
        """Sets the adapters that will be used soon, the most urgent first; the least urgent is evicted first."""
        self._idle.want_soon(digests)

    def outdate(self, digest: str) -> None:
        """The adapter has no name any more: it and the pages computed with it are evicted first."""
        self.adapters.outdate(digest)
        self.prefixes.outdate(digest)

    def has_room(self, num_pages: int, keep: AbstractSet[Item], prefix_pages: Sequence[int] = ()) -> bool:
        """Whether `make_room` would succeed if `prefix_pages` were held, of which some are idle.

        False too if there will be room as soon as pages of ended sequences are released, in the next steps.
        """
        if num_pages > self.num_pages_to_take:
            self.prefixes.give_back(self.prefixes.num_may_give_back)
        num_kept = self._idle.num_pages_of(keep)
        once = self.allocator.held_once(prefix_pages)  # by the prefix cache, and idle, or by a copy that is under way
        num_kept += sum([page in self._idle and page not in keep for page in once])
        return num_pages <= self.allocator.num_free + self._idle.num_pages - num_kept

    def comes_to_room(self, num_pages: int, keep: AbstractSet[Item]) -> bool:
        """As `has_room`, and releases pages of ended sequences at once, as many as it takes."""
        while not (has_room := self.has_room(num_pages, keep)):
            if not self.prefixes.give_back_for_room(_LEAST_GIVEN_BACK):
                break
        return has_room

    def make_room(self, num_pages: int, keep: AbstractSet[Item]) -> bool:
        """Evicts idle adapters and pages of KV that are not in `keep`, least worth first, until `num_pages` are free.

        Adapters that are wanted soon are evicted only if the rest is not enough, since they would be loaded again at
        once. False, and nothing evicted, if that is not possible.
        """
        short = num_pages - self.allocator.num_free
        if short <= 0:
            return True
        num_evicted = self.prefixes.num_evictions - self._num_evictions_before
        if num_evicted * _WANTED_PER_POOL >= self.allocator.num_pages:
            self._num_evictions_before = self.prefixes.num_evictions
            self._idle.want_pages_soon(self._wanted_pages())
        going = self._idle.take(short, keep)
        while going is None and self.prefixes.give_back_for_room(max(short, _LEAST_GIVEN_BACK)):
            short = num_pages - self.allocator.num_free
            going = self._idle.take(short, keep)
        if going is None:
            return False
        for item in going:
            if isinstance(item, str):
                self.adapters.evict(item)
                self._adapter_went(item)
            else:
                self.prefixes.evict(item)
        return True

    def make_room_in_part(self, num_pages: int, keep: AbstractSet[Item], prefix_pages: Sequence[int]) -> bool:
        """Whether `make_room` evicts at most MOST_EVICTED pages. False: evicts as many, and none of `prefix_pages`.

        `has_room` must hold.
        """
        short = num_pages - self.allocator.num_free
        if short <= MOST_EVICTED:
            return True
        self.make_room(num_pages - short + MOST_EVICTED, {*keep, *prefix_pages})
        return False

    def begin_load(self, ref: AdapterRef, num_pages: int, keep: AbstractSet[Item]) -> AdapterLoad | None:
        """Takes pages for an absent adapter, evicting as `make_room` does; None if that is not enough."""
        if not self.make_room(num_pages, keep):
            return None
        return self.adapters.begin_load(ref, num_pages, ref.digest not in self.hosted)

    @property
    def num_idle_prefix_pages(self) -> int:
        """Pages of kept prefixes that eviction could free."""
        return self._idle.num_pages - self.adapters.num_idle_pages

    def take_residency_changes(self) -> ResidencyChange:
        """What was added to the pool and to host memory, and what was removed, since the last call."""
        came, went = self.adapters.take_changes()
        pages_came, pages_went = self.prefixes.take_changes()
        hosted, self._host_changes = self._host_changes, {}
        pin_news, self._pin_news = self._pin_news, {}
        return ResidencyChange(
            came,
            went,
            [*map(short_key, pages_came)],
            [*map(short_key, pages_went)],
            [short_digest(digest) for digest, is_here in hosted.items() if is_here],
            [short_digest(digest) for digest, is_here in hosted.items() if not is_here],
            {short_digest(digest): reason for digest, reason in pin_news.items()},
        )

    def note_hosted(self, came: Iterable[str], went: Iterable[str], pin_news: Mapping[str, str]) -> None:
        """Records what the workers reported of their host memory: adapters added and removed, and failed pins."""
        self._pin_news |= pin_news
        self.hosted.update(came)
        self.hosted.difference_update(went)
        self._host_changes |= {**dict.fromkeys(came, True), **dict.fromkeys(went, False)}

    def check_integrity(self, sequence_pages: Iterable[Sequence[int]]) -> None:
        """Raises AssertionError if a page leaked or its holders are miscounted. `sequence_pages`: of each sequence."""
        self.allocator.check_integrity(
            [*sequence_pages, *self.adapters.holders(), *self.prefixes.holders(), *self.prefixes.ended_holders()]
        )
        self.adapters.check_integrity()
        self.prefixes.check_integrity()
        self._idle.check_integrity()
        num_idle = sum(self.allocator.num_holders(page) == 1 for pages in self.prefixes.holders() for page in pages)
        assert self.num_idle_prefix_pages == num_idle, "idle pages are miscounted"
