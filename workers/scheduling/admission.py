"""Which prompts a step computes: of sequences that run, and of those that start."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice, tee
from operator import attrgetter

from ..fairness.page_times import PageTimes
from ..fairness.preemption import gives_place
from ..fairness.prices import OUTPUT_TOKEN, prompt_price
from ..fairness.prompt_budget import share_prompt_tokens
from ..fairness.standing import Standing
from ..fairness.standings import Standings
from ..memory.adapter_cache import AdapterState
from ..memory.paged_memory import PagedMemory
from ..wire.messages import AdapterRef
from ..wire.page_keys import PageKey
from .gang_load import StepCounts
from .planned_step import PlannedChunk, plan_chunk
from .prefetch_policy import MAX_LOADS_UNDER_WAY
from .prefetcher import Prefetcher
from .prefix_reuse import Hands, PrefixReuse
from .request_limits import GangLimits, pages_for
from .running_sequences import RunningSequences
from .sequence import Sequence
from .waiting_queue import WaitingQueue

_MAX_LOOKED_AT = 1024  # sequences that await nothing, in the search for candidates
_MAX_GIVING_WAY = 8  # sequences that are preempted in one step for those who wait
_MAX_CANDIDATES = 64  # sequences that are looked at for one step's places; there is another look if all have started

_LASTING_STEPS = 256  # so long a tenant who came, and who uses little, may come again

_BESIDE = 0.25  # of a step's tokens, for prompts of those who are clearly ahead of who comes: its steps are short

_arrival = attrgetter("arrival")


class Admission:
    """Lets waiting sequences start, in fair order. One whose adapter or prefix is still coming is passed over."""

    def __init__(
        self,
        memory: PagedMemory,
        prefixes: PrefixReuse,
        prefetcher: Prefetcher,
        waiting: WaitingQueue,
        running: RunningSequences,
        limits: GangLimits,
        standings: Standings,
        pressure: Pressure,
        pages_of_adapter: Callable[[AdapterRef], int],
        times: PageTimes,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._standings, self._pressure, self._times = standings, pressure, times
        self._gave_way: set[Sequence] = set()  # in this step, so they do not start in it
        self._lacked_room = False  # somebody, when others were last let in
        self._memory, self._prefixes, self._prefetcher = memory, prefixes, prefetcher
        self._waiting, self._running, self._limits = waiting, running, limits
        self._pages_of_adapter, self._clock = pages_of_adapter, clock

    def plan_prompts(self, budget: int, may_admit: bool) -> list[PlannedChunk]:
        """Plans chunks of prompts that run, and of waiting sequences, which start now if they may.

        `budget`: tokens in all.
        """
        beside = budget
        if self._pressure.is_on:
            beside = max(1, int(_BESIDE * self._limits.max_tokens_per_step))  # who is held goes on, too
        num_tokens: dict[Sequence, int] = {}
        prompts, started, is_first = self._running.prompts[:], list[Sequence](), True
        while budget > 0 and (started or is_first):
            candidates = self.candidates() if may_admit else []
            left = {s: s.num_unplanned for s in prompts} | {s: s.num_uncomputed - s.num_found for s in candidates}
            shares = self._shares(left, budget, beside)
            started = list(self.start(s for s in candidates if shares[s]))
            for sequence in (*prompts, *started):
                num_tokens[sequence] = min(sequence.num_unplanned, shares[sequence])
                budget -= num_tokens[sequence]
                beside -= num_tokens[sequence] if self._pressure.is_held(sequence.standing) else 0
            prompts, is_first = [], False
        for sequence in self._running.prompts:  # what others left over, because their prefixes are there or are coming
            is_held = self._pressure.is_held(sequence.standing)
            # Who starts pays for what is cached, and may be held only since then: `beside` is below 0 then.
            most = max(0, min(budget, beside)) if is_held else budget
            more = min(sequence.num_unplanned - num_tokens.get(sequence, 0), most)
            num_tokens[sequence] = num_tokens.get(sequence, 0) + more
            budget, beside = budget - more, beside - (more if is_held else 0)
        chunks = [plan_chunk(sequence, number) for sequence, number in num_tokens.items() if number]
        for chunk in chunks:
            self._charge(chunk)
        self._running.end_prompts()
        self._gave_way.clear()
        return chunks

    def make_way(self, preempt: Callable[[Sequence], None]) -> int:
        """Preempts running sequences for those who wait and are clearly behind, and find no place; how many.

        At most a few in a step. They do not start again in the same step.
        """
        running, waiting, standings = self._running, self._waiting, self._running.by_standing
        if waiting.is_of(standings) or not waiting.num_ready:
            return 0
        if len(running) < self._limits.max_num_sequences and not self._lacked_room:
            return 0
        self._lacked_room = False
        num_places, num_pages = self._limits.max_num_sequences - len(running), 0
        for sequence in self._first_ready():
            num_places, num_pages = num_places - 1, num_pages + self._prefetcher.num_kv_pages_to_take(sequence)
            keep = {sequence.adapter_digest} if sequence.adapter_digest is not None else set()
            while num_places < 0 or not self._memory.has_room(num_pages, keep):
                last = running.last
                if last is None or len(self._gave_way) == _MAX_GIVING_WAY or not gives_place(last, sequence.turn_rank):
                    return len(self._gave_way)
                self._gave_way.add(last)
                preempt(last)
                num_places += 1
        return len(self._gave_way)

    def candidates(self) -> list[Sequence]:
        """Waiting sequences that could start now, in their order: `num_found` says what of them need not be computed.

        Of sequences that would compute the same page only the oldest is one. At most as many as there are places.
        """
        most = min(self._limits.max_num_sequences - len(self._running), _MAX_CANDIDATES)
        found: list[Sequence] = []
        next_keys: set[PageKey] = set()  # of pages that these would compute
        if most <= 0 or not self._waiting.num_ready:
            return found
        hands: Hands = {}  # no page is released meanwhile
        turns, again = tee(self._waiting.equipped_in_turn())
        for sequence, older in islice(self._in_turn(turns, again), _MAX_LOOKED_AT):
            if sequence in self._gave_way:
                continue
            if not self._prefixes.is_known(sequence) and not self._look_up(sequence, older, hands):
                continue
            if sequence.awaited_key is None or sequence.awaited_key not in next_keys:
                next_keys |= {sequence.awaited_key} if sequence.awaited_key is not None else set()
                found.append(sequence)
                if len(found) == most:
                    break
        return found

    def start(self, sequences: Iterable[Sequence]) -> Iterator[Sequence]:
        """Starts candidates in turn, until one finds no room, which later ones must not take. Yields who runs."""
        for sequence, older in self._in_turn(sequences, self._waiting.equipped_in_turn()):
            found = self._prefixes.find(sequence, older.wanted)
            if found is None:
                self._let_wait(sequence, self._prefixes.key_to_await(sequence))
            elif self._enter(sequence, found, older):
                yield sequence
            else:
                self._lacked_room = True
                return

    def _first_ready(self) -> list[Sequence]:
        """Some that await nothing, the next one first. Of those that begin alike only one starts in a step."""
        found: dict[PageKey | int, Sequence] = {}
        for sequence in self._waiting.equipped_in_turn(notes_turns=True):
            if sequence.awaits_page is None:
                found.setdefault(sequence.page_keys[-1] if sequence.page_keys else sequence.sequence_id, sequence)
            if len(found) == _MAX_GIVING_WAY:
                break
        return [*found.values()]

    def _shares(self, left: dict[Sequence, int], budget: int, beside: int) -> dict[Sequence, int]:
        """How many tokens of each prompt the step computes: whoever was served less goes before all others.

        `beside`: the most for all together who are held, that steps be short for who comes.
        """
        by_standing: dict[Standing, list[Sequence]] = {}
        for sequence in sorted(left, key=_arrival):
            by_standing.setdefault(sequence.standing, []).append(sequence)
        shares: dict[Sequence, int] = {}
        for standing in sorted(by_standing, key=_place):
            asking = by_standing[standing]
            is_held = self._pressure.is_held(standing)
            most = min(budget, beside) if is_held else budget
            shares |= zip(asking, share_prompt_tokens([left[s] for s in asking], most), strict=True)
            num_taken = sum([shares[sequence] for sequence in asking])
            budget, beside = budget - num_taken, beside - (num_taken if is_held else 0)
        return shares

    def _charge(self, chunk: PlannedChunk) -> None:
        sequence, end = chunk.sequence, chunk.part.start + len(chunk.part.token_ids)
        num_new = end - max(chunk.part.start, sequence.num_charged)
        price = prompt_price(max(num_new, 0)) + (OUTPUT_TOKEN if chunk.part.sample is not None else 0.0)
        self._standings.charge(sequence.standing, price)
        sequence.num_charged = max(sequence.num_charged, end)

    def _in_turn(
        self, sequences: Iterable[Sequence], equipped: Iterator[Sequence]
    ) -> Iterator[tuple[Sequence, OlderSequences]]:
        """Sequences that await nothing, with what those up to them want. Ends where later ones must not go on.

        `equipped`: all of those that these are some of, in the same order.
        """
        older = OlderSequences(equipped, self._waiting.is_of_one)
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
                    return  # its adapter lacks room, which newer sequences must not take
                lacking = None  # it comes first: newer ones that lack an adapter hold nobody up
            older.reach(sequence)
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
        sequence.count_cached()
        self._running.add(sequence)
        num_cached = sequence.num_computed - sequence.num_charged
        if num_cached > 0:
            self._standings.charge(sequence.standing, prompt_price(0, num_cached))
            sequence.num_charged = sequence.num_computed
        digest, num_adapter_pages = sequence.adapter_digest, 0
        if digest is not None:
            self._memory.adapters.acquire(digest)
            num_adapter_pages = len(self._memory.adapters.residence(digest).pages)
        self._times.start(sequence.held, len(sequence.pages), digest, num_adapter_pages)
        return True

    def _has_adapter(self, sequence: Sequence) -> bool:
        digest = sequence.adapter_digest
        return digest is None or self._memory.adapters.state(digest) is AdapterState.RESIDENT


class Pressure:
    """Whether it matters how late a plan is made, and how long a step takes: somebody came lately who had nothing here
    and is clearly behind.
    """

    def __init__(self, counts: StepCounts, running: RunningSequences) -> None:
        self._counts, self._running = counts, running
        self._step = -_LASTING_STEPS  # the one before which such a tenant came last
        self._standing: Standing | None = None  # that tenant's

    def observe(self, sequence: Sequence) -> None:
        """It comes, and has joined its tenant's standing."""
        last = self._running.last if sequence.standing.num_sequences == 1 else None
        if last is not None and gives_place(last, sequence.rank):
            self._step, self._standing = self._counts.num_steps, sequence.standing

    @property
    def is_on(self) -> bool:
        return self._counts.num_steps - self._step < _LASTING_STEPS

    def is_held(self, standing: Standing) -> bool:
        """It is clearly ahead of who came, so no step is to be long for its prompts."""
        came = self._standing
        return (
            came is not None
            and self.is_on
            and (standing.is_background, standing.band) > (came.is_background, came.band)
        )


