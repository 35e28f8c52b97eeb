"""The tokens of one sequence that one plan computes, from the making of the plan until its result is committed."""

from __future__ import annotations

import msgspec

from ..plan import SampledToken, SequencePlan, packed
from .sequence import Sequence

_UNKNOWN = 0  # stands for the token that the plan before chooses, until the plan is settled


class PlannedTokens:
    """Remembers what a plan asks of a sequence, and whether that still holds when the plan's result comes.

    At most one of the tokens is unknown when the plan is made: the one that the plan before it chooses.
    """

    def __init__(self, sequence: Sequence, num_tokens: int) -> None:
        """Plans the next tokens of the sequence, after those that other plans compute."""
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
    def is_stale(self) -> bool:
        """The sequence was preempted or cancelled after the plan was made: the plan's result means nothing to it."""
        return self.sequence.run != self._run

    def sequence_plan(self) -> SequencePlan:
        """The sequence's part of the plan, as it is when the plan is made."""
        sequence = self.sequence
        return SequencePlan(
            sequence.sequence_id,
            self._token_ids,
            self._start,
            packed(sequence.pages),
            sequence.adapter_digest,
            self._sample,
        )

    def settled(self, sequence_plan: SequencePlan, token: SampledToken | None) -> SequencePlan:
        """The sequence's part of the plan with the token that the plan before has chosen."""
        if not self.lacks_token:
            return sequence_plan
        assert token is not None
        token_ids = (*sequence_plan.token_ids[:-1], token.token_id)
        return msgspec.structs.replace(sequence_plan, token_ids=token_ids)

    def commit(self) -> None:
        """The tokens are computed. The caller appends the token that the plan chose, if it chose one."""
        self.sequence.num_computed += len(self._token_ids)
        self.sequence.num_planned -= len(self._token_ids)
        self.sequence.num_coming -= self._sample is not None
