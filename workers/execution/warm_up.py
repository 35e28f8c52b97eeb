"""The steps that a worker computes before it is ready, so that no request waits for a compiler.

Kernels that are compiled for the shapes that they meet choose among few of them, by how many rows, sequences, tiles or
keys there are: each choice changes at most once where such a number doubles. A ladder of powers of two along each of
them, to its end, therefore meets every choice that requests can, where the other numbers are as large as they get.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from ...kernels.sampling import EXAMPLE_PARAMS
from ..plan import Residence, SamplePlan, ScorePlan, SequencePlan, StepPlan, packed
from ..wire.messages import SamplingParams, TokenRules

_LONG_SEGMENT = 257  # rows with one adapter, for which LoRA's kernels take taller tiles
_MOST_TOP = 20  # likeliest tokens that a request may ask for
_SAMPLE = SamplePlan(SamplingParams(temperature=0.0), 0, 0)
# Uses every way to choose tokens that a request can ask for.
ALL_WAYS = SamplePlan(
    SamplingParams(
        **msgspec.structs.asdict(EXAMPLE_PARAMS),
        seed=0,
        logit_bias={0: 1.0},
        rules=TokenRules(allowed_token_ids=(0, 1, 2)),
        num_logprobs=5,
    ),
    0,
    0,
)


@dataclass(frozen=True)
class Rows:
    """Some tokens of a sequence that has `start` already. `adapter`: its number."""

    num_tokens: int
    start: int
    adapter: int


@dataclass(frozen=True)
class WarmUpLimits:
    """The largest sizes of steps."""

    max_tokens: int
    max_sequences: int
    longest: int  # tokens of a sequence


def warm_up_steps(limits: WarmUpLimits) -> Iterator[tuple[Rows, ...]]:
    """Steps that make each kernel compile all its variants."""
    max_prompt_tokens = min(limits.max_tokens, limits.max_sequences * limits.longest)
    for num_tokens in doubled(2, max_prompt_tokens):
        yield tuple(_chunks(num_tokens, limits))
    decodes = min(limits.max_tokens, limits.max_sequences)
    starts = [context - 1 for context in doubled(1, limits.longest)]
    # Decodes outside of graphs, as prompts of one token are: alone, with a long chunk, with a short one.
    for count in doubled(1, decodes):
        yield tuple(_decodes(count, limits))
    for start in starts:
        yield (Rows(1, start, 0),)
    for count in doubled(1, decodes - 1):
        chunk = tuple(_chunks(max(min(_LONG_SEGMENT, max_prompt_tokens - count), 2), limits))
        room = min(count, limits.max_tokens - sum(rows.num_tokens for rows in chunk), limits.max_sequences - len(chunk))
        if room > 0:
            yield (*chunk, *_decodes(room, limits, first_adapter=1))
    if decodes > 1 and limits.max_tokens > 2 and limits.longest > 1:
        for start in starts:
            yield (Rows(2, 0, 0), Rows(1, start, 1))


def largest_steps(limits: WarmUpLimits) -> Iterator[tuple[Rows, ...]]:
    """The steps that take the most memory: the most prompt tokens, then a token of each sequence."""
    yield tuple(_chunks(min(limits.max_tokens, limits.max_sequences * limits.longest), limits))
    yield (Rows(1, 0, 0),) * min(limits.max_tokens, limits.max_sequences)


def doubled(first: int, last: int) -> Iterator[int]:
    """`first` times each power of two below `last`, then `last`; nothing if that is less than `first`."""
    number = first
    while number < last:
        yield number
        number *= 2
    if last >= first:
        yield last


def as_plan(
    step: tuple[Rows, ...], number: int, block_size: int, adapters: Sequence[Residence], num_scored: int = 0
) -> StepPlan:
    """A plan of new sequences that all write to the pool's first page, which is never read. Each gets a token.

    `number`: of the step. `adapters`: as many as there may be sequences. `num_scored`: rows of the first sequence whose
    tokens are scored, if it has so many.
    """
    sequences = []
    for index, rows in enumerate(step):
        num_pages = -(-(rows.start + rows.num_tokens) // block_size)
        sequence_id = number * len(adapters) + index
        digest, tokens = adapters[rows.adapter].digest, (0,) * rows.num_tokens
        num_scores = min(num_scored, rows.num_tokens - 1) if index == 0 else 0
        scores = ScorePlan(_MOST_TOP, 0, packed([0]) * num_scores) if num_scores else None
        pages = packed([0]) * num_pages
        sequences.append(SequencePlan(sequence_id, tokens, rows.start, pages, digest, _SAMPLE, scores=scores))
    used = {sequence.adapter for sequence in sequences}
    return StepPlan(number, tuple(sequences), tuple(each for each in adapters if each.digest in used), ())


def _decodes(count: int, limits: WarmUpLimits, first_adapter: int = 0) -> Iterator[Rows]:
    """As many sequences, on an adapter each. Kernels choose by the longest, so one is as long as can be, and no other:
    tables of them all would take minutes and memory that no request asks for."""
    for index in range(count):
        yield Rows(1, limits.longest - 1 if index == 0 else 0, first_adapter + index)


def _chunks(num_tokens: int, limits: WarmUpLimits) -> Iterator[Rows]:
    """Prompts of `num_tokens` together, on one adapter, in as few sequences as can be."""
    for _ in range(limits.max_sequences):
        length = min(num_tokens, limits.longest)
        if length > 0:
            yield Rows(length, 0, 0)
        num_tokens -= length
