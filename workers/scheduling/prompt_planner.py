"""Which prompts a step computes, of running sequences and of waiting ones that start."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice, tee

from ..decoding.constraints import Constraints
from ..fairness.page_times import PageTimes
from ..fairness.prompt_budget import PromptBudget, Rank, divide_prompt_tokens, should_preempt
from ..fairness.tenant_counters import (
    OUTPUT_TOKEN,
    SCORED_TOKEN,
    TenantCounter,
    TenantCounters,
    load_price,
    prompt_price,
)
from ..memory.paged_memory import AdapterState, PagedMemory
from ..plan import INT32_BYTES
from ..window_pages import GangLimits, pages_for
from ..wire.page_keys import PageKey
from .gang_load import StepCounts
from .growing_sequence import GrowingSequence, StateSnapshot, by_arrival
from .prefetcher import Prefetcher
from .prefix_reuse import FoundPrefix, HeldByOthers, PrefixReuse
from .running_sequences import PlannedChunk, RunningSequences, plan_chunk
from .waiting_queue import WaitingQueue

_MAX_LOOKED_AT = 1024  # ready sequences, in the search for candidates
_MAX_PREEMPTED = 8  # sequences preempted in one step for waiting ones
_MOST_FOUND = 4096  # pages of prefixes that are looked up, and held, in a step; a single sequence's may be more
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
        times: PageTimes,
        clock: Callable[[], float] = time.perf_counter,
        constraints: Constraints | None = None,
    ) -> None:
        self._counters, self._latency_mode, self._times = counters, latency_mode, times
        self._preempted: set[GrowingSequence] = set()  # in this step, so they do not start again in it
        self._lacked_room = False  # when sequences were last started, one found no pages
        self._num_looked_up = self._num_held = 0  # pages of prefixes, in this step
        self._held_by_others: HeldByOthers = {}  # as of the last search for candidates
        self._may_throttle = False  # in this step, tenants that are ahead of a newcomer
        self._is_blocked = False  # in this step, newer sequences must not take the room that an older one lacks
        self._taking_over: list[GrowingSequence] = []  # wait for a page that a sequence of less standing computes
        self._memory, self._prefixes, self._prefetcher = memory, prefixes, prefetcher
        self._waiting, self._running, self._limits = waiting, running, limits
        self._clock, self._constraints = clock, constraints

    def plan_prompts(self, budget: PromptBudget, may_admit: bool, most_sequences: int) -> list[PlannedChunk]:
        """Plans chunks of at most so many running prompts, and of waiting sequences, which start now if `may_admit`.

        In latency mode throttled tenants together get at most `throttled_budget` tokens.
        """
        throttled_budget = budget.num_tokens
        self._may_throttle = self._latency_mode.is_on
        if self._may_throttle:
            throttled_budget = max(1, int(_THROTTLED_PART * self._limits.max_tokens_per_step))
        num_tokens: dict[GrowingSequence, int] = {}
        self._is_blocked, self._num_looked_up, self._num_held = False, 0, 0
        block_size = self._limits.block_size
        prompts = [sequence for sequence in self._running.prompts if sequence.num_that_fit(block_size)]
        started, is_first = list[GrowingSequence](), True
        while budget.num_tokens > 0 and (started or is_first):
            candidates = self.candidates() if may_admit else []
            num_left = {s: s.num_that_fit(block_size) for s in prompts} | {
                s: s.num_uncomputed - s.num_found for s in candidates
            }
            credit = self._counters.slack
            if not num_left:
                break
            if prompts and self._lack_room(candidates):
                credit = self._counters.burst - self._counters.slack  # clearly less than a newcomer's head start
            granted = self._divide_in_time(num_left, budget, throttled_budget, credit)
            started = list(self.start(s for s in candidates if granted[s])) if candidates else []
            for sequence in (*prompts, *started):
                num_tokens[sequence] = min(sequence.num_that_fit(block_size), granted[sequence])
                budget.take(sequence.next_position, num_tokens[sequence])
                throttled_budget -= (
                    num_tokens[sequence] if self._may_throttle and self._latency_mode.throttles(sequence.counter) else 0
                )
            prompts, is_first = [], False
        for sequence in self._start_loaded() if self._is_blocked and may_admit and budget.num_tokens > 0 else ():
            start = sequence.next_position
            num_tokens[sequence] = max(1, budget.tokens_that_fit(start, sequence.num_that_fit(block_size)))
            budget.take(start, num_tokens[sequence])
            if not budget.num_tokens:
                break
        for sequence in self._running.prompts:  # tokens left over by prompts with cached prefixes
            is_throttled = self._may_throttle and self._latency_mode.throttles(sequence.counter)
            # A starting sequence is charged for cached tokens, which can make its tenant throttled and
            # `throttled_budget` negative.
            max_tokens = max(0, throttled_budget) if is_throttled else budget.num_tokens
            num_granted = num_tokens.get(sequence, 0)
            start = sequence.next_position + num_granted
            more = budget.tokens_that_fit(start, min(sequence.num_that_fit(block_size) - num_granted, max_tokens))
            num_tokens[sequence] = num_granted + more
            budget.take(start, more)
            throttled_budget -= more if is_throttled else 0
        planned = [(sequence, number) for sequence, number in num_tokens.items() if number]
        # Only beams can be more than a step has places for: the others' turn comes in later ones.
        chunks = [
            plan_chunk(sequence, number, self._plan_snapshots(sequence, number))
            for sequence, number in planned[:most_sequences]
        ]
        for chunk in chunks:
            self._charge(chunk)
        self._running.end_prompts()
        self._preempted.clear()
        return chunks

    def _plan_snapshots(self, sequence: GrowingSequence, num_tokens: int) -> list[StateSnapshot]:
        """What a chunk of so many tokens keeps of the sequence's recurrent states, as far as there is room for them.

        Only what is idle goes for them.
        """
        snapshots = list[StateSnapshot]()
        start, num_pages = sequence.next_position, self._limits.num_state_pages
        for position in self._prefixes.snapshot_positions(sequence, start, start + num_tokens) if num_pages else ():
            pages = self._memory.take_spare(num_pages, self._running.reserve.min_pages)
            if pages is None:
                self._prefixes.skip_snapshot(sequence, position)
                continue
            state = StateSnapshot(sequence, position, pages)
            self._prefixes.begin_snapshot(state, start)
            snapshots.append(state)
        return snapshots

    def preempt_for_waiting(self, preempt: Callable[[GrowingSequence], None]) -> int:
        """Preempts running sequences for waiting ones of tenants that are clearly behind; returns how many.

        Only if there is no room for these, and at most _MAX_PREEMPTED in a step. The tenant that others are preempted
        for pays for what they lose, and is clearly behind only if it could pay for all pages that it lacks.
        """
        running, waiting, counters = self._running, self._waiting, self._running.by_tenant
        if self._taking_over:
            self._take_over(preempt)
        if running.num_places < self._limits.max_num_sequences and not self._lacked_room:
            return len(self._preempted)
        if waiting.is_of(counters) or not waiting.num_ready:
            return len(self._preempted)
        self._lacked_room = False
        num_free_seats, num_pages = self._limits.max_num_sequences - running.num_places, 0
        held_by_others: HeldByOthers = {}  # what is released meanwhile counts as held: an estimate
        for sequence in self._first_ready():
            num_free_seats -= sequence.num_places
            num_pages += self._prefetcher.num_kv_pages_to_take(sequence, held_by_others)
            keep = self._waiting.kept_from(sequence) | {sequence.adapter_digest or ""}
            counter, (is_background, turn, arrival) = sequence.counter, sequence.turn
            while True:
                num_needed = num_pages + running.reserve.num_pages(sequence, num_pages)
                if num_free_seats >= 0 and self._memory.comes_to_room(num_needed, keep):
                    break
                num_tokens = max(0, num_needed - self._memory.num_pages_to_take) * self._limits.block_size
                slack = counter.slack + prompt_price(num_tokens) / counter.weight
                last = running.last_ahead_of((is_background, turn, arrival), slack)
                if last is None or len(self._preempted) == _MAX_PREEMPTED:
                    return len(self._preempted)
                last = last if last.beams is None else last.beams.root
                if last.counter.is_background == is_background:
                    loss = prompt_price(last.prepay())
                    self._counters.charge(counter, loss)
                    turn += loss / counter.weight
                self._preempted.add(last)
                num_free_seats += running.num_places
                preempt(last)
                num_free_seats -= running.num_places
        return len(self._preempted)

    def _take_over(self, preempt: Callable[[GrowingSequence], None]) -> None:
        """Preempts prompts whose pages a waiting sequence of more standing needs: that one computes the rest itself.

        Otherwise it would wait for as long as others go before the one that computes.
        """
        for sequence in self._taking_over:
            computing = self._prefixes.computing(sequence.awaits_page)
            if computing is not None and computing.num_unplanned > 1:
                self._preempted.add(computing if computing.beams is None else computing.beams.root)
                preempt(computing)
        self._taking_over.clear()

    def candidates(self) -> list[GrowingSequence]:
        """Waiting sequences that could start now, in order; their `num_found` tokens need not be computed.

        Of sequences that would compute the same page only the oldest is a candidate. Prefixes of many thousand pages
        are looked up over several steps.
        """
        num_free_places = self._limits.max_num_sequences - self._running.num_places
        max_candidates = min(num_free_places, _MAX_CANDIDATES)
        sequences: list[GrowingSequence] = []
        next_keys: set[PageKey] = set()  # first pages that the candidates would compute
        if max_candidates <= 0 or not self._waiting.num_ready:
            return sequences
        if not self._memory.has_room(1 + self._running.reserve.min_pages, frozenset()):
            self._lacked_room = True
            return sequences
        if self._counters.is_fair and self._waiting.num_ready > 1:
            self._waiting.promote(max_candidates, self._prefixes.prefix_here)
        self._held_by_others = {}  # valid since no page is released in this method
        turns, again = tee(self._waiting.equipped_in_turn())
        for sequence, older in islice(self._in_turn(turns, again), _MAX_LOOKED_AT):
            if sequence in self._preempted or not self._prefixes.make_keys(sequence):
                continue
            if sequence.awaits_mask and not has_mask(sequence, self._constraints):
                continue
            if not self._prefixes.is_known(sequence):
                if self._num_looked_up > _MOST_FOUND:
                    break
                if not self._look_up(sequence, older):
                    continue
            if sequence.awaited_key is None or sequence.awaited_key not in next_keys:
                num_free_places -= sequence.num_places
                if num_free_places < 0:  # newer sequences must not take the places that it lacks
                    self._lacked_room = True
                    break
                next_keys |= {sequence.awaited_key} if sequence.awaited_key is not None else set()
                sequences.append(sequence)
                if len(sequences) == max_candidates:
                    break
        return sequences

    def start(self, sequences: Iterable[GrowingSequence]) -> Iterator[GrowingSequence]:
        """Starts candidates in order until one finds no room, which later ones must not take. Yields those started."""
        for sequence, older in self._in_turn(sequences, self._waiting.equipped_in_turn()):
            prefix = self._prefixes.find(sequence, older.adapters)
            if prefix is None:
                self._await_page(sequence, self._prefixes.key_to_await(sequence))
            elif self._enter(sequence, prefix, older):
                yield sequence
            else:
                return

    def _lack_room(self, candidates: list[GrowingSequence]) -> bool:
        """Ready sequences wait for places, or the first one for pages, that running sequences hold."""
        if self._running.num_places >= self._limits.max_num_sequences:
            return self._waiting.num_ready > 0
        if not candidates:
            return False
        num_pages = self._prefetcher.num_kv_pages_to_take(candidates[0], self._held_by_others)
        return not self._memory.has_room(
            num_pages + self._running.reserve.num_pages(candidates[0], num_pages), frozenset()
        )

    def _start_loaded(self) -> Iterator[GrowingSequence]:
        """Starts sequences whose adapters were loaded for them, though an older one finds no room. Yields them.

        Otherwise adapters that stay for waiting sequences could fill the pool, and none would start.
        """
        older = OlderSequences(iter(()), has_one_tenant=True)
        loaded_for = self._waiting.loaded_for()
        older.adapters.update([sequence.adapter_digest or "" for sequence in loaded_for])
        for sequence in loaded_for:
            if self._running.num_places + sequence.num_places > self._limits.max_num_sequences:
                return
            if sequence.awaits_page is not None or not self._has_adapter(sequence) or sequence in self._preempted:
                continue
            prefix = self._prefixes.find(sequence, older.adapters)
            if prefix is None:
                self._await_page(sequence, self._prefixes.key_to_await(sequence))
            elif self._enter(sequence, prefix, older):
                yield sequence
            else:
                break
        if not self._running and not self._memory.adapters.num_loading:
            self._waiting.stop_keeping()

    def _first_ready(self) -> list[GrowingSequence]:
        """Up to _MAX_PREEMPTED ready sequences in order; of those with the same prefix one, as only one can start."""
        by_key: dict[PageKey | int, GrowingSequence] = {}
        for sequence in self._waiting.equipped_in_turn(notes_turns=True):
            lacks_mask = sequence.awaits_mask and not has_mask(sequence, self._constraints)
            if sequence.awaits_page is None and not lacks_mask:
                by_key.setdefault(sequence.page_keys[-1] if sequence.page_keys else sequence.sequence_id, sequence)
            if len(by_key) == _MAX_PREEMPTED:
                break
        return [*by_key.values()]

    def _divide_in_time(
        self, num_left: dict[GrowingSequence, int], budget: PromptBudget, throttled_budget: int, credit: float
    ) -> dict[GrowingSequence, int]:
        """As `_divide`, with as many tokens in all as take no longer than `budget` allows."""
        max_tokens: int | None = budget.num_tokens
        while max_tokens is not None:
            granted = self._divide(num_left, max_tokens, throttled_budget, credit)
            if budget.seconds == math.inf:
                break
            chunks = [(s.next_position or s.num_found, number) for s, number in granted.items() if number]
            max_tokens = budget.total_that_fits(chunks)
        return granted

    def _divide(
        self, num_left: dict[GrowingSequence, int], budget: int, throttled_budget: int, credit: float
    ) -> dict[GrowingSequence, int]:
        """How many tokens of each prompt the step computes; tenants that were served less go first.

        `num_left`: tokens left, by prompt. `throttled_budget`: prompt tokens for all throttled tenants together,
        so steps stay short for new arrivals. `credit`: so much of what a tenant has computed of a prompt does not put
        others before it. Prompts that end one after the other release their places and pages sooner than prompts that
        end together.
        """
        by_tenant: dict[TenantCounter, list[GrowingSequence]] = {}
        for sequence in sorted(num_left, key=by_arrival):
            by_tenant.setdefault(sequence.counter, []).append(sequence)
        granted: dict[GrowingSequence, int] = {}

        def order(counter: TenantCounter) -> tuple[bool, float]:
            num_begun = max([sequence.num_to_lose for sequence in by_tenant[counter]])
            return counter.is_background, counter.value - min(prompt_price(num_begun), credit) / counter.weight

        for counter in sorted(by_tenant, key=order) if len(by_tenant) > 1 else by_tenant:
            sequences = by_tenant[counter]
            is_throttled = self._may_throttle and self._latency_mode.throttles(counter)
            max_tokens = min(budget, throttled_budget) if is_throttled else budget
            granted |= zip(sequences, divide_prompt_tokens([num_left[s] for s in sequences], max_tokens), strict=True)
            num_taken = sum([granted[sequence] for sequence in sequences])
            budget -= num_taken
            throttled_budget -= num_taken if is_throttled else 0
        return granted

    def charge_load(self, sequence: GrowingSequence) -> None:
        """The adapter that was loaded for the sequence is used, or was loaded for nothing."""
        price = load_price(sequence.num_adapter_pages, self._limits.block_size)
        if not sequence.is_load_prepaid:
            self._counters.charge(sequence.counter, price)
        sequence.num_load_tokens, sequence.is_load_prepaid = price, False

    def _charge(self, chunk: PlannedChunk) -> None:
        start, num_tokens = chunk.part.start, len(chunk.part.token_ids)
        num_paid = chunk.sequence.take_prepaid(start, start + num_tokens) if chunk.sequence.prepaid else 0
        price = prompt_price(num_tokens - num_paid) + (OUTPUT_TOKEN if chunk.part.sample is not None else 0.0)
        if chunk.part.scores is not None:
            price += SCORED_TOKEN * (len(chunk.part.scores.targets) // INT32_BYTES)
        self._counters.charge(chunk.sequence.counter, price)

    def _in_turn(
        self, sequences: Iterable[GrowingSequence], equipped: Iterator[GrowingSequence]
    ) -> Iterator[tuple[GrowingSequence, OlderSequences]]:
        """Ready sequences, each with the needs of those up to it. Ends where later ones must not start.

        `equipped`: all sequences that have their adapter, in the same order.
        """
        older = OlderSequences(equipped, self._waiting.has_one_tenant)
        adapters = self._memory.adapters
        lacking = self._waiting.oldest_lacking(lambda digest: adapters.state(digest) is AdapterState.ABSENT)
        if lacking is not None and not self._prefetcher.may_load(lacking):
            lacking = None
        for sequence in sequences:
            if sequence.awaits_page is not None or not self._has_adapter(sequence):
                continue
            if lacking is not None and _blocks(lacking, sequence):
                older.reach(lacking)
                num_pages = lacking.num_adapter_pages + len(self._running)
                if not self._memory.has_room(num_pages, older.adapters):
                    self._is_blocked = True
                    return  # there is no room for its adapter yet, and newer sequences must not take it
                lacking = None  # newer sequences that lack their adapter do not block others
            older.reach(sequence)
            yield sequence, older

    def _look_up(self, sequence: GrowingSequence, older: OlderSequences) -> bool:
        """Looks up the sequence's prefix. False: the sequence now awaits a page that is being computed or copied."""
        key = self._prefixes.last_coming(sequence, self._held_by_others)
        if key is None and self._prefixes.find(sequence, older.adapters) is None:
            key = self._prefixes.key_to_await(sequence)
        self._num_looked_up += max(sequence.num_here, self._prefixes.num_kv_found)
        if key is not None:
            self._await_page(sequence, key)
        return key is None

    def _await_page(self, sequence: GrowingSequence, key: PageKey) -> None:
        """Passes the sequence over until this page of its prefix is there."""
        num_pages, computing = 0, self._prefixes.computing(key)
        if computing is not None and self._counters.is_fair and _standing(sequence) < _standing(computing):
            self._taking_over.append(sequence)
        if self._prefixes.is_being_copied(key):  # newer sequences must not evict what is copied for it
            num_pages = self._prefetcher.num_kv_pages_to_take(sequence)
            num_pages += self._limits.num_state_pages  # of which it takes a copy
        self._waiting.await_page(sequence, key, num_pages)

    def _enter(self, sequence: GrowingSequence, prefix: FoundPrefix, older: OlderSequences) -> bool:
        """Starts a waiting sequence, on the pages of its `prefix` and new ones for the rest.

        With a window no more than it ever holds at once; for the rest of its prompt it takes others as it gives these
        back. False, and nothing changed, if the pool has no room for it in addition to what older sequences reserve, or
        if this step has started others on as many pages of prefixes as it may.
        """
        num_held = self._num_held + len(prefix.held_pages)
        if self._num_held and num_held > _MOST_FOUND:
            return False
        num_pages = pages_for(sequence.num_uncomputed, self._limits.block_size) - prefix.num_pages
        max_pages = self._limits.most_pages(sequence.num_uncomputed) - len(prefix.held_pages)
        num_pages = min(num_pages, max(1, max_pages))
        num_state_pages = self._limits.num_state_pages
        num_pages += num_state_pages
        keep = older.adapters | self._waiting.kept_from(sequence)
        num_left_free = older.num_reserved_pages + self._running.reserve.num_pages(sequence, num_pages)
        if not self._memory.has_room(num_pages + num_left_free, keep, prefix.held_pages):
            self._lacked_room = self._is_blocked = True
            return False
        if self._running.by_id and not self._memory.make_room_in_part(num_pages, keep, prefix.held_pages):
            return False  # the rest of the room is made in the next steps, as running sequences wait for this one
        self._memory.prefixes.acquire(prefix.held_pages)  # first, so that they are not evicted for the new ones
        self._memory.make_room(num_pages, keep)
        sequence.counter_at_start = sequence.counter.value
        if self._waiting.remove(sequence):
            self.charge_load(sequence)
        if sequence.began_at is None:
            sequence.began_at = self._clock()
        self._num_held = num_held
        pages = self._memory.allocator.allocate(num_pages) or ()
        self._prefixes.enter(sequence, prefix, pages[num_state_pages:], pages[:num_state_pages])
        sequence.begin_run()
        self._running.add(sequence)
        self._counters.charge(sequence.counter, prompt_price(0, sequence.num_computed))
        digest, num_adapter_pages = sequence.adapter_digest, 0
        if digest is not None:
            self._memory.adapters.acquire(digest)
            num_adapter_pages = len(self._memory.adapters.residence(digest).pages)
        self._times.start(sequence.page_use, sequence.num_held_pages, digest, num_adapter_pages)
        return True

    def _has_adapter(self, sequence: GrowingSequence) -> bool:
        digest = sequence.adapter_digest
        return digest is None or self._memory.adapters.state(digest) is AdapterState.RESIDENT


