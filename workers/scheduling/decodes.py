"""Which sequences compute their next token in a step, and who gives them pages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from ..fairness.page_times import PageTimes
from ..fairness.preemption import choose_victim
from ..fairness.prices import OUTPUT_TOKEN
from ..fairness.standings import Standings
from ..memory.paged_memory import PagedMemory
from .admission import OlderSequences
from .gang_load import StepCounts
from .request_limits import GangLimits
from .running_sequences import RunningSequences
from .sequence import Sequence
from .waiting_queue import WaitingQueue


class Decodes:
    """Lets sequences that decode go on, and gets them pages as they grow."""

    def __init__(
        self,
        memory: PagedMemory,
        waiting: WaitingQueue,
        running: RunningSequences,
        limits: GangLimits,
        standings: Standings,
        preempt: Callable[[Sequence], None],
        counts: StepCounts,
        times: PageTimes,
    ) -> None:
        """`preempt` puts a running sequence back into the queue, and counts it."""
        self._memory, self._waiting, self._running = memory, waiting, running
        self._limits, self._standings = limits, standings
        self._preempt, self._counts, self._times = preempt, counts, times

    def plan(self) -> list[Sequence]:
        """Plans the next token of sequences that decode; the last by rank give way where pages run out."""
        planned: list[Sequence] = []
        budget, block_size = self._limits.max_tokens_per_step, self._limits.block_size
        older: OlderSequences | None = None
        num_preemptions = self._counts.num_preemptions
        for sequence in self._decoding():
            position = sequence.num_computed + sequence.num_planned  # of its newest token, which may be coming
            if position + 1 >= sequence.max_length:
                continue  # it ends with that token, whatever it is
            if self._counts.num_preemptions > num_preemptions and sequence.sequence_id not in self._running.by_id:
                continue  # it was preempted just now
            if position % block_size == 0 and position == len(sequence.pages) * block_size:
                older = older or OlderSequences(self._waiting.equipped_in_turn(), self._waiting.is_of_one)
                if not self._grow(sequence, older):
                    continue
            sequence.num_planned += 1
            sequence.num_coming += 1
            planned.append(sequence)
            if len(planned) == budget:
                break
        if self._counts.num_preemptions > num_preemptions:
            planned = [sequence for sequence in planned if sequence.sequence_id in self._running.by_id]
        self._charge_tokens(planned)
        return planned

    def _grow(self, sequence: Sequence, older: OlderSequences) -> bool:
        """Gets a running sequence another page, if need be by preempting others.

        `older`: waiting sequences; of those that come before this one nothing is taken. False, if there is no page.
        """
        if not self._memory.allocator.num_free:
            older.reach_running(sequence)
        while not self._memory.make_room(1, older.wanted):
            victim = choose_victim(self._running.last, sequence)
            if victim is not None:
                self._preempt(victim)
            elif self._memory.make_room(1, keep=frozenset()):
                break  # an older sequence's adapter went; else the two sequences would wait for each other
            else:
                return False
        sequence.grow(self._memory.allocator.allocate(1) or ())
        self._times.grow(sequence.held, 1)
        return True

    def _decoding(self) -> list[Sequence]:
        """Sequences that decode, oldest first; if a step has not tokens for all, whoever was served least is first."""
        decoding = self._running.decoding[:]
        if len(decoding) > self._limits.max_tokens_per_step:
            decoding.sort(key=lambda each: (each.standing.is_background, each.standing.counter, each.arrival))
        return decoding

    def _charge_tokens(self, sequences: list[Sequence]) -> None:
        """Each of them gets a token."""
        if len(self._running.by_standing) == 1 and sequences:
            self._standings.charge(sequences[0].standing, OUTPUT_TOKEN * len(sequences))
        else:
            for standing, number in Counter([sequence.standing for sequence in sequences]).items():
                self._standings.charge(standing, OUTPUT_TOKEN * number)
