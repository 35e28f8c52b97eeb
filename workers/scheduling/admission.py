"""Which prompts a step computes: of sequences that run, and of those that start."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from ..memory.adapter_cache import AdapterState
from ..memory.paged_memory import PagedMemory
from ..wire.messages import AdapterRef
from ..wire.page_keys import PageKey
from .planned_step import PlannedChunk, plan_chunk
from .prefetch_policy import MAX_LOADS_UNDER_WAY
from .prefetcher import Prefetcher
from .prefix_reuse import Hands, PrefixReuse
from .prompt_budget import share_prompt_tokens
from .request_limits import GangLimits, pages_for
from .running_sequences import RunningSequences
from .sequence import Sequence
from .waiting_queue import WaitingQueue

_MAX_LOOKED_AT = 1024  # sequences that await nothing, in the search for candidates
_MAX_CANDIDATES = 64  # sequences that are looked at for one step's places; there is another look if all have started


class Admission:
    """Lets waiting sequences start, oldest first. One whose adapter or prefix is still coming is passed over."""

    def __init__(
        self,
        memory: PagedMemory,
        prefixes: PrefixReuse,
        prefetcher: Prefetcher,
        waiting: WaitingQueue,
        running: RunningSequences,
        limits: GangLimits,
        pages_of_adapter: Callable[[AdapterRef], int],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._memory, self._prefixes, self._prefetcher = memory, prefixes, prefetcher
        self._waiting, self._running, self._limits = waiting, running, limits
        self._pages_of_adapter, self._clock = pages_of_adapter, clock

    def plan_prompts(self, budget: int, may_admit: bool) -> list[PlannedChunk]:
        """Plans chunks of prompts that run, and of waiting sequences, which start now if they may.

        `budget`: tokens in all.
        """
        num_tokens: dict[Sequence, int] = {}
        prompts, started, is_first = self._running.prompts[:], list[Sequence](), True
        while budget > 0 and (started or is_first):
            candidates = self.candidates() if may_admit else []
            left = {s: s.num_unplanned for s in prompts} | {s: s.num_uncomputed - s.num_found for s in candidates}
            asking = sorted(left, key=lambda sequence: sequence.arrival)
            shares = dict(zip(asking, share_prompt_tokens([left[s] for s in asking], budget), strict=True))
            started = list(self.start(s for s in candidates if shares[s]))
            for sequence in (*prompts, *started):
                num_tokens[sequence] = min(sequence.num_unplanned, shares[sequence])
                budget -= num_tokens[sequence]
            prompts, is_first = [], False
        for sequence in self._running.prompts:  # what others left over, because their prefixes are there or are coming
            more = min(sequence.num_unplanned - num_tokens.get(sequence, 0), budget)
            num_tokens[sequence] = num_tokens.get(sequence, 0) + more
            budget -= more
        chunks = [plan_chunk(sequence, number) for sequence, number in num_tokens.items() if number]
        self._running.end_prompts()
        return chunks

    def candidates(self) -> list[Sequence]:
        """Waiting sequences that could start now, oldest first: `num_found` says what of them need not be computed.

        Of sequences that would compute the same page only the oldest is one. At most as many as there are places.
        """
        most = min(self._limits.max_num_sequences - len(self._running), _MAX_CANDIDATES)
        found: list[Sequence] = []
        next_keys: set[PageKey] = set()  # of pages that these would compute
        if most <= 0 or not self._waiting.num_ready:
            return found
        hands: Hands = {}  # no page is released meanwhile
        for sequence, older in islice(self._in_turn(self._waiting.equipped[:]), _MAX_LOOKED_AT):
            if not self._prefixes.is_known(sequence) and not self._look_up(sequence, older, hands):
                continue
            if sequence.awaited_key is None or sequence.awaited_key not in next_keys:
                next_keys |= {sequence.awaited_key} if sequence.awaited_key is not None else set()
                found.append(sequence)
                if len(found) == most:
                    break
        return found

    def start(self, sequences: Iterable[Sequence]) -> Iterator[Sequence]:
        """Starts candidates, oldest first, until one finds no room, which newer ones must not take. Yields who runs."""
        for sequence, older in self._in_turn(sequences):
            found = self._prefixes.find(sequence, older.wanted)
            if found is None:
                self._let_wait(sequence, self._prefixes.key_to_await(sequence))
            elif self._enter(sequence, found, older):
                yield sequence
            else:
                return

    def _in_turn(self, sequences: Iterable[Sequence]) -> Iterator[tuple[Sequence, OlderSequences]]:
        """Sequences that await nothing, with what those up to them want. Ends where newer ones must not go on."""
        older = OlderSequences(self._waiting)
        adapters, lacking = self._memory.adapters, None
        if adapters.num_loading < MAX_LOADS_UNDER_WAY:
            lacking = self._waiting.oldest_lacking(lambda digest: adapters.state(digest) is AdapterState.ABSENT)
        for sequence in sequences:
            if sequence.awaits_page is not None or not self._has_adapter(sequence):
                continue
            if lacking is not None and lacking.arrival < sequence.arrival:
                older.reach(lacking.arrival)
                ref = lacking.request.adapter
                assert ref is not None
                num_pages = self._pages_of_adapter(ref) + len(self._running)
                if not self._memory.has_room(num_pages, older.wanted):
                    return  # its adapter lacks room, which newer sequences must not take
                lacking = None  # it comes first: newer ones that lack an adapter hold nobody up
            older.reach(sequence.arrival)
            yield sequence, older

    def _look_up(self, sequence: Sequence, older: OlderSequences, hands: Hands) -> bool:
        """Looks for the sequence's prefix. False: it waits from now on for a page that is coming."""
        key = self._prefixes.last_coming(sequence, hands)
        if key is None and self._prefixes.find(sequence, older.wanted) is None:
            key = self._prefixes.key_to_await(sequence)
        if key is not None:
            self._let_wait(sequence, key)
        return key is None

    def _let_wait(self, sequence: Sequence, key: PageKey) -> None:
        """A page of the sequence's prefix is coming: it is looked at again when that is there."""
        num_pages = 0
        if self._prefixes.is_being_copied(key):  # newer sequences must not push out what comes for it
            num_pages = self._prefetcher.num_kv_pages_to_take(sequence)
        self._waiting.await_page(sequence, key, num_pages)

    def _enter(self, sequence: Sequence, found: list[int], older: OlderSequences) -> bool:
        """Starts a waiting sequence, on the pages `found` of its prefix and new ones for the rest.

        False, and nothing changed, unless the pages that older sequences will take could be taken beside those.
        """
        num_pages = pages_for(sequence.num_uncomputed, self._limits.block_size) - len(found)
        if not self._memory.has_room(num_pages + older.num_reserved_pages, older.wanted, found):
            return False
        self._memory.prefixes.acquire(found)  # first, so that they are not evicted for the new ones
        self._memory.make_room(num_pages, older.wanted)
        self._waiting.remove(sequence)
        if sequence.began_at is None:
            sequence.began_at = self._clock()
        self._prefixes.enter(sequence, found, self._memory.allocator.allocate(num_pages) or ())
        self._running.add(sequence)
        if sequence.adapter_digest is not None:
            self._memory.adapters.acquire(sequence.adapter_digest)
        return True

    def _has_adapter(self, sequence: Sequence) -> bool:
        digest = sequence.adapter_digest
        return digest is None or self._memory.adapters.state(digest) is AdapterState.RESIDENT


class OlderSequences:
    """What waiting sequences want that newer ones must not take, as one looks at newer and newer ones."""

    def __init__(self, waiting: WaitingQueue) -> None:
        self.wanted: set[str] = set()  # adapters of theirs, as far as these are in the pool
        self.num_reserved_pages = 0  # pages that they will take once their prefixes have come
        self._sequences = iter(waiting.equipped[:])
        self._next = next(self._sequences, None)

    def reach(self, arrival: int) -> None:
        """From now on counts all that arrived up to then. `arrival`: not before the last one."""
        while self._next is not None and self._next.arrival <= arrival:
            if self._next.adapter_digest is not None:
                self.wanted.add(self._next.adapter_digest)
            self.num_reserved_pages += self._next.num_reserved_pages
            self._next = next(self._sequences, None)
