"""Running sequences by arrival: those that decode, those with prompt left to compute, and each tenant's."""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping, Sequence

import msgspec

from ..fairness.prompt_budget import PromptBursts, Rank, may_grow_over, should_preempt
from ..fairness.tenant_counters import TenantCounter, prompt_price
from ..plan import SampledToken, SamplePlan, SequencePlan
from .growing_sequence import GrowingSequence, StateSnapshot, by_arrival, remove_by_arrival
from .page_reserve import PageReserve

# The sequences of one plan, from its making until its result is committed.


class PlannedChunk(msgspec.Struct, gc=False):
    """A part of a prompt in a plan."""

    sequence: GrowingSequence
    part: SequencePlan  # the sequence's part of the plan
    snapshots: Sequence[StateSnapshot] = ()


class PlannedStep:
    """The next token of sequences that decode, and chunks of prompts.

    The token that a decoding sequence computes may be unknown when the plan is made, as the plan before it chooses it.
    So its part of the plan is made once the token is known, and nothing before, since thousands may decode.
    """

    def __init__(
        self,
        decodes: list[GrowingSequence],
        chunks: list[PlannedChunk],
        beams: list[GrowingSequence] | None = None,
        snapshots: Sequence[StateSnapshot] = (),
    ) -> None:
        """`beams`: beams of searches, whose newest tokens are known. `snapshots`: of states of decodes."""
        self.decodes, self.chunks, self.beams = decodes, chunks, beams or []
        self.prompts = [(chunk.part.start, len(chunk.part.token_ids)) for chunk in chunks]  # first position, tokens
        self.snapshots = [*snapshots, *[state for chunk in chunks for state in chunk.snapshots]]
        self.num_tokens = 0  # of all parts
        self.late: set[GrowingSequence] = set()  # sequences that were dropped from the step: their masks were late
        self.drops: set[GrowingSequence] = set()  # preempted or cancelled since: their results are dropped

    def parts(self, chosen: Mapping[int, SampledToken | None] | None) -> tuple[SequencePlan, ...]:
        """The parts of all sequences in the plan, without those that are gone or have ended.

        `chosen`: tokens of the plan before, which is not committed yet, by sequence id. None: they are fed on the
        device; what is computed after a token that ends its sequence is discarded.
        """
        drops, decodes, parts = self.drops, self.decodes, list[SequencePlan]()
        if drops:
            decodes = [sequence for sequence in decodes if sequence not in drops]
        self.decodes = going_on = list[GrowingSequence]()
        for sequence in decodes:
            start = sequence.num_computed + sequence.num_planned - 1
            is_fed = False
            if sequence.num_coming == 1:  # the plan before chooses none for it
                token_id = sequence.token_ids[start]
            elif chosen is None:
                token_id, is_fed = 0, True
            else:
                token = chosen.get(sequence.sequence_id)
                if token is None or (token_id := token.token_id) in sequence.stop_ids:
                    continue
            going_on.append(sequence)
            sample: SamplePlan | None
            if sequence.is_pooled:
                sample = None
            elif sequence.has_penalty and not sequence.tokens_sent:
                assert not is_fed, "the plan before has chosen the first token of this run"
                sample = sequence.sample_plan([*sequence.token_ids[:start], token_id])
            else:
                index = start + 1 - sequence.num_prompt_tokens
                sample = SamplePlan(sequence.sampling, sequence.seed, index, None, sequence.is_constrained)
            digest = sequence.adapter_digest
            pages = sequence.packed_pages
            pool = sequence.pool_plan(start, start + 1) if sequence.is_pooled else None
            parts.append(
                SequencePlan(
                    sequence.sequence_id,
                    (token_id,),
                    start,
                    pages,
                    digest,
                    sample,
                    is_fed,
                    None,
                    pool,
                    sequence.state_plan(start),
                )
            )
        if drops:
            self.beams = [sequence for sequence in self.beams if sequence not in drops]
        parts += map(_beam_part, self.beams)
        if drops:
            self.chunks = [chunk for chunk in self.chunks if chunk.sequence not in drops]
            self.prompts = [(chunk.part.start, len(chunk.part.token_ids)) for chunk in self.chunks]
        self.num_tokens = len(parts) + sum([number for _, number in self.prompts])
        return (*parts, *[chunk.part for chunk in self.chunks])


