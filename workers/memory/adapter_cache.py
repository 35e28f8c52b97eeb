"""Which adapters are in the pool, who uses them, and which may go."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import Enum

from ..messages import AdapterRef, ResidencyChange
from ..scheduling.plan import AdapterLoad, Residence
from .page_allocator import PageAllocator


class AdapterState(Enum):
    ABSENT = "absent"
    LOADING = "loading"  # has pages; a copy into them is under way
    RESIDENT = "resident"


@dataclass
class _Entry:
    residence: Residence
    state: AdapterState
    num_users: int = 0  # running sequences
    last_use: int = 0  # step


class AdapterCache:
    """Adapters by digest, in pages of the pool. Owner of those pages; evicts idle ones by last use."""

    def __init__(self, allocator: PageAllocator) -> None:
        self._allocator = allocator
        self._entries: dict[str, _Entry] = {}
        self._clock = 0
        self._moved: dict[str, None] = {}  # digests that came or went since the last take_changes()
        self.num_loads = 0
        self.num_loaded_pages = 0
        self.num_evictions = 0

    def state(self, digest: str) -> AdapterState:
        entry = self._entries.get(digest)
        return AdapterState.ABSENT if entry is None else entry.state

    def residence(self, digest: str) -> Residence:
        return self._entries[digest].residence

    def begin_load(self, ref: AdapterRef, num_pages: int, keep: AbstractSet[str]) -> AdapterLoad | None:
        """Pages for an absent adapter, evicting idle ones not in `keep` as needed; None if that is not enough."""
        if not self.make_room(num_pages, keep):
            return None
        pages = self._allocator.allocate(num_pages)
        assert pages is not None
        residence = Residence(ref.digest, ref.module_ranks, pages)
        self._entries[ref.digest] = _Entry(residence, AdapterState.LOADING, last_use=self._tick())
        self._moved[ref.digest] = None
        self.num_loads += 1
        return AdapterLoad(residence)

    def finish_load(self, digest: str) -> None:
        entry = self._entries[digest]
        entry.state = AdapterState.RESIDENT
        self.num_loaded_pages += len(entry.residence.pages)

    def fail_load(self, digest: str) -> None:
        """Forgets an adapter whose copy failed; its pages are free again."""
        self._drop(digest)

    def acquire(self, digest: str) -> None:
        """One more running sequence uses the adapter: it stays until `release`."""
        entry = self._entries[digest]
        assert entry.state is AdapterState.RESIDENT, f"adapter {digest} is {entry.state}, and is to be used"
        entry.num_users += 1
        entry.last_use = self._tick()

    def release(self, digest: str) -> None:
        entry = self._entries[digest]
        assert entry.num_users > 0, f"adapter {digest} is released more often than acquired"
        entry.num_users -= 1
        entry.last_use = self._tick()

    def make_room(self, num_pages: int, keep: AbstractSet[str]) -> bool:
        """Evicts idle adapters, least recently used first, until so many pages are free.

        False, and nothing evicted, if all that may go would not be enough.
        """
        short = num_pages - self._allocator.num_free
        going: list[str] = []
        for digest in self._idle_by_last_use():
            if short <= 0:
                break
            if digest not in keep:
                going.append(digest)
                short -= len(self._entries[digest].residence.pages)
        if short > 0:
            return False
        for digest in going:
            self._drop(digest)
        self.num_evictions += len(going)
        return True

    def take_changes(self) -> ResidencyChange:
        """What came, be it not wholly copied yet, and what went since the last call."""
        moved, self._moved = self._moved, {}
        return ResidencyChange([d for d in moved if d in self._entries], [d for d in moved if d not in self._entries])

    @property
    def num_resident(self) -> int:
        return sum(entry.state is AdapterState.RESIDENT for entry in self._entries.values())

    @property
    def num_loading(self) -> int:
        return sum(entry.state is AdapterState.LOADING for entry in self._entries.values())

    @property
    def num_pages(self) -> int:
        return sum(len(entry.residence.pages) for entry in self._entries.values())

    @property
    def num_idle_pages(self) -> int:
        """Pages that eviction could free."""
        return sum(len(self._entries[digest].residence.pages) for digest in self._idle())

    def holders(self) -> Iterator[tuple[int, ...]]:
        """The pages of each adapter, for integrity checks."""
        return (entry.residence.pages for entry in self._entries.values())

    def users(self) -> dict[str, int]:
        """Running sequences by digest, for integrity checks; idle adapters are left out."""
        return {digest: entry.num_users for digest, entry in self._entries.items() if entry.num_users}

    def _idle(self) -> list[str]:
        return [d for d, e in self._entries.items() if e.num_users == 0 and e.state is AdapterState.RESIDENT]

    def _idle_by_last_use(self) -> list[str]:
        return sorted(self._idle(), key=lambda digest: self._entries[digest].last_use)

    def _drop(self, digest: str) -> None:
        self._allocator.release(self._entries.pop(digest).residence.pages)
        self._moved[digest] = None

    def _tick(self) -> int:
        self._clock += 1
        return self._clock
