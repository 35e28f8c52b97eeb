"""Which adapters are in the pool, how many sequences use each, and which may be evicted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum

from ..plan import AdapterLoad, Residence
from ..wire.messages import AdapterRef
from .page_allocator import IdleOrder, PageAllocator, UseCount


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
