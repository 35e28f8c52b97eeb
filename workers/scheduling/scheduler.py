"""The leader's scheduler: which sequences compute which tokens in the next step, on which pages.

There is no prefill phase and no decode phase (vLLM v1's idea): a plan gives each sequence a number of tokens to compute
within a token budget, decodes first, then prompt chunks (`prompt_budget.py`).

A step costs time linear in the sequences that run, start or end, however many wait: lists are kept in order, sums are
updated as they change, and waiting sequences are woken by events.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator

import msgspec

from ..decoding.constraints import Constraints
from ..fairness.page_times import PageTimes
from ..fairness.prompt_budget import PromptBudget, PromptBursts, prompt_seconds
from ..fairness.tenant_counters import Scheduling, TenantCounters
from ..memory.paged_memory import AdapterState, PagedMemory
from ..plan import AdapterFailure, AdapterLoad, HostAdapterStats, PoolPlan, SampledToken, StepPlan, StepResult
from ..window_pages import GangLimits, pages_for
from ..wire.engine_load import EngineLoad, TenantShare
from ..wire.messages import AdapterRef, ResidencyChange, SequenceError, SequenceRequest, SequenceUpdate, SequenceUsage
from ..wire.page_keys import KeyChain, PageKey
from .beam_searches import BeamGroup, BeamSearches
from .decodes import DecodePlanner
from .gang_load import StepCounts, gang_load, tenant_share
from .growing_sequence import (
    ARRIVAL_STEP,
    GrowingSequence,
    finish_reason,
    max_length,
    not_finite,
    refusal,
    stop_ids,
)
from .measured_costs import MeasuredCosts, MeasuredStepCosts
from .page_reserve import PageReserve
from .prefetcher import Prefetcher
from .prefix_reuse import PrefixReuse
from .prompt_planner import LatencyMode, PromptPlanner
from .running_sequences import PlannedChunk, PlannedStep, RunningSequences
from .tier_traffic import TierSizes, TierTraffic
from .waiting_queue import WaitingQueue

_MAX_LOOK_AHEAD = 256  # waiting sequences whose adapters and pages may be loaded while they wait
_MAX_PROTECTED = 64  # waiting sequences whose prefixes are evicted last
_MAX_WANTED_PAGES = 4096  # of these prefixes
_HEAD_START = 1 << 62  # makes a sequence that another gang began older than all that began here
_PRIORITY = 1 << 63  # of one step of priority, which outweighs even that
_NO_TOKEN = SampledToken(0, None)  # in place of a token where none is chosen
USAGE_REPORT_PAGES = 8  # report usage to the router every 8 filled pages


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
        token_interval_s: float = 0.0,
        scheduling: Scheduling = "fair",
        constraints: Constraints | None = None,
    ) -> None:
        """`prefix_cache`: sequences of a tenant share the pages of common prefixes. `tiers` behind the pool keep more.

        `clock`: seconds, only for reported times; no decision depends on it. `token_interval_s`: target time of steps
        with decodes; 0: none. `scheduling`: "fifo" ignores tenants. `constraints`: of sequences with grammars;
        None: these are refused.
        """
        self._limits, self._eos_token_ids, self._pages_of_adapter = limits, eos_token_ids, pages_of_adapter
        self._clock, self.token_interval_s = clock, token_interval_s
        self._costs, self._step_costs = MeasuredCosts(limits.block_size), MeasuredStepCosts()
        self._times = PageTimes(clock)
        self._bursts = PromptBursts()
        self._waiting = WaitingQueue(self._bursts)
        self._ahead: list[GrowingSequence] = []  # waiting sequences that will run next, as of the beginning of the step
        self._running = RunningSequences(
            PageReserve(limits.num_pages, limits.block_size, limits.window, limits.full_layers), self._bursts
        )
        self.memory = PagedMemory(
            limits.num_pages,
            lambda: self._costs.costs("host").copy_s,
            self._prefix_page_s,
            adapter_evicted=self._waiting.adapter_evicted,
            wanted_pages=lambda: self._prefixes.pages_here(self._ahead, _MAX_WANTED_PAGES),
            has_window=limits.window is not None,
        )
        self._adapters = self.memory.adapters
        sizes = tiers if tiers and prefix_cache else TierSizes()
        self._tiers = TierTraffic(self.memory, sizes, self._costs, limits.num_state_pages)
        self._prefixes = PrefixReuse(self.memory.prefixes, self._tiers, self._waiting, limits, prefix_cache)
        self._counts, self._arrivals = StepCounts(), 0
        self.latency_mode = LatencyMode(self._counts, self._running)
        self.counters = TenantCounters(limits.max_tokens_per_step, scheduling)
        self._constraints = constraints
        self.num_constrained = 0  # sequences with grammars
        self._compiling: dict[int, GrowingSequence] = {}  # sequences whose grammars are being compiled
        self._prefetcher = Prefetcher(self.memory, self._prefixes, self._tiers, limits, self._waiting)
        self._admission = PromptPlanner(
            self.memory,
            self._prefixes,
            self._prefetcher,
            self._waiting,
            self._running,
            limits,
            self.counters,
            self.latency_mode,
            self._times,
            clock,
            constraints,
        )
        self._beams = BeamSearches(
            self.memory,
            self._running,
            self.counters,
            self._times,
            self._leave,
            limits.block_size,
            limits.max_num_sequences,
        )
        self._beam_updates: list[SequenceUpdate] = []  # of rounds that were chosen before their step's commit
        self._decodes = DecodePlanner(
            self.memory,
            self._waiting,
            self._running,
            limits,
            self.counters,
            self._preempt,
            self._counts,
            self._times,
            self._prefixes,
            constraints,
            self._beams,
        )
        self._uncommitted: dict[int, PlannedStep] = {}  # by step
        self._feeds_tokens = False  # plans begin before the tokens of those before them are known
        self._host_adapter_stats = HostAdapterStats()

    def add(self, request: SequenceRequest, seed: int) -> SequenceError | None:
        """Queues a sequence, or returns why it can never be served."""
        chain = KeyChain.of(request, self._limits.block_size)
        if chain.start is None and request.adapter is not None:  # an activated LoRA, and not invoked
            request = msgspec.structs.replace(request, adapter=None)
        ref, num_adapter_pages = request.adapter, 0
        if ref is not None:
            num_adapter_pages = self._adapters.num_pages_of(ref.digest) or self._pages_of_adapter(ref)
        error = refusal(request, num_adapter_pages, self._limits)
        grammar, ignores_eos = request.sampling.grammar, request.sampling.ignore_eos
        if grammar and self._constraints is None:
            error = SequenceError("invalid_request", "this gang serves no grammars")
        if error is None:
            self._arrivals += ARRIVAL_STEP
            has_begun = bool(request.generated_token_ids) or request.beams_so_far is not None
            arrival = self._arrivals - (_HEAD_START if has_begun else 0)
            arrival -= _PRIORITY * request.priority if self.counters.is_fair else 0
            token_ids = [*request.prompt_token_ids, *request.generated_token_ids]
            longest = max_length(request, num_adapter_pages, self._limits)
            sequence = GrowingSequence(
                request,
                arrival,
                seed,
                token_ids,
                stop_ids(request, self._eos_token_ids),
                longest,
                full_layers=self._limits.full_layers,
                key_chain=chain,
                num_adapter_pages=num_adapter_pages,
            )
            if request.beams is not None:
                try:
                    self._beams.add(sequence)
                except ValueError as problem:
                    return SequenceError("invalid_request", f"this beam search cannot go on: {problem}")
            sequence.counter = self.counters.join(request.tenant, request.weight, request.is_background)
            self.latency_mode.observe(sequence)
            self._prefixes.prepare(sequence)
            if self._constraints is None or not grammar:
                self._wait(sequence)
            else:
                self.num_constrained += 1
                self._compiling[sequence.sequence_id] = sequence
                self._constraints.add(
                    sequence.sequence_id, request.tenant, grammar, request.generated_token_ids, ignores_eos
                )
        return error

    def cancel(self, sequence_id: int) -> SequenceUsage | None:
        """Forgets a sequence and frees its pages. Returns its usage; None: the id is unknown.

        What is planned for it is being computed: its usage includes that. Not to be called while a plan is made.
        """
        if (sequence := self._running.by_id.get(sequence_id)) is None:
            return self.cancel_waiting(sequence_id)
        if sequence.beams is not None:
            return self._cancel_beams(sequence.beams)
        num_generated = 0 if sequence.sampling.max_tokens == 0 else sequence.num_coming
        sequence.count_computed(sequence.num_planned)
        self._end(sequence)
        usage = self._usage(sequence)
        return usage.with_generated(len(sequence.token_ids) - sequence.num_prompt_tokens + num_generated)

    def _cancel_beams(self, group: BeamGroup) -> SequenceUsage:
        running = [place for place in group.places if place.sequence_id in self._running.by_id]
        num_computed = len(group.rows) + sum(each.num_planned > 0 and not each.num_unplanned for each in running)
        group.num_generated += num_computed
        for each in running:
            each.count_computed(each.num_planned)
        self._end_beams(group)
        return self._beams.usage(group)

    def cancel_waiting(self, sequence_id: int) -> SequenceUsage | None:
        """Forgets a sequence that waits. Returns its usage; None, and nothing changed, if it runs or is unknown."""
        if (sequence := self._compiling.pop(sequence_id, None)) is not None:
            self._forget(sequence)
            return self._usage(sequence)
        if (sequence := self._waiting.get(sequence_id)) is None:
            return None
        self._end_waiting(sequence)
        return self._usage(sequence)

    def take_grammars(self) -> list[SequenceUpdate]:
        """Queues sequences whose grammars have been compiled. Returns the updates of those that end because their
        grammars cannot be followed.

        Not to be called while a plan is made.
        """
        updates = list[SequenceUpdate]()
        for sequence_id, error in () if self._constraints is None else self._constraints.take_ended():
            if error is not None:
                updates.append(SequenceUpdate(sequence_id, error=error, usage=self.cancel(sequence_id)))
            else:
                self._wait(self._compiling.pop(sequence_id))
        return updates

    def wake_on_grammars(self, wake: Callable[[], None]) -> None:
        """Sets `wake`, called from another thread when `take_grammars` has something, or a late mask is there."""
        if self._constraints is not None:
            self._constraints.wake = wake

    def close(self) -> None:
        """Ends the threads of grammars."""
        if self._constraints is not None:
            self._constraints.close()

    def take_shares(self, max_tenants: int) -> list[TenantShare]:
        """Shares of at most `max_tenants` tenants that have changed since they were last taken."""
        changed = self.counters.take_changed(max_tenants)
        return [tenant_share(counter, self._waiting, self._running) for counter in changed]

    def has_work(self) -> bool:
        has_sequences = bool(self._running.by_id or self._waiting or self._compiling)
        is_moving = bool(self.memory.prefixes.num_leaving or self._adapters.num_loading)
        return has_sequences or is_moving or self._tiers.has_work()

    @property
    def is_clearing(self) -> bool:
        """Pages of ended sequences are still to be released, in further steps: these must not be put off."""
        return self.memory.prefixes.num_leaving > 0

    def schedule(self) -> StepPlan:
        """The next step's plan. Takes the pages that the plan needs; preempts and evicts where they run out."""
        self._counts.num_steps += 1
        step = self._counts.num_steps
        self.memory.prefixes.begin_step()
        if not self._running.by_id:
            self._prefixes.bound_keys(False)  # no sequence waits for its next token
        any_wait, batch = bool(self._waiting), list[GrowingSequence]()
        if any_wait or self._ahead:  # otherwise none waits, and none did in the step before
            batch_size = min(self._limits.max_num_sequences, _MAX_LOOK_AHEAD)
            self._ahead = self._waiting.first(max(batch_size, _MAX_PROTECTED)) if any_wait else []
            batch = self._ahead[:batch_size]
            digests = [sequence.adapter_digest for sequence in (*self._waiting.loaded_for(), *batch)]
            self.memory.want_soon(dict.fromkeys([digest for digest in digests if digest is not None]))
        if any_wait:
            self._counts.num_fair_preemptions += self._admission.preempt_for_waiting(self._preempt)
        num_preemptions = self._counts.num_preemptions
        decodes = self._decodes.plan()
        beams = list[GrowingSequence]()
        if self._running.num_beams:
            beams = [sequence for sequence in decodes if sequence.beams is not None]
            decodes = [sequence for sequence in decodes if sequence.beams is None]
        # A preempted sequence must not get back the pages that it freed.
        may_admit = self._counts.num_preemptions == num_preemptions
        loads: tuple[AdapterLoad, ...] = ()
        if batch and may_admit:
            loads = tuple(self._prefetcher.begin(batch, self._waiting.num_lacking, len(self._running.by_id)))
        num_decodes = len(decodes) + len(beams)
        if self._running.num_beams and self._uncommitted:
            num_decodes += min(self._decodes.num_waiting_beams, (self._limits.max_tokens_per_step - num_decodes) // 2)
        chunks = list[PlannedChunk]()
        if any_wait or self._running.prompts:
            most_chunks = max(0, self._limits.max_num_sequences - num_decodes)
            chunks = self._admission.plan_prompts(self._prompt_budget(num_decodes), may_admit, most_chunks)
        planned = PlannedStep(decodes, chunks, beams, self._decodes.snapshots)
        parts = (
            () if self._uncommitted else planned.parts({})
        )  # otherwise when it is settled, as tokens are not known yet
        self._uncommitted[step] = planned
        used = dict.fromkeys([sequence.adapter_digest for sequence in (*decodes, *beams)])
        used |= dict.fromkeys([chunk.part.adapter for chunk in chunks])
        residences = tuple([self._adapters.residence(digest) for digest in used if digest is not None])
        self._prefixes.bound_keys(True)
        moves, (copies, full_copies) = self._tiers.plan_moves(), self._prefixes.take_copies()
        outdated, pins = self.memory.take_host_updates(computes=bool(decodes or beams or chunks))
        penalised, ended_runs = tuple(self._running.penalised), self._running.take_removed()
        return StepPlan(
            step, parts, residences, loads, moves, copies, outdated, penalised, pins, ended_runs, full_copies
        )

    def settle(self, plan: StepPlan, result: StepResult | None) -> StepPlan:
        """Adds the sequences to a plan that was made while the plan before it ran.

        `result`: of that plan, which is committed later. Sequences that end with its tokens, or were cancelled, are
        left out. None: the device feeds the tokens to the plan.
        """
        self._feeds_tokens = result is None
        if result is not None:
            if self.num_constrained:
                self._put_back_late(result)
            if self._uncommitted[result.step].beams:
                plan = self._continue_beams(plan, result)
        parts = self._uncommitted[plan.step].parts(None if result is None else result.tokens)
        return msgspec.structs.replace(plan, sequences=parts)

    def _continue_beams(self, plan: StepPlan, result: StepResult) -> StepPlan:
        """Chooses the rounds of searches, and adds what follows to a plan that was made before they could be."""
        groups = self._commit_beams(self._uncommitted[result.step], result)
        if not groups:
            return plan
        planned, limits = self._uncommitted[plan.step], self._limits
        num_decodes, lengths = len(planned.decodes) + len(planned.beams), [number for _, number in planned.prompts]
        max_beams = min(
            limits.max_tokens_per_step - num_decodes - sum(lengths),
            limits.max_num_sequences - num_decodes - len(lengths),
        )
        beams = self._decodes.continue_beams(groups, max_beams)
        planned.beams += beams
        plan_ids = {residence.digest for residence in plan.adapters}
        digests = dict.fromkeys([beam.adapter_digest for beam in beams])
        more = [self._adapters.residence(digest) for digest in digests if digest is not None and digest not in plan_ids]
        copies, full_copies = self._prefixes.take_copies()
        return msgspec.structs.replace(
            plan,
            copies=(*plan.copies, *copies),
            full_copies=(*plan.full_copies, *full_copies),
            adapters=(*plan.adapters, *more),
        )

    def drop(self, plan: StepPlan) -> None:
        """Forgets a plan that is not executed, because it is empty."""
        self._counts.num_steps -= 1
        assert not (plan.sequences or plan.loads or plan.moves or plan.copies or plan.full_copies)
        if plan.outdated or plan.pins:
            self.memory.put_back_host_updates(plan)
        self._running.removed.extend(plan.ended_runs)
        del self._uncommitted[plan.step]

    def commit(self, plan: StepPlan, result: StepResult) -> list[SequenceUpdate]:
        """Takes in a step's tokens and the copies that have ended. Returns the updates for the sequences' owners."""
        updates: list[SequenceUpdate] = []
        if result.moved:
            self._prefixes.stop_awaiting(self._tiers.finish(result.moved))
        if plan.copies:
            self._prefixes.end_copies(plan.copies)
        if plan.full_copies:
            self._prefixes.end_full_copies(plan.full_copies)
        self._host_adapter_stats = stats = result.host_adapter_stats
        if stats.came or stats.went or stats.pin_news:
            self.memory.note_hosted(stats.came, stats.went, stats.pin_news)
        for digest in result.loaded:
            self._adapters.finish_load(digest)
            self._waiting.adapter_loaded(digest)
        for failure in result.failed:
            self._adapters.fail_load(failure.digest)
            updates.extend(self._fail_waiting(failure))
        if self.num_constrained:
            self._put_back_late(result)
        planned = self._uncommitted.pop(plan.step)
        self._counts.num_computed_tokens += planned.num_tokens
        if planned.beams:
            self._commit_beams(planned, result)
        for state in planned.snapshots:  # first, as sequences may end
            self._prefixes.end_snapshot(state, was_dropped=state.sequence in planned.drops)
        self._commit_decodes(planned, result, updates)
        for chunk in planned.chunks:
            if chunk.sequence not in planned.drops:
                self._commit_chunk(chunk, result, updates)
            elif chunk.sequence not in planned.late or chunk.part.scores is None:
                continue
            elif not self._take_scores(chunk, result, updates):
                updates.append(self._fail(chunk.sequence))
        updates += self._beam_updates
        self._beam_updates.clear()
        return updates

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Measures costs by how long a plan took to execute. Must be called before the plan's commit."""
        if (planned := self._uncommitted.get(plan.step)) is not None:
            chunks = planned.prompts
            num_decodes = len(planned.decodes) + len(planned.beams)
            self._costs.observe_step(num_decodes + len(chunks), planned.num_tokens, seconds)
            self._step_costs.observe(num_decodes, chunks, seconds)

    def expected_s(self, plan: StepPlan) -> float:
        """Expected time of a plan, by measured costs; 0: it computes nothing."""
        planned = self._uncommitted[plan.step]
        return self._step_costs.step_s(len(planned.decodes) + len(planned.beams), planned.prompts)

    def load(self) -> EngineLoad:
        """Gauges of now and counters since the start."""
        return gang_load(
            self._counts,
            self._waiting,
            self._running,
            self.memory,
            self._tiers,
            self._prefixes,
            self._host_adapter_stats,
            self._limits.num_pages,
            len(self._compiling),
        )

    def take_residency_changes(self) -> ResidencyChange:
        """Adapters and full pages that entered or left the pool since the last call; loading ones have entered."""
        return self.memory.take_residency_changes()

    def check_integrity(self) -> None:
        """Raises AssertionError if a page leaked, or its holders or an adapter's users are miscounted."""
        running = [*self._running.by_id.values()]
        page_lists = [*(s.held_pages for s in running), *self._tiers.holders(), *self._prefixes.holders()]
        self.memory.check_integrity(page_lists)
        self._tiers.check_integrity()
        self._waiting.check_integrity(lambda digest: self._adapters.state(digest) is AdapterState.RESIDENT)
        self._running.check_integrity()
        self._beams.check_integrity()
        self._prefixes.check_integrity(running)
        prompts = Counter([each.counter for each in (*self._running.prompts, *self._waiting)])
        decodes = Counter([each.counter for each in self._running.decoding])
        self._bursts.check_integrity({of: (decodes[of], prompts[of]) for of in prompts | decodes})
        sequences = [*running, *self._waiting, *self._compiling.values()]
        self.counters.check_integrity([sequence.counter for sequence in sequences])
        if self._constraints is not None:
            self._constraints.check_integrity([each.sequence_id for each in sequences if each.is_constrained])
        assert all(not s.pages and s.num_computed == 0 for s in self._waiting), "a waiting sequence holds pages"
        users: dict[str, int] = {}
        for sequence in running:
            num_tokens = sequence.num_computed + sequence.num_planned
            assert len(sequence.pages) >= pages_for(num_tokens, self._limits.block_size)
            if sequence.adapter_digest is not None:
                users[sequence.adapter_digest] = users.get(sequence.adapter_digest, 0) + 1
            assert sequence.page_use.num_pages == sequence.num_held_pages, "pages are held whose time is not counted"
            num_unseen = self._limits.num_unseen_pages(sequence.num_computed)
            assert sequence.num_gone <= num_unseen, "a page is gone that a layer sees"
            max_pages = self._limits.most_pages(sequence.max_length)
            assert sequence.num_held_pages <= max_pages or self._limits.full_layers, "more pages than there may be"
        assert users == self._adapters.users() == self._times.users(), "an adapter's running sequences are miscounted"

    def _prompt_budget(self, num_decodes: int) -> PromptBudget:
        """What prompts may take of a plan with `num_decodes` decodes."""
        max_tokens = self._limits.max_tokens_per_step - num_decodes
        if not num_decodes or not self.token_interval_s:
            return PromptBudget(max_tokens)  # no sequence waits for its next token
        stretch, decode_s = self._bursts.stretch, self._step_costs.decodes.at(num_decodes)
        num_coming = self._bursts.num_coming() if stretch > 1 else 0
        if num_coming:
            later_s = self._step_costs.decodes.at(min(num_decodes + num_coming, self._limits.max_num_sequences))
            seconds = prompt_seconds(self.token_interval_s, decode_s, stretch, later_s)
        else:  # beside background work alone, whoever asks next waits for this step
            seconds = prompt_seconds(stretch * self.token_interval_s, decode_s)
        return PromptBudget(max_tokens, seconds, self._step_costs.prompt_tokens.at, self._limits.block_size)

    def _preempt(self, victim: GrowingSequence) -> None:
        """Puts a running sequence back into the queue. It is recomputed later as far as its pages are gone.

        A beam takes all of its search with it. What begun plans compute for it is dropped.
        """
        group = victim.beams
        for each in (victim,) if group is None else group.places:
            if each.num_planned:
                self._count_dropped(each)
        if group is not None:
            self._beams.dissolve(group)
            victim = group.root
        self._leave(victim)
        if group is not None:
            self._counts.num_recomputed_tokens += group.drop_rows()
        self._counts.num_preemptions += 1
        self._wait(victim)

    def _count_dropped(self, sequence: GrowingSequence) -> None:
        """Counts what begun plans compute for a running sequence, or a beam, whose run ends now."""
        for planned in self._uncommitted.values():
            if sequence in planned.drops:
                continue
            for chunk in planned.chunks:
                if chunk.sequence is sequence and chunk.part.sample is not None:
                    sequence.count_in_vain(len(chunk.part.token_ids))
                elif chunk.sequence is sequence:
                    sequence.count_computed(len(chunk.part.token_ids))
            if any(each is sequence for each in (*planned.decodes, *planned.beams)):
                sequence.count_in_vain(1)

    def _wait(self, sequence: GrowingSequence) -> None:
        digest = sequence.adapter_digest
        self._waiting.add(sequence, digest is None or self._adapters.state(digest) is AdapterState.RESIDENT)

    def _end(self, sequence: GrowingSequence) -> None:
        """Ends a running sequence."""
        self._leave(sequence)
        self._forget(sequence)

    def _end_beams(self, group: BeamGroup) -> None:
        """Ends a running search."""
        group.rows.clear()  # none of them is computed again
        self._beams.dissolve(group)
        self._end(group.root)

    def _end_waiting(self, sequence: GrowingSequence) -> None:
        """Ends a waiting sequence."""
        if self._waiting.remove(sequence):
            self._admission.charge_load(sequence)
        self._forget(sequence)

    def _forget(self, sequence: GrowingSequence) -> None:
        self.counters.leave(sequence.counter)
        if sequence.beams is not None:
            self._beams.forget(sequence.beams)
        if self._constraints is not None and sequence.is_constrained:
            self.num_constrained -= 1
            self._constraints.remove(sequence.sequence_id)

    def _put_back_late(self, result: StepResult) -> None:
        """Sequences whose masks were late in this step compute their last tokens again; later plans do without them."""
        planned = self._uncommitted[result.step]
        lengths = {chunk.sequence: len(chunk.part.token_ids) for chunk in planned.chunks if chunk.part.sample}
        for sequence in (*planned.decodes, *lengths):
            if sequence.is_constrained and sequence.sequence_id not in result.tokens and sequence not in planned.drops:
                self._counts.num_late_masks += 1
                if self._limits.num_state_pages:  # its state has gone on, and cannot be computed from once more
                    for each in self._uncommitted.values():
                        if each is not planned:  # no later plan computes it
                            each.drops.add(sequence)
                    self._preempt(sequence)
                    sequence.awaits_mask = True  # else it would be preempted again and again until the mask is made
                    continue
                num_tokens = lengths.get(sequence, 1)
                sequence.put_back_late(num_tokens)
                self._running.num_uncomputed -= num_tokens - 1
                self._prefixes.keep_filled(sequence)
                self._give_back(sequence)
                planned.late.add(sequence)
                for each in self._uncommitted.values():
                    each.drops.add(sequence)

    def _leave(self, sequence: GrowingSequence) -> None:
        """Ends the run of a sequence: releases its pages and its adapter."""
        self._running.remove(sequence)
        self._counts.num_recomputed_tokens += sequence.end_run()
        for planned in self._uncommitted.values():
            planned.drops.add(sequence)
        sequence.num_planned = sequence.num_coming = sequence.num_at_start = 0
        sequence.awaits_mask = False
        self._times.stop(sequence.page_use)
        self._prefixes.leave(sequence)
        if sequence.adapter_digest is not None:
            self._adapters.release(sequence.adapter_digest)

    def _commit_decodes(self, planned: PlannedStep, result: StepResult, updates: list[SequenceUpdate]) -> None:
        """Takes in the tokens of decodes: little work for each, since there may be thousands."""
        block_size, chosen, drops = self._limits.block_size, result.tokens, planned.drops
        report_tokens = USAGE_REPORT_PAGES * block_size
        for sequence in planned.decodes:
            if drops and sequence in drops:
                continue
            sequence.num_computed = num_computed = sequence.num_computed + 1
            sequence.num_planned -= 1
            if sequence.is_pooled:  # the last token of its prompt
                self._prefixes.keep_filled(sequence)
                pool = sequence.pool_plan(num_computed - 1, num_computed)
                updates.append(self._end_pooled(sequence, is_finite=self._add_pooled(sequence, pool, result)))
                continue
            if num_computed % block_size == 0:
                self._prefixes.keep_filled(sequence)
                self._give_back(sequence)
                if num_computed % report_tokens == 0:
                    updates.append(self._append(sequence, chosen[sequence.sequence_id]))
                    continue
            token = chosen[sequence.sequence_id]
            ends = token is None or token.token_id in sequence.stop_ids or num_computed + 1 >= sequence.max_length
            if token is None or ends or num_computed == sequence.num_given_tokens:
                updates.append(self._append(sequence, token))
                continue
            sequence.num_coming -= 1
            sequence.token_ids.append(token.token_id)
            self._counts.num_generated_tokens += 1
            logprobs = None if token.logprobs is None else [token.logprobs]
            updates.append(SequenceUpdate(sequence.sequence_id, [token.token_id], logprobs))

    def _commit_beams(self, planned: PlannedStep, result: StepResult) -> list[BeamGroup]:
        """Takes in what was computed of beams. Returns searches whose rounds were chosen, and that go on.

        Their updates come with the step's. The plan's beams are done with afterwards.
        """
        groups = dict[BeamGroup, None]()
        for beam in planned.beams:
            if beam not in planned.drops:
                beam.num_computed += 1
                beam.num_planned -= 1
                self._running.num_uncomputed -= 1
                if beam.num_computed % self._limits.block_size == 0:
                    self._prefixes.keep_filled(beam)
                    self._give_back(beam)
                groups[self._beams.take_row(beam, result.tokens[beam.sequence_id])] = None
        planned.beams = []
        return [group for group in groups if group.is_complete and self._choose_round(group)]

    def _choose_round(self, group: BeamGroup) -> bool:
        """Lets the beams of a search fork and die. False: it has ended."""
        root = group.root
        if any(row is None for row in group.rows.values()):
            self._beam_updates.append(self._fail(root))
            return False
        self._counts.num_generated_tokens += len(group.live)
        beam_round = self._beams.advance(group)
        num_cached = computing_s = None
        if not group.is_reported:
            assert root.began_at is not None
            num_cached, computing_s, group.is_reported = root.num_cached_tokens, self._clock() - root.began_at, True
        is_over = not group.live
        if is_over:
            self._end_beams(group)
        self._beam_updates.append(
            SequenceUpdate(
                root.sequence_id,
                finish_reason="length" if is_over else None,
                num_cached_tokens=num_cached,
                computing_s=computing_s,
                usage=self._beams.usage(group),
                beam_rounds=[beam_round],
            )
        )
        return not is_over

    def _give_back(self, sequence: GrowingSequence) -> None:
        """Releases the pages of a sequence that no layer sees any more; with full layers in the next steps."""
        if self._limits.window is None:
            return
        num_unseen = self._limits.num_unseen_pages(sequence.num_computed)
        if num_unseen > sequence.num_gone and self._limits.full_layers is not None:
            self._decodes.to_condense[sequence] = None
        elif num_unseen > sequence.num_gone:
            self._prefixes.pass_pages(sequence, range(sequence.num_gone, num_unseen))
            pages = sequence.give_back(num_unseen)
            self.memory.prefixes.release(pages)
            self._times.shrink(sequence.page_use, len(pages))
            self._running.reserve.shrink(sequence)

    def _commit_chunk(self, chunk: PlannedChunk, result: StepResult, updates: list[SequenceUpdate]) -> None:
        sequence, num_tokens = chunk.sequence, len(chunk.part.token_ids)
        sequence.count_computed(num_tokens)
        sequence.num_computed += num_tokens
        sequence.num_planned -= num_tokens
        self._running.num_uncomputed -= num_tokens
        self._prefixes.keep_filled(sequence)
        self._give_back(sequence)
        are_finite = chunk.part.scores is None or self._take_scores(chunk, result, updates)
        if sequence.is_pooled:
            are_finite = self._add_pooled(sequence, chunk.part.pool, result)
        if sequence.is_pooled and not sequence.num_uncomputed:
            self._running.num_uncomputed += 1
            updates.append(self._end_pooled(sequence, is_finite=are_finite))
        elif chunk.part.sample is not None and sequence.beams is not None:
            group = self._beams.take_row(sequence, result.tokens[sequence.sequence_id])
            if group.is_complete:
                self._choose_round(group)
        elif chunk.part.sample is not None:
            self._running.num_uncomputed += 1
            updates.append(self._append(sequence, result.tokens[sequence.sequence_id] if are_finite else None))
        elif not are_finite:
            updates.append(self._fail(sequence))
        elif sequence.num_computed % (USAGE_REPORT_PAGES * self._limits.block_size) < num_tokens:
            sequence = sequence if sequence.beams is None else sequence.beams.root
            updates.append(SequenceUpdate(sequence.sequence_id, usage=self._usage(sequence)))

    def _take_scores(self, chunk: PlannedChunk, result: StepResult, updates: list[SequenceUpdate]) -> bool:
        """Sends the scores that the chunk was asked for. False: they are not finite."""
        if (scores := result.scores[chunk.sequence.sequence_id]) is None:
            return False
        chunk.sequence.num_scored += scores.num_rows
        updates.append(SequenceUpdate(chunk.sequence.sequence_id, prompt_scores=scores))
        return True

    def _add_pooled(self, sequence: GrowingSequence, pool: PoolPlan | None, result: StepResult) -> bool:
        """Takes in what a step has pooled of the sequence's prompt. False: it is not finite."""
        if pool is None:
            return True
        total = result.pooled[sequence.sequence_id]
        if total is not None:
            sequence.add_pooled(pool, total)
        return total is not None

    def _end_pooled(self, sequence: GrowingSequence, *, is_finite: bool) -> SequenceUpdate:
        """Ends a sequence whose prompt is computed, with its embedding."""
        embedding = sequence.embedding() if is_finite else None
        update = self._append(sequence, None if embedding is None else _NO_TOKEN)
        return update if embedding is None else msgspec.structs.replace(update, embedding=embedding)

    def _append(self, sequence: GrowingSequence, token: SampledToken | None) -> SequenceUpdate:
        """Appends the chosen token, and reports usage. Handles first and last tokens too.

        None: the logits were not finite, and the sequence ends with an error.
        """
        sequence.num_coming -= 1
        if sequence.num_counted < sequence.num_prompt_tokens:  # the prompt's last token was computed like a decode
            sequence.num_computed_prompt_tokens += 1
            sequence.num_counted = sequence.num_prompt_tokens
        if token is None:
            self._running.num_uncomputed -= 1
            return self._fail(sequence)
        is_first = len(sequence.token_ids) == sequence.num_given_tokens
        token_ids: list[int] = []
        if sequence.sampling.max_tokens == 0:
            self._running.num_uncomputed -= 1
        else:
            token_ids.append(token.token_id)
            sequence.token_ids.append(token.token_id)
            self._counts.num_generated_tokens += 1
        reason = finish_reason(sequence)
        if reason is not None:
            if reason == "stop":
                self._running.reserve.observe_end(sequence)
            if self._feeds_tokens:  # the next plan has begun with it
                sequence.num_recomputed_tokens += sequence.num_planned
            self._end(sequence)
        logprobs = [token.logprobs] if token.logprobs is not None and token_ids else None
        num_cached = computing_s = None
        if is_first:
            assert sequence.began_at is not None
            num_cached, computing_s = sequence.num_cached_tokens, self._clock() - sequence.began_at
        usage = self._usage(sequence)
        return SequenceUpdate(sequence.sequence_id, token_ids, logprobs, reason, None, num_cached, computing_s, usage)

    def _fail(self, sequence: GrowingSequence) -> SequenceUpdate:
        """Ends a running sequence whose numbers are not finite, or all of its search."""
        if sequence.beams is None:
            self._prefixes.disown(sequence)
            self._end(sequence)
        else:
            for beam in sequence.beams.beams:
                self._prefixes.disown(beam)
            self._end_beams(sequence.beams)
            sequence = sequence.beams.root
        return SequenceUpdate(sequence.sequence_id, error=not_finite(sequence), usage=self._usage(sequence))

    def _usage(self, sequence: GrowingSequence) -> SequenceUsage:
        if sequence.beams is not None:
            return self._beams.usage(sequence.beams)
        return sequence.usage(self._times.usage(sequence.page_use))

    def _fail_waiting(self, failure: AdapterFailure) -> Iterator[SequenceUpdate]:
        error = SequenceError("store_unavailable" if failure.is_unavailable else "adapter_failed", failure.message)
        for sequence in self._waiting.of_adapter(failure.digest):
            self._end_waiting(sequence)
            yield SequenceUpdate(sequence.sequence_id, error=error, usage=self._usage(sequence))

    def _prefix_page_s(self, key: PageKey, num_blocks: float) -> float:
        return self._costs.return_s(self._tiers.holds(key), num_blocks)
