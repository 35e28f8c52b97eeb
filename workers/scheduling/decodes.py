"""Which sequences decode in a step, and how sequences get pages as they grow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from ..decoding.constraints import Constraints
from ..fairness.page_times import PageTimes
from ..fairness.tenant_counters import OUTPUT_TOKEN, TenantCounters
from ..memory.paged_memory import PagedMemory
from ..window_pages import GangLimits, pages_for
from .beam_searches import BeamGroup, BeamSearches
from .gang_load import StepCounts
from .growing_sequence import GrowingSequence, StateSnapshot
from .prefix_reuse import FoundPrefix, PrefixReuse
from .prompt_planner import OlderSequences, has_mask
from .running_sequences import RunningSequences
from .waiting_queue import WaitingQueue

_MOST_CONDENSED = 64  # dense pages that a step fills
# States of answers that a step keeps: of so many decodes one, and pages of them, if it is more than one.
_DECODES_PER_STATE, _MOST_STATE_PAGES = 4, 512


class DecodePlanner:
    """Plans decodes, and takes pages for sequences as they grow."""

    def __init__(
        self,
        memory: PagedMemory,
        waiting: WaitingQueue,
        running: RunningSequences,
        limits: GangLimits,
        counters: TenantCounters,
        preempt: Callable[[GrowingSequence], None],
        counts: StepCounts,
        times: PageTimes,
        prefixes: PrefixReuse,
        constraints: Constraints | None,
        beams: BeamSearches,
    ) -> None:
        """`preempt` puts a running sequence back into the queue."""
        self._beams = beams
        self._memory, self._waiting, self._running = memory, waiting, running
        self._limits, self._counters = limits, counters
        self._preempt, self._counts, self._times = preempt, counts, times
        self._prefixes, self._constraints = prefixes, constraints
        self.to_condense: dict[GrowingSequence, None] = {}  # a dense page can stand for pages of these
        self.snapshots: list[StateSnapshot] = []  # states of answers that the last plan keeps

    def plan(self) -> list[GrowingSequence]:
        """Plans the next token of decoding sequences; preempts the last by rank where pages run out."""
        planned: list[GrowingSequence] = []
        sitting_out: list[GrowingSequence] = []
        to_keep: list[GrowingSequence] = []
        self.snapshots = []
        budget, block_size = self._limits.max_tokens_per_step, self._limits.block_size
        if self._running.num_beams:
            budget = min(budget, self._limits.max_num_sequences)
            budget -= min(budget // 2, self.num_waiting_beams)
        older: OlderSequences | None = None
        num_preemptions = self._counts.num_preemptions
        if self.to_condense:
            self._condense_all()
        if self._beams.joining:
            self._join_beams()
        if self._limits.window is not None:
            self._grow_prompts()
        decoding = self._running.decoding[:]  # oldest first; if a step cannot hold all, the least served tenants' first
        if len(decoding) > self._limits.max_tokens_per_step:
            decoding.sort(key=lambda each: (each.counter.is_background, each.counter.value, each.arrival))
        for sequence in decoding:
            if sequence.beams is not None and not sequence.num_unplanned:
                continue  # it waits for the others of its search
            position = sequence.num_computed + sequence.num_planned  # of its newest token, which may not be known yet
            if position + 1 >= sequence.max_length:
                continue  # that token is its last
            if sequence.awaits_mask and not has_mask(sequence, self._constraints):
                sitting_out.append(sequence)
                continue
            if self._counts.num_preemptions > num_preemptions and sequence.sequence_id not in self._running.by_id:
                continue  # it was preempted just now
            if position % block_size == 0 and position == len(sequence.pages) * block_size:
                older = older or OlderSequences(self._waiting.equipped_in_turn(), self._waiting.has_one_tenant)
                if not self._grow(sequence, older):
                    continue
                if self._limits.num_state_pages and self._prefixes.keeps_answer(sequence, position):
                    to_keep.append(sequence)
            elif sequence.beams is not None and self._shares_last_page(sequence):
                older = older or OlderSequences(self._waiting.equipped_in_turn(), self._waiting.has_one_tenant)
                if not self._copy_last_page(sequence, older):
                    continue
            if sequence.beams is not None and self._shares_state(sequence):
                older = older or OlderSequences(self._waiting.equipped_in_turn(), self._waiting.has_one_tenant)
                if not self._copy_state(sequence, older):
                    continue
            sequence.num_planned += 1
            sequence.num_coming += sequence.beams is None
            planned.append(sequence)
            if len(planned) == budget:
                break
        if self._counts.num_preemptions > num_preemptions:
            planned = [sequence for sequence in planned if sequence.sequence_id in self._running.by_id]
        if to_keep:
            self._keep_states(to_keep, len(planned))
        self._charge_tokens([*planned, *sitting_out] if sitting_out else planned)  # they hold places, too
        return planned

    def continue_beams(self, groups: Iterable[BeamGroup], max_beams: int) -> list[GrowingSequence]:
        """Plans at most so many beams of searches that have just gone on, though the plan was made before that.

        None is preempted for them: a search that finds no room is planned with the next step.
        """
        planned: list[GrowingSequence] = []
        older = OlderSequences(self._waiting.equipped_in_turn(), self._waiting.has_one_tenant)
        for group in groups:
            for beam in group.beams if len(planned) + len(group.live) <= max_beams else ():
                is_full = beam.num_computed == len(beam.pages) * self._limits.block_size
                if is_full and not self._grow(beam, older, may_preempt=False):
                    break
                shares = not is_full and self._shares_last_page(beam)
                if shares and not self._copy_last_page(beam, older, may_preempt=False):
                    break
                if self._shares_state(beam) and not self._copy_state(beam, older, may_preempt=False):
                    break
                beam.num_planned += 1
                planned.append(beam)
        self._charge_tokens(planned)
        return planned

    def _keep_states(self, sequences: list[GrowingSequence], num_decodes: int) -> None:
        """Keeps states of these sequences as they are before their next tokens, where there is room, and not many.

        A step reads and writes each state as a copy does, so these copies are a small part of it.
        """
        num_pages = self._limits.num_state_pages
        most_states = max(1, min(num_decodes // _DECODES_PER_STATE, _MOST_STATE_PAGES // num_pages))
        for sequence in sequences[:most_states]:
            if sequence.sequence_id not in self._running.by_id:
                continue  # it was preempted just now
            pages = self._memory.take_spare(num_pages, self._running.reserve.min_pages)
            if pages is None:
                break
            self.snapshots.append(self._prefixes.begin_answer_snapshot(sequence, pages))

    @property
    def num_waiting_beams(self) -> int:
        """Beams that may go on in the step that is planned, once the one before it has ended."""
        return sum(1 for each in self._running.decoding if each.beams is not None and not each.num_unplanned)

    def _join_beams(self) -> None:
        """Begins beams of searches that run without them; the next steps go on where one could not begin."""
        older = OlderSequences(self._waiting.equipped_in_turn(), self._waiting.has_one_tenant)
        for group in [*self._beams.joining]:
            for beam in group.beams:
                if group not in self._beams.joining or not self._join(group, beam, older):
                    break
            else:
                del self._beams.joining[group]

    def _join(self, group: BeamGroup, beam: GrowingSequence, older: OlderSequences) -> bool:
        """Begins a beam, unless it runs, on the pages of its prefix that are in the pool and new ones for the rest.

        False: there is no room, or as many keys were made as may be in a step.
        """
        if beam.sequence_id in self._running.by_id:
            return True
        if not self._prefixes.make_keys(beam):
            return False
        prefix = self._prefixes.found_beside(beam, group.root)
        # A snapshot takes room that the pool may not have, however many are preempted.
        return self._begin(group, beam, older, prefix) or (
            bool(prefix.state_pages) and self._begin(group, beam, older, FoundPrefix())
        )

    def _begin(self, group: BeamGroup, beam: GrowingSequence, older: OlderSequences, prefix: FoundPrefix) -> bool:
        """Begins a beam on the pages of this prefix. False: there is no room."""
        limits = self._limits
        num_pages = pages_for(beam.num_uncomputed, limits.block_size) - prefix.num_pages
        max_pages = limits.most_pages(beam.num_uncomputed) - len(prefix.held_pages)
        num_pages = min(num_pages, max(1, max_pages)) + limits.num_state_pages
        self._memory.prefixes.acquire(prefix.held_pages)  # first, so that they are not evicted for the new ones
        older.reach_running(group.root, self._running.rank)
        if not self._make_room(group.root, older, num_pages):
            self._memory.prefixes.release(prefix.held_pages)
            return False
        pages = self._memory.allocator.allocate(num_pages) or ()
        self._prefixes.enter(beam, prefix, pages[limits.num_state_pages :], pages[: limits.num_state_pages])
        beam.num_at_start = beam.num_computed
        self._beams.join(group, beam)
        return True

    def _shares_last_page(self, beam: GrowingSequence) -> bool:
        page = beam.pages[-1]
        return self._prefixes.is_shared(page, self._memory.allocator.num_holders(page))

    def _copy_last_page(self, beam: GrowingSequence, older: OlderSequences, *, may_preempt: bool = True) -> bool:
        """Gives the beam a copy of its last page, which it would write to and others have. False: there is no room."""
        if self._memory.allocator.num_free < 1:
            older.reach_running(beam, self._running.rank)
        if not self._make_room(beam, older, 1, may_preempt=may_preempt):
            return False
        if self._shares_last_page(beam):  # otherwise those that had it were preempted
            (page,) = self._memory.allocator.allocate(1) or ()
            self._prefixes.copy_shared(beam.pages[-1], page)
            beam.replace_last(page)
        return True

    def _shares_state(self, beam: GrowingSequence) -> bool:
        pages = beam.state_pages[:1]  # others hold all of them or none
        return any(self._prefixes.is_shared(page, self._memory.allocator.num_holders(page)) for page in pages)

    def _copy_state(self, beam: GrowingSequence, older: OlderSequences, *, may_preempt: bool = True) -> bool:
        """Gives the beam a copy of its recurrent state, as `_copy_last_page` does of its last page."""
        num_pages = len(beam.state_pages)
        if self._memory.allocator.num_free < num_pages:
            older.reach_running(beam, self._running.rank)
        if not self._make_room(beam, older, num_pages, may_preempt=may_preempt):
            return False
        if self._shares_state(beam):  # otherwise those that had it were preempted
            pages = self._memory.allocator.allocate(num_pages) or ()
            for source, target in zip(beam.state_pages, pages, strict=True):
                self._prefixes.copy_shared(source, target)
            beam.hold_state(pages)
        return True

    def _condense_all(self) -> None:
        """Fills dense pages in place of pages of which only full layers see anything, at most _MOST_CONDENSED of them.

        Where there is no room for one, the next step tries again.
        """
        older = OlderSequences(self._waiting.equipped_in_turn(), self._waiting.has_one_tenant)
        num_left = _MOST_CONDENSED
        for sequence in [*self.to_condense]:
            if self._running.by_id.get(sequence.sequence_id) is sequence:
                num_unseen = self._limits.num_unseen_pages(sequence.num_computed)
                while num_left and sequence.num_gone < num_unseen and self._condense(sequence, older):
                    num_left -= 1
                if sequence.num_gone < num_unseen:
                    continue
            del self.to_condense[sequence]

    def _condense(self, sequence: GrowingSequence, older: OlderSequences) -> bool:
        """Gives the sequence's first pages back for a dense one, which another sequence may have filled.

        Others are preempted only for a prompt that could not go on otherwise. False: there is no room.
        """
        page = self._prefixes.kept_dense(sequence)
        if page is not None:
            self._memory.prefixes.acquire((page,))
            self._memory.prefixes.count_uses((page,))
        else:
            if self._memory.allocator.num_free < 1:
                older.reach_running(sequence, self._running.rank)
            is_stuck = not sequence.num_that_fit(self._limits.block_size)
            if not (self._make_room(sequence, older, 1) if is_stuck else self._memory.make_room(1, older.adapters)):
                return False
            (page,) = self._memory.allocator.allocate(1) or ()
            self._prefixes.fill_dense(sequence, page)
        self._prefixes.pass_pages(sequence, sequence.next_dense)
        pages = sequence.condense(page)
        self._memory.prefixes.release(pages)
        self._times.shrink(sequence.page_use, len(pages) - 1)
        self._running.reserve.shrink(sequence)
        return True

    def _grow_prompts(self) -> None:
        """Takes pages for prompts in place of those that they have given back.

        Others are preempted only for a prompt that could not go on otherwise.
        """
        block_size = self._limits.block_size
        older: OlderSequences | None = None
        for sequence in self._running.prompts[:]:
            num_lacking = pages_for(len(sequence.token_ids), block_size) - len(sequence.pages)
            if num_lacking <= 0 or sequence.sequence_id not in self._running.by_id:
                continue  # it has all, or was preempted just now
            max_pages = self._limits.most_pages(len(sequence.token_ids)) - sequence.num_held_pages
            num_pages = min(num_lacking, max_pages)
            older = older or OlderSequences(self._waiting.equipped_in_turn(), self._waiting.has_one_tenant)
            older.reach_running(sequence, self._running.rank)
            if num_pages > 0 and self._memory.has_room(num_pages, older.adapters):
                self._grow(sequence, older, num_pages)
            elif num_pages > 0 and not sequence.num_that_fit(block_size):
                self._grow(sequence, older)

    def _grow(
        self, sequence: GrowingSequence, older: OlderSequences, num_pages: int = 1, *, may_preempt: bool = True
    ) -> bool:
        """Takes more pages for a running sequence, if need be by preempting others. False: there are none.

        `older`: waiting sequences; nothing that those before this one need is taken.
        """
        if self._memory.allocator.num_free < num_pages:
            older.reach_running(sequence, self._running.rank)
        if not self._make_room(sequence, older, num_pages, may_preempt=may_preempt):
            return False
        sequence.grow(self._memory.allocator.allocate(num_pages) or ())
        self._running.reserve.grow(sequence, num_pages)
        self._times.grow(sequence.page_use, num_pages)
        return True

    def _make_room(
        self, sequence: GrowingSequence, older: OlderSequences, num_pages: int, *, may_preempt: bool = True
    ) -> bool:
        """Makes room for a running sequence, if need be by preempting others. False: there is none."""
        while not self._memory.make_room(num_pages, older.adapters):
            if not may_preempt:
                return False
            victim = self._running.victim_for(sequence)
            if victim is not None and (victim.beams is None or victim.beams is not sequence.beams):
                self._preempt(victim)
            elif self._memory.make_room(num_pages, keep=frozenset()):
                break  # evicted an older sequence's adapter: otherwise the two would wait for each other
            else:
                return False
        return True

    def _charge_tokens(self, sequences: list[GrowingSequence]) -> None:
        """Charges a token for each sequence."""
        if len(self._running.by_tenant) == 1 and sequences:
            self._counters.charge(sequences[0].counter, OUTPUT_TOKEN * len(sequences))
        elif sequences:
            for counter, number in Counter([sequence.counter for sequence in sequences]).items():
                self._counters.charge(counter, OUTPUT_TOKEN * number)