def _beam_part(sequence: GrowingSequence) -> SequencePlan:
    start = sequence.num_computed + sequence.num_planned - 1
    sample = SamplePlan(sequence.sampling, sequence.seed, start + 1 - sequence.num_prompt_tokens)
    token_ids, pages = (sequence.token_ids[start],), sequence.packed_pages
    state = sequence.state_plan(start)
    return SequencePlan(sequence.sequence_id, token_ids, start, pages, sequence.adapter_digest, sample, state=state)


def plan_chunk(sequence: GrowingSequence, num_tokens: int, snapshots: Sequence[StateSnapshot] = ()) -> PlannedChunk:
    """Plans the next tokens of a prompt, after those in earlier plans. `snapshots`: states that are kept on the way."""
    start = sequence.num_computed + sequence.num_planned
    end = start + num_tokens
    sample = None
    if end == len(sequence.token_ids):
        sample = None if sequence.is_pooled else sequence.sample_plan(sequence.token_ids)
        sequence.num_coming += sequence.beams is None  # beams get their tokens when all have been computed
    token_ids = tuple(sequence.token_ids[start:end])
    assert len(token_ids) == num_tokens, "a prompt lacks no token"
    sequence.num_planned += num_tokens
    pages, digest = sequence.packed_pages, sequence.adapter_digest
    if start < (adapter_start := sequence.key_chain.start or 0):
        assert end <= adapter_start, "a chunk is computed by one adapter, or by the base"
        digest = None
    scores = pool = None
    if not sequence.is_scored:
        scores, pool = sequence.score_plan(start, end), sequence.pool_plan(start, end)
    part = SequencePlan(
        sequence.sequence_id,
        token_ids,
        start,
        pages,
        digest,
        sample,
        scores=scores,
        pool=pool,
        state=sequence.state_plan(start, [each for each in snapshots if each.position > start]),
    )
    return PlannedChunk(sequence, part, snapshots)


