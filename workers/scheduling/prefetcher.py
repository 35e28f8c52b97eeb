"""Loads adapters and pages of KV for waiting sequences, as `prefetch_policy.py` chooses."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..memory.adapter_cache import AdapterState
from ..memory.idle_order import Item
from ..memory.paged_memory import PagedMemory
from ..plan import AdapterLoad
from ..wire.messages import AdapterRef
from .growing_sequence import GrowingSequence
from .prefetch_policy import FreeLoads, WaitingNeeds, choose_prefetch, free_loads
from .prefix_reuse import HeldByOthers, PrefixReuse
from .request_limits import GangLimits, pages_for
from .waiting_queue import WaitingQueue


class Prefetcher:
    """Finds what waiting sequences lack, and starts loading it."""

    def __init__(
        self,
        memory: PagedMemory,
        prefixes: PrefixReuse,
        pages_of_adapter: Callable[[AdapterRef], int],
        limits: GangLimits,
        waiting: WaitingQueue,
    ) -> None:
        """`waiting` is notified when an adapter's load starts for one of its sequences."""
        self._memory, self._prefixes, self._waiting = memory, prefixes, waiting
        self._pages_of_adapter, self._limits = pages_of_adapter, limits

    def begin(self, waiting: list[GrowingSequence], num_lacking: int, num_running: int) -> Iterator[AdapterLoad]:
        """Starts loads and copies for these sequences, oldest first, even if they cannot start in this step.

        Those whose adapters were loaded and that have not started yet claim their room before all others. The caller
        puts the loads into its plan. `num_lacking`: sequences that lack their adapter, these or others. Each of
        `num_running` running sequences may need another page meanwhile.
        """
        loads = self.free_loads if num_lacking else FreeLoads(0, 0)
        may_load = loads.from_store > 0 or (loads.from_host > 0 and self._memory.hosted)
        if not may_load and not self._prefixes.can_come_ahead:
            return
        if loaded_for := self._waiting.loaded_for():
            waiting = sorted(dict.fromkeys([*loaded_for, *waiting]), key=lambda each: each.counter.is_background)
        held_by_others: HeldByOthers = {}  # valid since no page is released in this method
        while waiting and not self._lacks(waiting[-1], loads, held_by_others):
            waiting.pop()
        needs = (self._needs(sequence, held_by_others) for sequence in waiting)
        chosen = choose_prefetch(needs, self._memory.num_pages_to_take - num_running, loads)
        wanted: set[Item] = set()  # adapters and pages of older sequences: not to be evicted for a newer sequence
        older: list[GrowingSequence] = []  # sequences whose pages are not in `wanted` yet
        for number, sequence in enumerate(waiting[: chosen.num_with_room + 1]):
            ref, has_room = sequence.request.adapter, number < chosen.num_with_room
            adapter_comes = ref is not None and ref.digest in chosen.adapters and ref.digest not in wanted
            pages_may_come = has_room and self._prefixes.may_come_ahead(sequence, held_by_others)
            older += [sequence] if has_room else []
            wanted |= {ref.digest} if ref is not None else set()
            if adapter_comes or pages_may_come:
                wanted.update(page for one in older for page in self._prefixes.here(one, held_by_others))
                older.clear()
            if adapter_comes:
                assert ref is not None
                load = self._memory.begin_load(ref, self._pages_of_adapter(ref), wanted)
                assert load is not None, "the room that older sequences leave was miscounted"
                self._waiting.begin_load(sequence)
                yield load
            if pages_may_come:
                self._prefixes.look_ahead(sequence, wanted, held_by_others)

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
        return min(num_pages, self._limits.most_pages(sequence.num_uncomputed))

    def _lacks(self, sequence: GrowingSequence, loads: FreeLoads, held_by_others: HeldByOthers) -> bool:
        """A load or a copy could start for the sequence, if these loads may start."""
        num_loads = loads.from_host if sequence.adapter_digest in self._memory.hosted else loads.from_store
        return (num_loads > 0 and self.is_absent(sequence)) or self._prefixes.may_come_ahead(sequence, held_by_others)

    def _needs(self, sequence: GrowingSequence, held_by_others: HeldByOthers) -> WaitingNeeds:
        ref, is_absent, num_adapter_pages = sequence.request.adapter, self.is_absent(sequence), 0
        if ref is not None:
            idle_pages_of = self._memory.adapters.num_idle_pages_of
            num_adapter_pages = self._pages_of_adapter(ref) if is_absent else idle_pages_of(ref.digest)
        num_kv_pages = self.num_kv_pages_to_take(sequence, held_by_others)
        is_hosted = is_absent and sequence.adapter_digest in self._memory.hosted
        return WaitingNeeds(sequence.adapter_digest, is_absent, num_adapter_pages, num_kv_pages, is_hosted)
