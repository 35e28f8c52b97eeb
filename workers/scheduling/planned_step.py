"""The sequences of one plan, from its making until its result is committed."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ..plan import SampledToken, SamplePlan, SequencePlan
from .growing_sequence import GrowingSequence


class PlannedChunk(msgspec.Struct, gc=False):
    """A part of a prompt in a plan."""

    sequence: GrowingSequence
    part: SequencePlan  # the sequence's part of the plan


class PlannedStep:
    """The next token of sequences that decode, and chunks of prompts.

    The token that a decoding sequence computes may be unknown when the plan is made, as the plan before it chooses it.
    So its part of the plan is made once the token is known, and nothing before, since thousands may decode.
    """

    def __init__(
        self, decodes: list[GrowingSequence], chunks: list[PlannedChunk], beams: list[GrowingSequence] | None = None
    ) -> None:
        """`beams`: beams of searches, whose newest tokens are known."""
        self.decodes, self.chunks, self.beams = decodes, chunks, beams or []
        self.late: set[GrowingSequence] = set()  # sequences that were dropped from the step: their masks were late
        self.gone: set[GrowingSequence] = set()  # preempted or cancelled since: their results are dropped

    def prompts(self) -> list[tuple[int, int]]:
        """First position and number of tokens of each chunk."""
        return [(chunk.part.start, len(chunk.part.token_ids)) for chunk in self.chunks]

    def parts(self, chosen: Mapping[int, SampledToken | None] | None) -> tuple[SequencePlan, ...]:
        """The parts of all sequences in the plan, without those that are gone or have ended.

        `chosen`: tokens of the plan before, which is not committed yet, by sequence id. None: they are fed on the
        device; what is computed after a token that ends its sequence is discarded.
        """
        gone, decodes, parts = self.gone, self.decodes, list[SequencePlan]()
        if gone:
            decodes = [sequence for sequence in decodes if sequence not in gone]
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
                SequencePlan(sequence.sequence_id, (token_id,), start, pages, digest, sample, is_fed, pool=pool)
            )
        if gone:
            self.beams = [sequence for sequence in self.beams if sequence not in gone]
        parts += map(_beam_part, self.beams)
        if gone:
            self.chunks = [chunk for chunk in self.chunks if chunk.sequence not in gone]
        return (*parts, *[chunk.part for chunk in self.chunks])


def _beam_part(sequence: GrowingSequence) -> SequencePlan:
    start = sequence.num_computed + sequence.num_planned - 1
    sample = SamplePlan(sequence.sampling, sequence.seed, start + 1 - sequence.num_prompt_tokens)
    token_ids, pages = (sequence.token_ids[start],), sequence.packed_pages
    return SequencePlan(sequence.sequence_id, token_ids, start, pages, sequence.adapter_digest, sample)


def plan_chunk(sequence: GrowingSequence, num_tokens: int) -> PlannedChunk:
    """Plans the next tokens of a prompt, after those in earlier plans."""
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
    scores, pool = sequence.score_plan(start, end), sequence.pool_plan(start, end)
    part = SequencePlan(sequence.sequence_id, token_ids, start, pages, digest, sample, scores=scores, pool=pool)
    return PlannedChunk(sequence, part)
