"""The leader's scheduler: which sequences compute which tokens in the next step, on which pages.

There is no prefill phase and no decode phase (vLLM v1's idea): a plan gives each sequence a number of tokens to compute
within a token budget, decodes first, then prompt chunks, first come first served.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import takewhile

import msgspec

from ..memory.adapter_cache import AdapterState
from ..memory.paged_memory import PagedMemory
from ..plan import AdapterLoad, HostAdapterStats, SampledToken, StepPlan, StepResult
from ..wire.engine_load import EngineCounters, EngineGauges, EngineLoad
from ..wire.messages import AdapterRef, ResidencyChange, SequenceError, SequenceRequest, SequenceUpdate
from ..wire.page_keys import PageKey
from .measured_costs import MeasuredCosts
from .planned_tokens import PlannedTokens
from .preemption import choose_victim
from .prefetch_policy import MAX_LOADS_UNDER_WAY
from .prefetcher import Prefetcher
from .prefix_reuse import PrefixReuse
from .request_limits import GangLimits, pages_for, refusal
from .sequence import Sequence
from .stopping import finish_reason, is_long_enough, is_stop
from .tier_traffic import TierSizes, TierTraffic
from .waiting_queue import WaitingQueue

_HEAD_START = 1 << 62  # a sequence that another gang began is older than all that began here


class Scheduler:
    """Owns all sequences and pages of a gang. Makes plans, and commits their results."""

    def __init__(
        self,
        limits: GangLimits,
        eos_token_ids: frozenset[int],
        pages_of_adapter: Callable[[AdapterRef], int],
        prefix_cache: bool = True,
        tiers: TierSizes | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`prefix_cache`: sequences of a tenant that begin alike share their pages. `tiers` keep more of these.

        `clock`: seconds, only to tell for how long a sequence's first token was computed; nothing is decided by it.
        """
        self._limits, self._eos_token_ids, self._pages_of_adapter = limits, eos_token_ids, pages_of_adapter
        self._clock = clock
        self._costs = MeasuredCosts(limits.block_size)
        self._memory = PagedMemory(limits.num_pages, lambda: self._costs.costs("host").copy_s, self._prefix_page_s)
        self._adapters = self._memory.adapters
        self._tiers = TierTraffic(self._memory, tiers or TierSizes(), self._costs)
        self._prefixes = PrefixReuse(self._memory.prefixes, self._tiers, limits.block_size, prefix_cache)
        self._prefetcher = Prefetcher(self._memory, self._prefixes, pages_of_adapter, limits.block_size)
        self._waiting = WaitingQueue()
        self._running: dict[int, Sequence] = {}
        self._uncommitted: dict[int, dict[int, PlannedTokens]] = {}  # of each plan: by step, then by sequence id
        self._host_adapter_stats = HostAdapterStats()
        self._step = self._arrivals = self._num_computed = self._num_generated = self._num_preemptions = 0

    def add(self, request: SequenceRequest, seed: int) -> SequenceError | None:
        """Queues a sequence, or returns why it can never be served."""
        error = refusal(request, self._num_adapter_pages(request.adapter), self._limits)
        if error is None:
            self._arrivals += 1
            arrival = self._arrivals - (_HEAD_START if request.generated_token_ids else 0)
            token_ids = [*request.prompt_token_ids, *request.generated_token_ids]
            self._waiting.add(Sequence(request, arrival, seed, token_ids))
        return error

    def cancel(self, sequence_id: int) -> None:
        """Forgets a sequence and frees its pages. Unknown ids are ignored."""
        if (sequence := self._running.get(sequence_id)) is not None:
            self._leave(sequence)
        else:
            self.forget_waiting(sequence_id)

    def forget_waiting(self, sequence_id: int) -> bool:
        """Forgets a sequence that waits. False, and nothing changed, if it runs or is unknown."""
        if (sequence := self._waiting.get(sequence_id)) is None:
            return False
        self._waiting.remove(sequence)
        return True

    def has_work(self) -> bool:
        return bool(self._running or self._waiting or self._adapters.num_loading or self._tiers.has_work())

    def schedule(self) -> StepPlan:
        """The next step's plan. Takes the pages that the plan needs; preempts and evicts where they run out."""
        self._step += 1
        digests = (sequence.adapter_digest for sequence in self._next_batch())
        self._memory.want_soon(dict.fromkeys(digest for digest in digests if digest is not None))
        num_preemptions = self._num_preemptions
        budget = self._limits.max_tokens_per_step
        planned: dict[int, int] = {}  # tokens to compute, by sequence id
        for sequence in sorted(self._running.values(), key=lambda s: (s.num_unplanned > 1, s.arrival)):
            num_tokens = min(sequence.num_unplanned, budget - sum(planned.values()))
            if sequence.sequence_id not in self._running or num_tokens <= 0 or self._ends_soon(sequence):
                continue  # it was preempted just now, or no budget is left, or it ends with the token that is coming
            if self._grow(sequence, sequence.num_computed + sequence.num_planned + num_tokens, planned):
                planned[sequence.sequence_id] = num_tokens
        loads: tuple[AdapterLoad, ...] = ()
        if self._num_preemptions == num_preemptions:  # a preempted sequence must not get back the pages that it freed
            loads = tuple(self._prefetcher.begin(self._next_batch(), len(self._running)))
            self._admit(budget - sum(planned.values()), planned)
        tokens = {i: PlannedTokens(self._running[i], num_tokens) for i, num_tokens in planned.items()}
        self._uncommitted[self._step] = tokens
        sequences = tuple(each.sequence_plan() for each in tokens.values())
        used = dict.fromkeys(sequence.adapter for sequence in sequences if sequence.adapter is not None)
        residences = tuple(self._adapters.residence(digest) for digest in used)
        moves, copies = self._tiers.plan_moves(), self._prefixes.take_copies()
        penalised = tuple(i for i, sequence in self._running.items() if sequence.has_penalty)
        return StepPlan(self._step, sequences, residences, loads, moves, copies, penalised)

    def settle(self, plan: StepPlan, result: StepResult) -> StepPlan:
        """Completes a plan that was made while the plan before it ran. `result`: of that one; it is committed later.

        The tokens that the result brings are filled in. Sequences that end with these tokens, or that were forgotten,
        drop out of the plan.
        """
        tokens = self._uncommitted[plan.step]
        ended = {i for i, each in tokens.items() if each.is_stale or self._ends(each, result.tokens.get(i))}
        sequences = tuple(
            tokens[part.sequence_id].settled(part, result.tokens.get(part.sequence_id))
            for part in plan.sequences
            if part.sequence_id not in ended
        )
        return msgspec.structs.replace(plan, sequences=sequences)

    def drop(self, plan: StepPlan) -> None:
        """Forgets a plan that is not executed, since nothing is left in it."""
        assert not (plan.sequences or plan.loads or plan.moves)
        del self._uncommitted[plan.step]

    def commit(self, plan: StepPlan, result: StepResult) -> list[SequenceUpdate]:
        """Takes in a step's tokens and the copies that have ended. Returns what each sequence's owner should hear."""
        updates: list[SequenceUpdate] = []
        self._prefixes.stop_awaiting(self._tiers.finish(result.moved))
        self._prefixes.end_copies(plan.copies)
        self._host_adapter_stats = result.host_adapter_stats
        for digest in result.loaded:
            self._adapters.finish_load(digest)
        for failure in result.failed:
            self._adapters.fail_load(failure.digest)
            updates.extend(self._fail_waiting(failure.digest, failure.message))
        tokens = self._uncommitted.pop(plan.step)
        for part in plan.sequences:
            self._num_computed += len(part.token_ids)
            planned = tokens[part.sequence_id]
            if planned.is_stale:
                continue
            planned.commit()
            self._prefixes.keep_filled(planned.sequence)
            if part.sample is not None:
                updates.append(self._append(planned.sequence, result.tokens[part.sequence_id]))
        return updates

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Learns what computing costs from how long a plan took to execute."""
        self._costs.observe_step(len(plan.sequences), sum(len(s.token_ids) for s in plan.sequences), seconds)

    def load(self) -> EngineLoad:
        """Counts of this moment and since the start."""
        gauges = EngineGauges(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_waiting_for_adapters=sum(not self._has_adapter(sequence) for sequence in self._waiting),
            num_queued_tokens=sum(s.num_uncomputed for s in self._running.values())
            + sum(s.num_uncomputed - s.num_found for s in self._waiting),
            num_pages=self._limits.num_pages,
            num_free_pages=self._memory.allocator.num_free,
            num_adapter_pages=self._adapters.num_pages,
            num_idle_adapter_pages=self._adapters.num_idle_pages,
            num_prefix_pages=self._memory.prefixes.num_pages,
            num_idle_prefix_pages=self._memory.num_idle_prefix_pages,
            num_host_pages=self._tiers.num_held("host"),
            num_disk_pages=self._tiers.num_held("disk"),
            host_adapter_bytes=self._host_adapter_stats.num_bytes,
            num_resident_adapters=self._adapters.num_resident,
            num_coming_adapters=self._adapters.num_loading,
        )
        counters = EngineCounters(
            num_steps=self._step,
            num_computed_tokens=self._num_computed,
            num_generated_tokens=self._num_generated,
            num_preemptions=self._num_preemptions,
            num_adapter_loads=self._adapters.num_loads,
            num_adapter_evictions=self._adapters.num_evictions,
            num_cached_tokens=self._prefixes.num_cached_tokens,
            num_prefix_evictions=self._memory.prefixes.num_evictions,
            num_pages_out=self._tiers.num_pages_out,
            num_pages_in=self._tiers.num_pages_in,
            num_move_failures=self._tiers.num_failures,
            num_adapter_reads=self._host_adapter_stats.num_reads,
            num_loaded_pages=self._adapters.num_loaded_pages,
        )
        return EngineLoad(gauges, counters)

    def take_residency_changes(self) -> ResidencyChange:
        """Adapters and full pages that came into the pool, or began to, and those that went since the last call."""
        return self._memory.take_residency_changes()

    def check_integrity(self) -> None:
        """Raises AssertionError if a page leaked, or its holders or an adapter's users are miscounted."""
        held = [*(s.pages for s in self._running.values()), *self._tiers.holders(), *self._prefixes.holders()]
        self._memory.check_integrity(held)
        self._tiers.check_integrity()
        self._waiting.check_integrity()
        self._prefixes.check_integrity([*self._running.values()])
        assert all(not s.pages and s.num_computed == 0 for s in self._waiting), "a waiting sequence holds pages"
        users: dict[str, int] = {}
        for sequence in self._running.values():
            num_tokens = sequence.num_computed + sequence.num_planned
            assert len(sequence.pages) >= pages_for(num_tokens, self._limits.block_size)
            if sequence.adapter_digest is not None:
                users[sequence.adapter_digest] = users.get(sequence.adapter_digest, 0) + 1
        assert users == self._adapters.users(), "an adapter's running sequences are miscounted"

    def _grow(self, sequence: Sequence, num_tokens: int, planned: dict[int, int]) -> bool:
        """Gets a running sequence the pages for so many tokens, if need be by preempting newer sequences.

        `planned`: tokens that the plan has for each sequence so far. False, if there are no pages for it now.
        """
        short = pages_for(num_tokens, self._limits.block_size) - len(sequence.pages)
        if short <= 0:
            return True
        older = takewhile(lambda waiting: waiting.arrival < sequence.arrival, self._waiting)
        wanted = {waiting.adapter_digest for waiting in older if waiting.adapter_digest}
        while not self._memory.make_room(short, wanted):
            victim = choose_victim(self._running.values(), sequence)
            if victim is not None:
                self._preempt(victim)
                planned.pop(victim.sequence_id, None)
            elif self._memory.make_room(short, keep=frozenset()):
                break  # an older sequence's adapter went; else the two sequences would wait for each other
            else:
                return False
        sequence.pages.extend(self._memory.allocator.allocate(short) or ())
        return True

    def _preempt(self, victim: Sequence) -> None:
        """Puts a running sequence back into the queue. Later it is computed again, as far as its pages are gone."""
        self._leave(victim)
        self._num_preemptions += 1
        self._waiting.add(victim)

    def _next_batch(self) -> list[Sequence]:
        """Waiting sequences that could run next, oldest first. Their adapters and pages of KV come while they wait."""
        return self._waiting.first(self._limits.max_num_sequences)

    def _admit(self, budget: int, planned: dict[int, int]) -> None:
        """Starts waiting sequences, oldest first. A sequence whose adapter or prefix is still coming is passed over."""
        wanted: set[str] = set()  # adapters of older waiting sequences: not to be evicted for a newer sequence
        reserved = 0  # pages that older waiting sequences will take once their prefixes have come
        may_load = self._adapters.num_loading < MAX_LOADS_UNDER_WAY
        for sequence in tuple(self._waiting):
            if budget <= 0 or len(self._running) >= self._limits.max_num_sequences:
                return
            if sequence.adapter_digest is not None:
                wanted.add(sequence.adapter_digest)
            if may_load and self._prefetcher.is_absent(sequence):
                num_pages = self._num_adapter_pages(sequence.request.adapter) + len(self._running)
                if not self._memory.has_room(num_pages, wanted):
                    return  # its adapter lacks room, which newer sequences must not take
                may_load = False  # this sequence comes first: newer ones that lack an adapter hold nobody up
            found = self._prefixes.find(sequence, wanted) if self._has_adapter(sequence) else None
            if found is None:
                if self._prefixes.is_being_copied(sequence):  # newer sequences must not push out what comes for it
                    reserved += self._prefetcher.num_kv_pages_to_take(sequence)
                continue
            if not self._enter(sequence, found, wanted, reserved):
                return
            planned[sequence.sequence_id] = min(sequence.num_unplanned, budget)
            budget -= planned[sequence.sequence_id]

    def _enter(self, sequence: Sequence, found: list[int], wanted: set[str], reserved: int) -> bool:
        """Starts a waiting sequence, on the pages `found` of its prefix and new ones for the rest.

        False, and nothing changed, unless `reserved` more pages could be taken beside those.
        """
        num_pages = pages_for(sequence.num_uncomputed, self._limits.block_size) - len(found)
        if not self._memory.has_room(num_pages + reserved, wanted, found):
            return False
        self._memory.prefixes.acquire(found)  # first, so that they are not evicted for the new ones
        self._memory.make_room(num_pages, wanted)
        self._waiting.remove(sequence)
        self._running[sequence.sequence_id] = sequence
        if sequence.began_at is None:
            sequence.began_at = self._clock()
        self._prefixes.enter(sequence, found, self._memory.allocator.allocate(num_pages) or ())
        if sequence.adapter_digest is not None:
            self._adapters.acquire(sequence.adapter_digest)
        return True

    def _leave(self, sequence: Sequence) -> None:
        """Ends the run of a sequence: releases its pages and its adapter."""
        del self._running[sequence.sequence_id]
        sequence.run += 1
        sequence.num_planned = sequence.num_coming = 0
        self._prefixes.leave(sequence)
        if sequence.adapter_digest is not None:
            self._adapters.release(sequence.adapter_digest)

    def _ends_soon(self, sequence: Sequence) -> bool:
        """The sequence ends with the tokens that are coming, whatever they are."""
        num_adapter_pages = self._num_adapter_pages(sequence.request.adapter)
        num_coming = sequence.num_coming
        return num_coming > 0 and is_long_enough(sequence, num_coming, num_adapter_pages, self._limits)

    def _ends(self, planned: PlannedTokens, token: SampledToken | None) -> bool:
        """The sequence ends with this token, which its plan lacks."""
        if not planned.lacks_token:
            return False
        return token is None or is_stop(token.token_id, planned.sequence, self._eos_token_ids)

    def _append(self, sequence: Sequence, token: SampledToken | None) -> SequenceUpdate:
        """Adds a token that was chosen. None: its logits were not finite, and the sequence ends with an error."""
        if token is None:
            self._prefixes.disown(sequence)
            self._leave(sequence)
            return SequenceUpdate(sequence.sequence_id, error=_not_finite(sequence))
        sequence.token_ids.append(token.token_id)
        self._num_generated += 1
        num_adapter_pages = self._num_adapter_pages(sequence.request.adapter)
        reason = finish_reason(sequence, self._eos_token_ids, num_adapter_pages, self._limits)
        if reason is not None:
            self._leave(sequence)
        logprobs = None if token.logprobs is None else [token.logprobs]
        update = SequenceUpdate(sequence.sequence_id, [token.token_id], logprobs, reason)
        if sequence.num_generated > len(sequence.request.generated_token_ids) + 1:
            return update
        assert sequence.began_at is not None
        return msgspec.structs.replace(
            update, num_cached_tokens=sequence.num_cached_tokens, computing_s=self._clock() - sequence.began_at
        )

    def _fail_waiting(self, digest: str, message: str) -> Iterator[SequenceUpdate]:
        for sequence in [waiting for waiting in self._waiting if waiting.adapter_digest == digest]:
            self._waiting.remove(sequence)
            yield SequenceUpdate(sequence.sequence_id, error=SequenceError("adapter_failed", message))

    def _prefix_page_s(self, key: PageKey) -> float:
        costs = self._costs.costs("host")
        return min(costs.copy_s, costs.compute_s) if self._tiers.holds(key) else costs.compute_s

    def _has_adapter(self, sequence: Sequence) -> bool:
        digest = sequence.adapter_digest
        return digest is None or self._adapters.state(digest) is AdapterState.RESIDENT

    def _num_adapter_pages(self, ref: AdapterRef | None) -> int:
        return 0 if ref is None else self._pages_of_adapter(ref)


def _not_finite(sequence: Sequence) -> SequenceError:
    if sequence.adapter_digest is None:
        return SequenceError("internal", "the model gave no finite number for the next token")
    message = f"adapter {sequence.adapter_digest} gave no finite number for the next token: its weights are too large"
    return SequenceError("adapter_failed", message)
