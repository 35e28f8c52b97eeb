"""Running sequences by arrival: those that decode, those with prompt left to compute, and each tenant's."""

from __future__ import annotations

from bisect import insort
from operator import attrgetter

from ..fairness.tenant_counters import TenantCounter
from .growing_sequence import GrowingSequence, by_arrival, remove_by_arrival
from .page_reserve import PageReserve

_rank = attrgetter("rank")


class RunningSequences:
    """All lists are kept in order, so that a step sorts nothing."""

    def __init__(self, reserve: PageReserve) -> None:
        self.reserve = reserve  # what they are expected to need
        self.by_id: dict[int, GrowingSequence] = {}
        self.decoding: list[GrowingSequence] = []  # the next plan can compute one token of each; oldest first
        self.prompts: list[GrowingSequence] = []  # the next plan can compute more than one; oldest first
        self.by_tenant: dict[TenantCounter, list[GrowingSequence]] = {}  # oldest first
        self.penalised: dict[int, None] = {}  # ids of those with penalties
        self.num_background = 0  # sequences
        self.num_uncomputed = 0  # tokens of all; the scheduler updates it as it commits

    def __len__(self) -> int:
        return len(self.by_id)

    @property
    def last(self) -> GrowingSequence | None:
        """The first to be preempted: the newest of the tenant that is furthest ahead; None: none runs."""
        return max([sequences[-1] for sequences in self.by_tenant.values()], key=_rank, default=None)

    def add(self, sequence: GrowingSequence) -> None:
        """A sequence that nothing is planned for yet."""
        assert sequence.sequence_id not in self.by_id, f"sequence {sequence.sequence_id} runs already"
        self.by_id[sequence.sequence_id] = sequence
        self.reserve.add(sequence)
        if sequence.has_penalty:
            self.penalised[sequence.sequence_id] = None
        self.num_uncomputed += sequence.num_uncomputed
        self.num_background += sequence.counter.is_background
        insort(self.by_tenant.setdefault(sequence.counter, []), sequence, key=by_arrival)
        insort(self.prompts if sequence.num_unplanned > 1 else self.decoding, sequence, key=by_arrival)

    def remove(self, sequence: GrowingSequence) -> None:
        """The sequence must be here."""
        del self.by_id[sequence.sequence_id]
        self.reserve.remove(sequence)
        self.penalised.pop(sequence.sequence_id, None)
        self.num_uncomputed -= sequence.num_uncomputed
        self.num_background -= sequence.counter.is_background
        own = self.by_tenant[sequence.counter]
        remove_by_arrival(own, sequence)
        if not own:
            del self.by_tenant[sequence.counter]
        remove_by_arrival(self.prompts if sequence.num_unplanned > 1 else self.decoding, sequence)

    def end_prompts(self) -> None:
        """Moves prompts with at most one unplanned token to `decoding`."""
        for sequence in [each for each in self.prompts if each.num_unplanned <= 1]:
            remove_by_arrival(self.prompts, sequence)
            insort(self.decoding, sequence, key=by_arrival)

    def check_integrity(self) -> None:
        """Raises AssertionError if a sequence is in the wrong list, or a list out of order."""
        for sequences in (self.decoding, self.prompts, *self.by_tenant.values()):
            arrivals = [sequence.arrival for sequence in sequences]
            assert arrivals == sorted(set(arrivals)), "running sequences are out of order"
        assert {s.sequence_id: s for s in (*self.decoding, *self.prompts)} == self.by_id, "ids and lists differ"
        assert self.last is max(self.by_id.values(), key=_rank, default=None)
        assert all(each.counter is of for of, sequences in self.by_tenant.items() for each in sequences)
        assert sum(map(len, self.by_tenant.values())) == len(self.by_id) and all(self.by_tenant.values())
        self.reserve.check_integrity(self.by_id.values())
        assert self.penalised.keys() == {i for i, s in self.by_id.items() if s.has_penalty}
        assert self.num_background == sum(s.counter.is_background for s in self.by_id.values())
        assert self.num_uncomputed == sum(s.num_uncomputed for s in self.by_id.values()), "tokens are miscounted"
        assert all(s.num_unplanned == 1 for s in self.decoding), "a sequence decodes, and has other tokens to compute"
        assert all(s.num_unplanned > 1 for s in self.prompts), "a prompt has no tokens left"
