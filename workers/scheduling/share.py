"""A sequence's part of a plan that is under way."""

from __future__ import annotations

import msgspec

from ..plan import SampledToken, SequencePlan
from .sequence import Sequence

_UNKNOWN = 0  # stands for a token that is still coming, until the plan is settled


class Share:
    """Remembers what a plan asks of a sequence, and whether it still is about that sequence when the result comes.

    At most one token of a plan is unknown when the plan is made: the one that the plan before it chooses.
    """

    def __init__(self, sequence: Sequence, num_tokens: int) -> None:
        """Takes the next tokens of a sequence that no plan computes yet."""
        self.sequence = sequence
        self._run = sequence.run
        self._start = sequence.num_computed + sequence.num_planned
        end = self._start + num_tokens
        self.lacks_token = end > len(sequence.token_ids)
        is_last = end == len(sequence.token_ids) + sequence.num_coming
        self._sample = sequence.sample_plan() if is_last else None
        known = sequence.token_ids[self._start : end]
        self._token_ids = (*known, _UNKNOWN) if self.lacks_token else tuple(known)
        assert len(self._token_ids) == num_tokens
        sequence.num_planned += num_tokens
        sequence.num_coming += is_last

    @property
    def is_void(self) -> bool:
        """The sequence has stopped running since."""
        return self.sequence.run != self._run

    def planned(self) -> SequencePlan:
        sequence = self.sequence
        return SequencePlan(
            sequence.sequence_id,
            self._token_ids,
            self._start,
            tuple(sequence.pages),
            sequence.adapter_digest,
            self._sample,
        )

    def settled(self, planned: SequencePlan, token: SampledToken | None) -> SequencePlan:
        """The plan with the token that was coming."""
        if not self.lacks_token:
            return planned
        assert token is not None
        sample = planned.sample
        if sample is not None and sample.prompt_token_ids:  # a penalty needs all tokens
            output_token_ids = (*sample.output_token_ids, token.token_id)
            sample = msgspec.structs.replace(sample, output_token_ids=output_token_ids)
        token_ids = (*planned.token_ids[:-1], token.token_id)
        return msgspec.structs.replace(planned, token_ids=token_ids, sample=sample)

    def take_in(self, planned: SequencePlan) -> None:
        """The tokens are computed; one that was chosen is the caller's to append."""
        self.sequence.num_computed += len(planned.token_ids)
        self.sequence.num_planned -= len(planned.token_ids)
        self.sequence.num_coming -= planned.sample is not None