class RunningSequences:
    """All lists are kept in order, so that a step sorts nothing."""

    def __init__(self, reserve: PageReserve, bursts: PromptBursts) -> None:
        self.reserve = reserve  # what they are expected to need
        self._bursts = bursts
        self.by_id: dict[int, GrowingSequence] = {}
        self.decoding: list[GrowingSequence] = []  # the next plan can compute one token of each; oldest first
        self.prompts: list[GrowingSequence] = []  # the next plan can compute more than one; oldest first
        self.by_tenant: dict[TenantCounter, list[GrowingSequence]] = {}  # oldest first
        self.penalised: dict[int, None] = {}  # ids of those with penalties
        self.num_background = 0  # sequences
        self.num_beams = 0
        self.num_places = 0  # that they take of those for sequences that run at once
        self.num_uncomputed = 0  # tokens of all; the scheduler updates it as it commits
        self.removed: list[int] = []  # ids of those that no plan has named as removed yet

    def __len__(self) -> int:
        return len(self.by_id)

    @property
    def last(self) -> GrowingSequence | None:
        """The first to be preempted: the newest of the tenant that is furthest ahead; None: none runs."""
        return max([sequences[-1] for sequences in self.by_tenant.values()], key=self.rank, default=None)

    def rank(self, sequence: GrowingSequence) -> Rank:
        """Order of preemption: of running sequences, the least is preempted last.

        A tenant's counter as of the start of its newest run decides: of tenants that are about equal the one that
        started last loses least. It does not change during the run, so the first in this order ends its run.
        """
        counter, sequences = sequence.counter, self.by_tenant.get(sequence.counter)
        return (counter.is_background, sequences[-1].counter_at_start if sequences else counter.value, sequence.arrival)

    def last_ahead_of(self, waiting: Rank, slack: float) -> GrowingSequence | None:
        """The sequence to preempt for a waiting one, which is behind if its counter is less by more than `slack`.

        What a tenant would lose with a sequence is not service yet, and puts it ahead of no other. So a prompt is not
        thrown away because computing it has put its tenant ahead.
        """
        newest = [
            sequences[-1]
            for counter, sequences in self.by_tenant.items()
            if should_preempt((counter.is_background, counter.value, 0), waiting, slack)  # even without what it loses
        ]
        return max(
            [each for each in newest if should_preempt(_served(each), waiting, slack)], key=self.rank, default=None
        )

    def victim_for(self, needy: GrowingSequence) -> GrowingSequence | None:
        """The sequence to preempt for a running one that needs pages; None: that one has to wait."""
        last = self.last
        return last if last is not None and may_grow_over(self.rank(last), self.rank(needy)) else None

    def add(self, sequence: GrowingSequence) -> None:
        """A sequence that nothing is planned for yet."""
        assert sequence.sequence_id not in self.by_id, f"sequence {sequence.sequence_id} runs already"
        self.by_id[sequence.sequence_id] = sequence
        self.reserve.add(sequence)
        if sequence.has_penalty:
            self.penalised[sequence.sequence_id] = None
        self.num_uncomputed += sequence.num_uncomputed
        self.num_background += sequence.counter.is_background
        self.num_places += sequence.num_places
        self.num_beams += sequence.beams is not None
        insort(self.by_tenant.setdefault(sequence.counter, []), sequence, key=by_arrival)
        is_prompt = not _ends(sequence)
        insort(self.prompts if is_prompt else self.decoding, sequence, key=by_arrival)
        self._bursts.change(sequence.counter, is_prompt, not is_prompt)

    def remove(self, sequence: GrowingSequence) -> None:
        """The sequence must be here."""
        del self.by_id[sequence.sequence_id]
        self.removed.append(sequence.sequence_id)
        self.reserve.remove(sequence)
        self.penalised.pop(sequence.sequence_id, None)
        self.num_uncomputed -= sequence.num_uncomputed
        self.num_background -= sequence.counter.is_background
        self.num_places -= sequence.num_places
        self.num_beams -= sequence.beams is not None
        sequences = self.by_tenant[sequence.counter]
        remove_by_arrival(sequences, sequence)
        if not sequences:
            del self.by_tenant[sequence.counter]
        is_prompt = not _ends(sequence)
        remove_by_arrival(self.prompts if is_prompt else self.decoding, sequence)
        self._bursts.change(sequence.counter, -is_prompt, is_prompt - 1)

    def set_places(self, sequence: GrowingSequence, num_places: int) -> None:
        """The running sequence takes so many places from now on."""
        if num_places == sequence.num_places:
            return
        self.reserve.remove(sequence)
        self.num_places += num_places - sequence.num_places
        sequence.num_places = num_places
        self.reserve.add(sequence)

    def take_removed(self) -> tuple[int, ...]:
        """Ids of the sequences that were removed since the last call."""
        removed, self.removed = tuple(self.removed), []
        return removed

    def end_prompts(self) -> None:
        """Moves prompts with at most one unplanned token to `decoding`, unless a state is to be kept before it."""
        for sequence in [each for each in self.prompts if _ends(each)]:
            remove_by_arrival(self.prompts, sequence)
            insort(self.decoding, sequence, key=by_arrival)
            self._bursts.change(sequence.counter, -1, 1)

    def check_integrity(self) -> None:
        """Raises AssertionError if a sequence is in the wrong list, or a list out of order."""
        for sequences in (self.decoding, self.prompts, *self.by_tenant.values()):
            arrivals = [sequence.arrival for sequence in sequences]
            assert arrivals == sorted(set(arrivals)), "running sequences are out of order"
        assert {s.sequence_id: s for s in (*self.decoding, *self.prompts)} == self.by_id, "ids and lists differ"
        assert self.last is max(self.by_id.values(), key=self.rank, default=None)
        assert all(each.counter is of for of, sequences in self.by_tenant.items() for each in sequences)
        assert sum(map(len, self.by_tenant.values())) == len(self.by_id) and all(self.by_tenant.values())
        self.reserve.check_integrity(self.by_id.values())
        assert self.penalised.keys() == {i for i, s in self.by_id.items() if s.has_penalty}
        assert self.num_background == sum(s.counter.is_background for s in self.by_id.values())
        assert self.num_uncomputed == sum(s.num_uncomputed for s in self.by_id.values()), "tokens are miscounted"
        assert self.num_beams == sum(s.beams is not None for s in self.by_id.values())
        assert self.num_places == sum(s.num_places for s in self.by_id.values())
        for sequence in self.decoding:  # beams wait for each other
            min_unplanned = 1 if sequence.beams is None else 0
            assert min_unplanned <= sequence.num_unplanned <= 1, "a sequence decodes, and has other tokens to compute"
        assert not any(_ends(s) for s in self.prompts), "a prompt has no tokens left"


def _served(sequence: GrowingSequence) -> Rank:
    """What its tenant was served without what the sequence would lose, as a rank."""
    counter = sequence.counter
    return counter.is_background, counter.value - prompt_price(sequence.num_to_lose) / counter.weight, sequence.arrival


def _ends(prompt: GrowingSequence) -> bool:
    """At most one token is unplanned, and may be computed like those of an answer, with which no state is kept."""
    return prompt.num_unplanned <= 1 and not prompt.keeps_state(prompt.next_position)