def has_mask(sequence: GrowingSequence, constraints: Constraints | None) -> bool:
    """Whether the mask of a sequence whose mask was late is made."""
    assert constraints is not None
    sequence.awaits_mask = not constraints.is_ready(sequence.sequence_id)
    return not sequence.awaits_mask


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
        counter = sequence.counter
        if not self._running.by_tenant:
            return
        if counter.num_sequences == 1 and self._running.last_ahead_of(_order(counter), counter.slack) is not None:
            self._since_step, self._newcomer = self._counts.num_steps, counter

    @property
    def is_on(self) -> bool:
        return self._counts.num_steps - self._since_step < _LASTING_STEPS

    def throttles(self, counter: TenantCounter) -> bool:
        """The tenant is clearly ahead of the newcomer: its prompts must not make steps long."""
        newcomer = self._newcomer
        return newcomer is not None and self.is_on and should_preempt(_order(counter), _order(newcomer), newcomer.slack)


class OlderSequences:
    """What older waiting sequences need and newer ones must not take, accumulated along the queue."""

    def __init__(self, equipped: Iterator[GrowingSequence], has_one_tenant: bool) -> None:
        """`equipped`: waiting sequences with their adapter, in fair order. `has_one_tenant`: all are of one."""
        self.adapters: set[str] = set()  # their adapters, which are in the pool
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

    def reach_running(self, sequence: GrowingSequence, rank: Callable[[GrowingSequence], Rank]) -> None:
        """Counts those that rank before this running sequence."""
        running_rank = rank(sequence)
        while self._next is not None and rank(self._next) < running_rank:
            self._take(self._next)

    def _take(self, sequence: GrowingSequence) -> GrowingSequence | None:
        """Counts the sequence; returns the next one."""
        if sequence.adapter_digest is not None:
            self.adapters.add(sequence.adapter_digest)
        self.num_reserved_pages += sequence.num_reserved_pages
        self._next = following = next(self._sequences, None)
        return following


def _comes_before(sequence: GrowingSequence, other: GrowingSequence) -> bool:
    """Whether a waiting sequence goes before another one, whose turn is known."""
    if sequence.counter is other.counter:
        return sequence.arrival < other.arrival
    return max(sequence.turn, (sequence.counter.is_background, sequence.counter.value, sequence.arrival)) < other.turn


def _blocks(lacking: GrowingSequence, sequence: GrowingSequence) -> bool:
    """Whether a sequence that has its adapter waits for one without.

    Not if their tenants are about equal: a load then serves several sequences in turn. A tenant passes another one by
    no more than the other's slack.
    """
    if lacking.counter is sequence.counter or lacking.counter.is_background != sequence.counter.is_background:
        return _comes_before(lacking, sequence)
    return max(lacking.turn[1], lacking.counter.value) + lacking.counter.slack < sequence.turn[1]


def _standing(sequence: GrowingSequence) -> tuple[bool, int]:
    """Its order among its tenant's sequences, apart from age."""
    return sequence.request.is_background, -sequence.request.priority


def _order(counter: TenantCounter) -> Rank:
    return counter.is_background, counter.value, 0
