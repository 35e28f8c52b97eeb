"""Which prompts a step computes, of running sequences and of waiting ones that start."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice, tee

from ..fairness.page_times import PageTimes
from ..fairness.preemption import should_preempt
from ..fairness.prices import OUTPUT_TOKEN, prompt_price
from ..fairness.prompt_budget import divide_prompt_tokens
from ..fairness.tenant_counters import TenantCounter, TenantCounters
from ..memory.adapter_cache import AdapterState
from ..memory.paged_memory import PagedMemory
from ..wire.messages import AdapterRef
from ..wire.page_keys import PageKey
from .gang_load import StepCounts
from .growing_sequence import GrowingSequence, by_arrival
from .planned_step import PlannedChunk, plan_chunk
from .prefetch_policy import MAX_LOADS_UNDER_WAY
from .prefetcher import Prefetcher
from .prefix_reuse import HeldByOthers, PrefixReuse
from .request_limits import GangLimits, pages_for
from .running_sequences import RunningSequences
from .waiting_queue import WaitingQueue

_MAX_LOOKED_AT = 1024  # ready sequences, in the search for candidates
_MAX_PREEMPTED = 8  # sequences preempted in one step for waiting ones
_MAX_CANDIDATES = 64  # in one look for sequences to start; another look follows if all of them have started

_LASTING_STEPS = 256  # duration of latency mode after the arrival that switched it on
_THROTTLED_PART = 0.25  # of a step's tokens, for prompts of all throttled tenants together


class PromptPlanner:
    """Divides a step's tokens among prompts, and starts waiting sequences in fair order.

    A sequence whose adapter or prefix is still being loaded is passed over.
    """

    def __init__(
        self,
        memory: PagedMemory,
        prefixes: PrefixReuse,
        prefetcher: Prefetcher,
        waiting: WaitingQueue,
        running: RunningSequences,
        limits: GangLimits,
        counters: TenantCounters,
        latency_mode: LatencyMode,
        pages_of_adapter: Callable[[AdapterRef], int],
        times: PageTimes,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._counters, self._latency_mode, self._times = counters, latency_mode, times
        self._preempted: set[GrowingSequence] = set()  # in this step, so they do not start again in it
        self._lacked_room = False  # when sequences were last started, one found no pages
        self._memory, self._prefixes, self._prefetcher = memory, prefixes, prefetcher
        self._waiting, self._running, self._limits = waiting, running, limits
        self._pages_of_adapter, self._clock = pages_of_adapter, clock

    def plan_prompts(self, budget: int, may_admit: bool) -> list[PlannedChunk]:
        """Plans chunks of running prompts, and of waiting sequences, which start now if `may_admit`.

        `budget`: tokens in all. In latency mode throttled tenants together get at most `throttled_budget` of them.
        """
        throttled_budget = budget
        if self._latency_mode.is_on:
            throttled_budget = max(1, int(_THROTTLED_PART * self._limits.max_tokens_per_step))
        num_tokens: dict[GrowingSequence, int] = {}
        prompts, started, is_first = self._running.prompts[:], list[GrowingSequence](), True
        while budget > 0 and (started or is_first):
            candidates = self.candidates() if may_admit else []
            left = {s: s.num_unplanned for s in prompts} | {s: s.num_uncomputed - s.num_found for s in candidates}
            granted = self._divide(left, budget, throttled_budget)
            started = list(self.start(s for s in candidates if granted[s]))
            for sequence in (*prompts, *started):
                num_tokens[sequence] = min(sequence.num_unplanned, granted[sequence])
                budget -= num_tokens[sequence]
                throttled_budget -= num_tokens[sequence] if self._latency_mode.throttles(sequence.counter) else 0
            prompts, is_first = [], False
        for sequence in self._running.prompts:  # tokens left over by prompts with cached prefixes
            is_throttled = self._latency_mode.throttles(sequence.counter)
            # A starting sequence is charged for cached tokens, which can make its tenant throttled and
            # `throttled_budget` negative.
            most = max(0, min(budget, throttled_budget)) if is_throttled else budget
            more = min(sequence.num_unplanned - num_tokens.get(sequence, 0), most)
            num_tokens[sequence] = num_tokens.get(sequence, 0) + more
            budget -= more
            throttled_budget -= more if is_throttled else 0
        chunks = [plan_chunk(sequence, number) for sequence, number in num_tokens.items() if number]
        for chunk in chunks:
            self._charge(chunk)
        self._running.end_prompts()
        self._preempted.clear()
        return chunks

    def preempt_for_waiting(self, preempt: Callable[[GrowingSequence], None]) -> int:
        """Preempts running sequences for waiting ones of tenants that are clearly behind; returns how many.

        Only if there is no room for these, and at most _MAX_PREEMPTED in a step.
        """
        running, waiting, counters = self._running, self._waiting, self._running.by_tenant
        if waiting.is_of(counters) or not waiting.num_ready:
            return 0
        if len(running) < self._limits.max_num_sequences and not self._lacked_room:
            return 0
        self._lacked_room = False
        num_free_seats, num_pages = self._limits.max_num_sequences - len(running), 0
        for sequence in self._first_ready():
            num_free_seats, num_pages = num_free_seats - 1, num_pages + self._prefetcher.num_kv_pages_to_take(sequence)
            keep = {sequence.adapter_digest} if sequence.adapter_digest is not None else set()
            while num_free_seats < 0 or not self._memory.has_room(
                num_pages + running.reserve.num_pages(sequence, num_pages), keep
            ):
                last = running.last
                if (
                    last is None
                    or len(self._preempted) == _MAX_PREEMPTED
                    or not should_preempt(last, sequence.turn_rank)
                ):
                    return len(self._preempted)
                self._preempted.add(last)
                preempt(last)
                num_free_seats += 1
        return len(self._preempted)

    def candidates(self) -> list[GrowingSequence]:
        """Waiting sequences that could start now, in order; their `num_found` tokens need not be computed.

        Of sequences that would compute the same page only the oldest is a candidate.
        """
        most = min(self._limits.max_num_sequences - len(self._running), _MAX_CANDIDATES)
        found: list[GrowingSequence] = []
        next_keys: set[PageKey] = set()  # first pages that the candidates would compute
        if most <= 0 or not self._waiting.num_ready:
            return found
        if not self._memory.has_room(1 + self._running.reserve.least, frozenset()):
            self._lacked_room = True
            return found
        held_by_others: HeldByOthers = {}  # valid since no page is released in this method
        turns, again = tee(self._waiting.equipped_in_turn())
        for sequence, older in islice(self._in_turn(turns, again), _MAX_LOOKED_AT):
            if sequence in self._preempted:
                continue
            if not self._prefixes.is_known(sequence) and not self._look_up(sequence, older, held_by_others):
                continue
            if sequence.awaited_key is None or sequence.awaited_key not in next_keys:
                next_keys |= {sequence.awaited_key} if sequence.awaited_key is not None else set()
                found.append(sequence)
                if len(found) == most:
                    break
        return found

    def start(self, sequences: Iterable[GrowingSequence]) -> Iterator[GrowingSequence]:
        """Starts candidates in order until one finds no room, which later ones must not take. Yields those started."""
        for sequence, older in self._in_turn(sequences, self._waiting.equipped_in_turn()):
            found = self._prefixes.find(sequence, older.wanted)
            if found is None:
                self._await_page(sequence, self._prefixes.key_to_await(sequence))
            elif self._enter(sequence, found, older):
                yield sequence
            else:
                self._lacked_room = True
                return

    def _first_ready(self) -> list[GrowingSequence]:
        """Up to _MAX_PREEMPTED ready sequences in order; of those with the same prefix one, as only one can start."""
        found: dict[PageKey | int, GrowingSequence] = {}
        for sequence in self._waiting.equipped_in_turn(notes_turns=True):
            if sequence.awaits_page is None:
                found.setdefault(sequence.page_keys[-1] if sequence.page_keys else sequence.sequence_id, sequence)
            if len(found) == _MAX_PREEMPTED:
                break
        return [*found.values()]

    def _divide(
        self, left: dict[GrowingSequence, int], budget: int, throttled_budget: int
    ) -> dict[GrowingSequence, int]:
        """How many tokens of each prompt the step computes; tenants that were served less go first.

        `left`: tokens that each prompt has left. `throttled_budget`: prompt tokens for all throttled tenants together,
        so steps stay short for new arrivals.
        """
        by_tenant: dict[TenantCounter, list[GrowingSequence]] = {}
        for sequence in sorted(left, key=by_arrival):
            by_tenant.setdefault(sequence.counter, []).append(sequence)
        granted: dict[GrowingSequence, int] = {}
        for counter in sorted(by_tenant, key=_order):
            own = by_tenant[counter]
            is_throttled = self._latency_mode.throttles(counter)
            most = min(budget, throttled_budget) if is_throttled else budget
            granted |= zip(own, divide_prompt_tokens([left[s] for s in own], most), strict=True)
            num_taken = sum([granted[sequence] for sequence in own])
            budget -= num_taken
            throttled_budget -= num_taken if is_throttled else 0
        return granted

    def _charge(self, chunk: PlannedChunk) -> None:
        sequence, end = chunk.sequence, chunk.part.start + len(chunk.part.token_ids)
        num_new = end - max(chunk.part.start, sequence.num_charged)
        price = prompt_price(max(num_new, 0)) + (OUTPUT_TOKEN if chunk.part.sample is not None else 0.0)
        self._counters.charge(sequence.counter, price)
        sequence.num_charged = max(sequence.num_charged, end)

    def _in_turn(
        self, sequences: Iterable[GrowingSequence], equipped: Iterator[GrowingSequence]
    ) -> Iterator[tuple[GrowingSequence, OlderSequences]]:
        """Ready sequences, each with the needs of those up to it. Ends where later ones must not start.

        `equipped`: all sequences that have their adapter, in the same order.
        """
        older = OlderSequences(equipped, self._waiting.has_one_tenant)
        adapters, lacking = self._memory.adapters, None
        if adapters.num_loading < MAX_LOADS_UNDER_WAY:
            lacking = self._waiting.oldest_lacking(lambda digest: adapters.state(digest) is AdapterState.ABSENT)
        for sequence in sequences:
            if sequence.awaits_page is not None or not self._has_adapter(sequence):
                continue
            if lacking is not None and _comes_before(lacking, sequence):
                older.reach(lacking)
                ref = lacking.request.adapter
                assert ref is not None
                num_pages = self._pages_of_adapter(ref) + len(self._running)
                if not self._memory.has_room(num_pages, older.wanted):
                    return  # there is no room for its adapter yet, and newer sequences must not take it
                lacking = None  # newer sequences that lack their adapter do not block others
            older.reach(sequence)
            yield sequence, older

    def _look_up(self, sequence: GrowingSequence, older: OlderSequences, held_by_others: HeldByOthers) -> bool:
        """Looks up the sequence's prefix. False: the sequence now awaits a page that is being computed or copied."""
        key = self._prefixes.last_coming(sequence, held_by_others)
        if key is None and self._prefixes.find(sequence, older.wanted) is None:
            key = self._prefixes.key_to_await(sequence)
        if key is not None:
            self._await_page(sequence, key)
        return key is None

    def _await_page(self, sequence: GrowingSequence, key: PageKey) -> None:
        """Passes the sequence over until this page of its prefix is there."""
        num_pages = 0
        if self._prefixes.is_being_copied(key):  # newer sequences must not evict what is copied for it
            num_pages = self._prefetcher.num_kv_pages_to_take(sequence)
        self._waiting.await_page(sequence, key, num_pages)

    def _enter(self, sequence: GrowingSequence, found: list[int], older: OlderSequences) -> bool:
        """Starts a waiting sequence, on the pages `found` of its prefix and new ones for the rest.

        False, and nothing changed, if the pool has no room for it in addition to what older sequences reserve.
        """
        num_pages = pages_for(sequence.num_uncomputed, self._limits.block_size) - len(found)
        num_left_free = older.num_reserved_pages + self._running.reserve.num_pages(sequence, num_pages)
        if not self._memory.has_room(num_pages + num_left_free, older.wanted, found):
            return False
        self._memory.prefixes.acquire(found)  # first, so that they are not evicted for the new ones
        self._memory.make_room(num_pages, older.wanted)
        self._waiting.remove(sequence)
        if sequence.began_at is None:
            sequence.began_at = self._clock()
        self._prefixes.enter(sequence, found, self._memory.allocator.allocate(num_pages) or ())
        sequence.count_cached()
        self._running.add(sequence)
        num_cached = sequence.num_computed - sequence.num_charged
        if num_cached > 0:
            self._counters.charge(sequence.counter, prompt_price(0, num_cached))
            sequence.num_charged = sequence.num_computed
        digest, num_adapter_pages = sequence.adapter_digest, 0
        if digest is not None:
            self._memory.adapters.acquire(digest)
            num_adapter_pages = len(self._memory.adapters.residence(digest).pages)
        self._times.start(sequence.held, len(sequence.pages), digest, num_adapter_pages)
        return True

    def _has_adapter(self, sequence: GrowingSequence) -> bool:
        digest = sequence.adapter_digest
        return digest is None or self._memory.adapters.state(digest) is AdapterState.RESIDENT


