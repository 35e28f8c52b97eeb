"""All pages of a gang: KV of running sequences, kept prefixes, adapters, and the free ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import Enum

from ..plan import AdapterLoad, Residence, StepPlan
from ..wire.messages import AdapterRef, ResidencyChange
from ..wire.page_keys import PageKey, short_digest, short_key
from .page_allocator import IdleOrder, Item, PageAllocator, UseCount
from .prefix_cache import PrefixCache

# Which adapters are in the pool, how many sequences use each, and which may be evicted.


class AdapterState(Enum):
    ABSENT = "absent"
    LOADING = "loading"  # has pages that it is being copied into
    RESIDENT = "resident"


@dataclass(slots=True)
class _Entry:
    residence: Residence
    state: AdapterState
    is_from_store: bool = False  # its load reads the store
    num_users: int = 0  # running sequences
    uses: UseCount = field(default_factory=UseCount)  # by sequences that started with it
    is_outdated: bool = False  # it has no name any more: evicted first, unless a sequence uses it again


class AdapterCache:
    """Adapters by digest, in pages of the pool. Owner of those pages."""

    def __init__(self, allocator: PageAllocator, idle: IdleOrder, page_cost_s: Callable[[], float]) -> None:
        """`page_cost_s`: what it costs to bring a page back, in seconds."""
        self._allocator, self._idle, self._page_cost_s = allocator, idle, page_cost_s
        self._entries: dict[str, _Entry] = {}
        self._moved: dict[str, None] = {}  # digests added or removed since the last take_changes()
        self.num_pages = 0  # of all adapters
        self.num_idle_pages = 0  # that eviction could free
        self.num_loading = 0  # adapters that are being loaded
        self.num_loading_from_store = 0  # of these, those whose load reads the store
        self.num_loads = 0
        self.num_loaded_pages = 0
        self.num_evictions = 0

    def state(self, digest: str) -> AdapterState:
        entry = self._entries.get(digest)
        return AdapterState.ABSENT if entry is None else entry.state

    def residence(self, digest: str) -> Residence:
        return self._entries[digest].residence

    def begin_load(self, ref: AdapterRef, num_pages: int, is_from_store: bool = True) -> AdapterLoad:
        """Takes pages for an absent adapter; enough must be free. `is_from_store`: it is not in host memory."""
        pages = self._allocator.allocate(num_pages)
        assert pages is not None
        residence = Residence(ref.digest, ref.module_ranks, pages)
        self._entries[ref.digest] = _Entry(residence, AdapterState.LOADING, is_from_store)
        self._moved[ref.digest] = None
        self.num_pages += num_pages
        self.num_loading += 1
        self.num_loading_from_store += is_from_store
        self.num_loads += 1
        return AdapterLoad(residence)

    def finish_load(self, digest: str) -> None:
        entry = self._entries[digest]
        entry.state = AdapterState.RESIDENT
        self._stop_loading(entry)
        self.num_loaded_pages += len(entry.residence.pages)
        self._make_idle(digest)

    def fail_load(self, digest: str) -> None:
        """Drops an adapter whose copy failed, and frees its pages."""
        self._stop_loading(self._entries[digest])
        self._drop(digest)

    def acquire(self, digest: str) -> None:
        """Counts one more running sequence that uses the adapter, which is not evicted until `release`."""
        entry = self._entries[digest]
        assert entry.state is AdapterState.RESIDENT, f"adapter {digest} is {entry.state}, and was acquired"
        if not entry.num_users:
            self._idle.remove(digest)
            self.num_idle_pages -= len(entry.residence.pages)
        entry.num_users += 1
        entry.uses.add(self._idle.num_rounds)
        entry.is_outdated = False

    def release(self, digest: str) -> None:
        entry = self._entries[digest]
        assert entry.num_users > 0, f"adapter {digest} is released more often than acquired"
        entry.num_users -= 1
        if not entry.num_users:
            self._make_idle(digest)

    def outdate(self, digest: str) -> None:
        """The adapter has no name any more: once idle it is evicted first, unless a sequence uses it again.

        No-op if it is absent. Running sequences keep it.
        """
        entry = self._entries.get(digest)
        if entry is None:
            return
        entry.is_outdated = True
        if digest in self._idle:
            self._idle.remove(digest)
            self.num_idle_pages -= len(entry.residence.pages)
            self._make_idle(digest)

    def evict(self, digest: str) -> None:
        """Frees the pages of an idle adapter that the idle order has chosen."""
        self.num_idle_pages -= len(self._entries[digest].residence.pages)
        self._drop(digest)
        self.num_evictions += 1

    def take_changes(self) -> tuple[list[str], list[str]]:
        """Digests added (loading ones included), and digests removed, since the last call."""
        moved, self._moved = self._moved, {}
        return [d for d in moved if d in self._entries], [d for d in moved if d not in self._entries]

    @property
    def num_resident(self) -> int:
        return len(self._entries) - self.num_loading

    def num_pages_of(self, digest: str) -> int:
        """Pages of an adapter that is here or coming; 0: it is absent."""
        entry = self._entries.get(digest)
        return 0 if entry is None else len(entry.residence.pages)

    def num_idle_pages_of(self, digest: str) -> int:
        """The adapter's pages, if eviction could free them."""
        return len(self._entries[digest].residence.pages) if digest in self._idle else 0

    def holders(self) -> Iterator[tuple[int, ...]]:
        """The pages of each adapter, for integrity checks."""
        return (entry.residence.pages for entry in self._entries.values())

    def users(self) -> dict[str, int]:
        """Running sequences by digest, for integrity checks; idle adapters are left out."""
        return {digest: entry.num_users for digest, entry in self._entries.items() if entry.num_users}

    def check_integrity(self) -> None:
        """Raises AssertionError if pages are miscounted."""
        assert self.num_pages == sum(len(entry.residence.pages) for entry in self._entries.values())
        loading = [entry for entry in self._entries.values() if entry.state is AdapterState.LOADING]
        assert self.num_loading == len(loading), "loads are miscounted"
        assert self.num_loading_from_store == sum(entry.is_from_store for entry in loading), "loads are miscounted"
        idle = [entry for digest, entry in self._entries.items() if digest in self._idle]
        assert self.num_idle_pages == sum(len(entry.residence.pages) for entry in idle), "idle pages are miscounted"

    def _stop_loading(self, entry: _Entry) -> None:
        self.num_loading -= 1
        self.num_loading_from_store -= entry.is_from_store

    def _make_idle(self, digest: str) -> None:
        entry = self._entries[digest]
        num_uses = 0.0 if entry.is_outdated else entry.uses.value
        self.num_idle_pages += len(entry.residence.pages)
        self._idle.add(digest, len(entry.residence.pages), num_uses, self._page_cost_s())

    def _drop(self, digest: str) -> None:
        pages = self._entries.pop(digest).residence.pages
        self.num_pages -= len(pages)
        self._allocator.release(pages)
        self._moved[digest] = None


