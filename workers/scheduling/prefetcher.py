"""Loads adapters and pages of KV for waiting sequences."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ..memory.page_allocator import Item
from ..memory.paged_memory import AdapterState, PagedMemory
from ..plan import AdapterLoad
from ..window_pages import GangLimits, pages_for
from .growing_sequence import GrowingSequence
from .prefix_reuse import HeldByOthers, PrefixReuse
from .tier_traffic import TierTraffic
from .waiting_queue import WaitingQueue

# Which adapters and pages of KV are loaded for sequences that still wait: a pure policy.

MAX_LOADS_UNDER_WAY = 8  # adapters that are loaded into the pool at once, from host memory and from the store each


@dataclass(frozen=True)
class FreeLoads:
    """Loads that may begin, by where the adapter is: reads of a store that hangs must not stop the others."""

    from_host: int
    from_store: int


def free_loads(num_loading: int, num_loading_from_store: int) -> FreeLoads:
    """`num_loading`: loads under way, those from the store included."""
    num_from_host = num_loading - num_loading_from_store
    return FreeLoads(MAX_LOADS_UNDER_WAY - num_from_host, MAX_LOADS_UNDER_WAY - num_loading_from_store)


@dataclass(frozen=True)
class WaitingNeeds:
    """Pages and adapter that one waiting sequence needs."""

    adapter: str | None  # digest; None: the base
    is_absent: bool  # the adapter is neither in the pool nor being loaded
    num_adapter_pages: int  # of an absent or idle adapter; 0: it is in use or being loaded
    num_kv_pages: int  # without those of its prefix that other sequences hold or that are coming
    is_hosted: bool = False  # an absent adapter is in host memory


@dataclass(frozen=True)
class PrefetchChoice:
    adapters: tuple[str, ...]  # digests to load, the oldest sequence's first
    num_with_room: int  # number of the oldest sequences that have room for their KV too


def choose_prefetch(waiting: Iterable[WaitingNeeds], num_pages: int, loads: FreeLoads) -> PrefetchChoice:
    """What to load now, even for sequences that the next step cannot start.

    `waiting`: the oldest sequences, oldest first, as many as a batch can take. A sequence further back does not run
    before a whole batch has ended, so what is idle in the pool may well be used sooner than what it needs.
    `num_pages`: free or idle ones, less those that running sequences will take meanwhile.

    Each sequence claims the pages that it will need, adapter and KV, before anything is loaded for a newer one. So

    - a load for a newer sequence never takes room from an older one, or evicts its adapter;
    - no more is loaded than can run together, since it would evict what was loaded before;
    - an older sequence that lacks room blocks all newer ones until running sequences have ended.
    """
    adapters: list[str] = []
    claimed: set[str] = set()
    num_begun = {True: 0, False: 0}  # by whether the adapter is in host memory
    num_with_room = 0
    for needs in waiting:
        if needs.adapter is not None and needs.adapter not in claimed:
            if needs.num_adapter_pages > num_pages:
                break
            num_pages -= needs.num_adapter_pages
            claimed.add(needs.adapter)
            max_loads = loads.from_host if needs.is_hosted else loads.from_store
            if needs.is_absent and num_begun[needs.is_hosted] < max_loads:
                num_begun[needs.is_hosted] += 1
                adapters.append(needs.adapter)
        if needs.num_kv_pages > num_pages:
            break
        num_pages -= needs.num_kv_pages
        num_with_room += 1
    return PrefetchChoice(tuple(adapters), num_with_room)


class Prefetcher:
    """Finds what waiting sequences lack, and starts loading it."""

    def __init__(
        self,
        memory: PagedMemory,
        prefixes: PrefixReuse,
        tiers: TierTraffic,
        limits: GangLimits,
        waiting: WaitingQueue,
    ) -> None:
        """`waiting` is notified when an adapter's load starts for one of its sequences."""
        self._memory, self._prefixes, self._tiers, self._waiting = memory, prefixes, tiers, waiting
        self._limits = limits

    def begin(self, waiting: list[GrowingSequence], num_lacking: int, num_running: int) -> Iterator[AdapterLoad]:
        """Starts loads and copies for these sequences, oldest first, even if they cannot start in this step.

        Those whose adapters were loaded and that have not started yet claim their room before all others. The caller
        puts the loads into its plan. `num_lacking`: sequences that lack their adapter, these or others. Each of
        `num_running` running sequences may need another page meanwhile.
        """
        loads = self.free_loads if num_lacking else FreeLoads(0, 0)
        may_load = loads.from_store > 0 or (loads.from_host > 0 and self._memory.hosted)
        if not may_load and not self._tiers.can_bring():
            return
        if loaded_for := self._waiting.loaded_for():
            waiting = sorted(dict.fromkeys([*loaded_for, *waiting]), key=lambda each: each.counter.is_background)
        held_by_others: HeldByOthers = {}  # valid since no page is released in this method
        while waiting and not self._lacks(waiting[-1], loads, held_by_others):
            waiting.pop()
        needs = (self._needs(sequence, held_by_others) for sequence in waiting)
        chosen = choose_prefetch(needs, self._memory.num_pages_to_take - num_running, loads)
        keep: set[Item] = set()  # adapters and pages of older sequences: not to be evicted for a newer sequence
        older: list[GrowingSequence] = []  # sequences whose pages are not in `keep` yet
        for number, sequence in enumerate(waiting[: chosen.num_with_room + 1]):
            ref, has_room = sequence.request.adapter, number < chosen.num_with_room
            adapter_comes = ref is not None and ref.digest in chosen.adapters and ref.digest not in keep
            pages_may_come = has_room and self._prefixes.may_come_ahead(sequence, held_by_others)
            older += [sequence] if has_room else []
            keep |= {ref.digest} if ref is not None else set()
            if adapter_comes or pages_may_come:
                keep.update(page for other in older for page in self._prefixes.idle_pages_of(other, held_by_others))
                older.clear()
            if adapter_comes:
                assert ref is not None
                load = self._memory.begin_load(ref, sequence.num_adapter_pages, keep)
                if load is None:
                    # Copies that began just now hold more than was claimed: with full layers a prefix without dense
                    # pages is held whole. The next step counts what they hold.
                    return
                self._waiting.begin_load(sequence)
                yield load
            if pages_may_come:
                self._prefixes.look_ahead(sequence, keep, held_by_others)

    @property
    def free_loads(self) -> FreeLoads:
        """Loads that may begin now."""
        adapters = self._memory.adapters
        return free_loads(adapters.num_loading, adapters.num_loading_from_store)

    def may_load(self, sequence: GrowingSequence) -> bool:
        """A load of the sequence's adapter, which is absent, may begin now."""
        loads = self.free_loads
        return (loads.from_host if sequence.adapter_digest in self._memory.hosted else loads.from_store) > 0

    def is_absent(self, sequence: GrowingSequence) -> bool:
        """The sequence's adapter is neither in the pool nor being loaded."""
        digest = sequence.adapter_digest
        return digest is not None and self._memory.adapters.state(digest) is AdapterState.ABSENT

    def num_kv_pages_to_take(self, sequence: GrowingSequence, held_by_others: HeldByOthers | None = None) -> int:
        """Pages that the sequence takes when it starts, without those that others hold or that are coming.

        `held_by_others`: see `PrefixReuse.num_held_by_others`.
        """
        num_held = self._prefixes.num_held_by_others(sequence, {} if held_by_others is None else held_by_others)
        num_pages = pages_for(sequence.num_uncomputed, self._limits.block_size) - num_held
        num_pages += self._limits.num_state_pages
        return min(num_pages, self._limits.most_pages(sequence.num_uncomputed))

    def _lacks(self, sequence: GrowingSequence, loads: FreeLoads, held_by_others: HeldByOthers) -> bool:
        """A load or a copy could start for the sequence, if these loads may start."""
        num_loads = loads.from_host if sequence.adapter_digest in self._memory.hosted else loads.from_store
        return (num_loads > 0 and self.is_absent(sequence)) or self._prefixes.may_come_ahead(sequence, held_by_others)

    def _needs(self, sequence: GrowingSequence, held_by_others: HeldByOthers) -> WaitingNeeds:
        ref, is_absent, num_adapter_pages = sequence.request.adapter, self.is_absent(sequence), 0
        if ref is not None:
            idle_pages_of = self._memory.adapters.num_idle_pages_of
            num_adapter_pages = sequence.num_adapter_pages if is_absent else idle_pages_of(ref.digest)
        num_kv_pages = self.num_kv_pages_to_take(sequence, held_by_others)
        is_hosted = is_absent and sequence.adapter_digest in self._memory.hosted
        return WaitingNeeds(sequence.adapter_digest, is_absent, num_adapter_pages, num_kv_pages, is_hosted)