class LatencyMode:
    """On for a while after a tenant that is clearly behind others has arrived: steps stay short for its requests.

    Then plans are made late in a step, and tenants that are clearly ahead of the newcomer are throttled.
    """

    def __init__(self, counts: StepCounts, running: RunningSequences) -> None:
        self._counts, self._running = counts, running
        self._since_step = -_LASTING_STEPS  # when such a tenant last arrived
        self._newcomer: TenantCounter | None = None  # that tenant

    def observe(self, sequence: GrowingSequence) -> None:
        """The sequence has arrived, and has joined its tenant's counter."""
        last = self._running.last if sequence.counter.num_sequences == 1 else None
        if last is not None and should_preempt(last, sequence.rank):
            self._since_step, self._newcomer = self._counts.num_steps, sequence.counter

    @property
    def is_on(self) -> bool:
        return self._counts.num_steps - self._since_step < _LASTING_STEPS

    def throttles(self, counter: TenantCounter) -> bool:
        """The tenant is clearly ahead of the newcomer: its prompts must not make steps long."""
        newcomer = self._newcomer
        return (
            newcomer is not None
            and self.is_on
            and (counter.is_background, counter.band) > (newcomer.is_background, newcomer.band)
        )


class OlderSequences:
    """What older waiting sequences need and newer ones must not take, accumulated along the queue."""

    def __init__(self, equipped: Iterator[GrowingSequence], has_one_tenant: bool) -> None:
        """`equipped`: waiting sequences with their adapter, in fair order. `has_one_tenant`: all are of one."""
        self.wanted: set[str] = set()  # their adapters, which are in the pool
        self.num_reserved_pages = 0  # pages that they will take once their prefixes are copied
        self._sequences, self._has_one_tenant = equipped, has_one_tenant
        self._next = next(self._sequences, None)

    def reach(self, sequence: GrowingSequence) -> None:
        """Counts all up to this waiting sequence."""
        following, has_one_tenant = self._next, self._has_one_tenant
        while following is not None and (
            following.arrival <= sequence.arrival if has_one_tenant else not _comes_before(sequence, following)
        ):
            following = self._take(following)

    def reach_running(self, sequence: GrowingSequence) -> None:
        """Counts those that rank before this running sequence."""
        rank = sequence.rank
        while self._next is not None and self._next.rank < rank:
            self._take(self._next)

    def _take(self, sequence: GrowingSequence) -> GrowingSequence | None:
        """Counts the sequence; returns the next one."""
        if sequence.adapter_digest is not None:
            self.wanted.add(sequence.adapter_digest)
        self.num_reserved_pages += sequence.num_reserved_pages
        self._next = following = next(self._sequences, None)
        return following


def _comes_before(one: GrowingSequence, other: GrowingSequence) -> bool:
    """Whether a waiting sequence goes before another one, whose turn is known."""
    if one.counter is other.counter:
        return one.arrival < other.arrival
    return max(one.turn, (one.counter.is_background, one.counter.value, one.arrival)) < other.turn


def _order(counter: TenantCounter) -> tuple[bool, float]:
    return counter.is_background, counter.value