MOST_EVICTED = 512  # pages in a step, for one sequence that starts while others run
_WANTED_PER_POOL = 32  # looks at the pages that waiting sequences want, while as many are evicted as the pool has
_MAX_OUTDATED = 1024  # digests that wait for a step; the oldest beyond are dropped
_LEAST_GIVEN_BACK = 64  # pages of ended sequences that are released at once where room is short


class PagedMemory:
    """One allocator, one count of holders and one order of eviction for all of them."""

    def __init__(
        self,
        num_pages: int,
        adapter_page_s: Callable[[], float],
        prefix_page_s: Callable[[PageKey, float], float],
        idle: IdleOrder | None = None,
        adapter_evicted: Callable[[str], None] = lambda digest: None,
        wanted_pages: Callable[[], Iterable[int]] = tuple,
        has_window: bool = False,
    ) -> None:
        """`adapter_page_s`, `prefix_page_s`: what it costs to bring back an evicted page of an adapter, or of KV
        (see `PrefixCache`).

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
        self._outdated: list[str] = []  # digests, for the next plan: host memory need not keep them
        self._pins: dict[str, bool] = {}  # for the next plan, by digest: pinned in host memory, or not any more

    @property
    def num_pages_to_take(self) -> int:
        """Pages that are free, or idle and could be evicted."""
        return self.allocator.num_free + self._idle.num_pages

    def want_soon(self, digests: Iterable[str]) -> None:
        """Sets the adapters that will be used soon, the most urgent first; the least urgent is evicted first."""
        self._idle.want_soon(digests)

    @property
    def wanted_adapters(self) -> AbstractSet[Item]:
        """Those that `want_soon` has set."""
        return self._idle.soon_adapters

    def outdate(self, digest: str) -> None:
        """The adapter has no name any more: it and the pages computed with it are evicted first, in host memory too."""
        self.adapters.outdate(digest)
        self.prefixes.outdate(digest)
        self._outdated = [*self._outdated[-_MAX_OUTDATED:], digest]

    def pin(self, changes: Mapping[str, bool]) -> None:
        """Pins (True) or unpins adapters in host memory."""
        self._pins |= changes

    def take_host_updates(self, *, computes: bool) -> tuple[tuple[str, ...], dict[str, bool]]:
        """The outdated digests and the pins for a plan. `computes`: it has sequences."""
        pins, self._pins = (self._pins, {}) if self._pins else ({}, self._pins)
        if not computes:
            return (), pins
        outdated, self._outdated = tuple(self._outdated), []
        return outdated, pins

    def put_back_host_updates(self, plan: StepPlan) -> None:
        """Restores the updates of a plan that is not executed."""
        self._outdated = [*plan.outdated, *self._outdated]
        self._pins = {**plan.pins, **self._pins}

    def has_room(self, num_pages: int, keep: AbstractSet[Item], prefix_pages: Sequence[int] = ()) -> bool:
        """Whether `make_room` would succeed if `prefix_pages` were held, of which some are idle.

        False too if there will be room as soon as pages of ended sequences are released, in the next steps.
        """
        if num_pages > self.num_pages_to_take:
            self.prefixes.give_back(self.prefixes.num_may_give_back)
        num_kept = self._idle.num_pages_of(keep)
        once = self.allocator.held_once(prefix_pages)  # by the prefix cache, and idle, or by a copy that is under way
        idle = self._idle.items
        num_kept += sum([idle[page].num_pages for page in once if page in idle and page not in keep])
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

    def take_spare(self, num_pages: int, num_left_free: int) -> tuple[int, ...] | None:
        """Pages that are free, or idle and of least worth, beside `num_left_free`; None: there are too few.

        No adapter goes for them that waiting sequences will use soon.
        """
        keep = self.wanted_adapters
        if not self.has_room(num_pages + num_left_free, keep):
            return None
        self.make_room(num_pages, keep)
        return self.allocator.allocate(num_pages)

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