class OlderSequences:
    """What waiting sequences want that later ones must not take, as one looks at later and later ones."""

    def __init__(self, equipped: Iterator[Sequence], is_of_one: bool) -> None:
        """`equipped`: the waiting ones whose adapter is there, in fair order; `is_of_one`: all of one tenant."""
        self.wanted: set[str] = set()  # adapters of theirs, as far as these are in the pool
        self.num_reserved_pages = 0  # pages that they will take once their prefixes have come
        self._sequences, self._is_of_one = equipped, is_of_one
        self._next = next(self._sequences, None)

    def reach(self, sequence: Sequence) -> None:
        """From now on counts all up to this one, which waits too."""
        following, is_of_one = self._next, self._is_of_one
        while following is not None and (
            following.arrival <= sequence.arrival if is_of_one else not _comes_before(sequence, following)
        ):
            following = self._take(following)

    def reach_running(self, sequence: Sequence) -> None:
        """From now on counts those at the front that come before this one, which runs."""
        rank = sequence.rank
        while self._next is not None and self._next.rank < rank:
            self._take(self._next)

    def _take(self, sequence: Sequence) -> Sequence | None:
        """Counts the sequence; the one that follows."""
        if sequence.adapter_digest is not None:
            self.wanted.add(sequence.adapter_digest)
        self.num_reserved_pages += sequence.num_reserved_pages
        self._next = following = next(self._sequences, None)
        return following


def _comes_before(one: Sequence, other: Sequence) -> bool:
    """Whether a waiting sequence comes before another one, whose turn is known."""
    if one.standing is other.standing:
        return one.arrival < other.arrival
    return max(one.turn, (one.standing.is_background, one.standing.counter, one.arrival)) < other.turn


def _place(standing: Standing) -> tuple[bool, float]:
    return standing.is_background, standing.counter
