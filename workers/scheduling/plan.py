"""What a step computes, as plain data: the leader's scheduler makes plans, workers obey them, nothing else passes.

A plan says everything that its step needs, so a worker keeps nothing of a sequence between steps but its KV pages.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..messages import SamplingParams, TokenLogprobs


@dataclass(frozen=True)
class Residence:
    """An adapter in the pool."""

    digest: str
    module_ranks: dict[str, int]
    pages: tuple[int, ...]


@dataclass(frozen=True)
class AdapterLoad:
    """Copy an adapter into its pages, beside the steps. A later result says that it is there, or why not."""

    residence: Residence


@dataclass(frozen=True)
class SamplePlan:
    """Choose one token after the sequence's last row."""

    params: SamplingParams
    seed: int  # the sequence's own, 64 bits
    index: int  # of the token among the sequence's generated ones; (seed, index) fixes the draw
    prompt_token_ids: tuple[int, ...]  # both empty unless a penalty needs them
    output_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class SequencePlan:
    """Compute these tokens of a sequence, writing their KV, and choose the next one if `sample` is there."""

    sequence_id: int
    token_ids: tuple[int, ...]
    start: int  # position of the first of them
    pages: tuple[int, ...]  # all of the sequence's pages, enough for these tokens
    adapter: str | None  # digest
    sample: SamplePlan | None  # None: a prompt chunk that is not the last


@dataclass(frozen=True)
class StepPlan:
    step: int
    sequences: tuple[SequencePlan, ...]
    adapters: tuple[Residence, ...]  # those that the sequences use
    loads: tuple[AdapterLoad, ...]


@dataclass(frozen=True)
class SampledToken:
    token_id: int
    logprobs: TokenLogprobs | None


@dataclass(frozen=True)
class AdapterFailure:
    digest: str
    message: str


@dataclass(frozen=True)
class StepResult:
    """What came of a plan. Loads are those that ended since the last result, whichever plan asked for them."""

    step: int
    tokens: dict[int, SampledToken | None]  # by sequence id; None: its logits are not finite
    loaded: tuple[str, ...]  # digests
    failed: tuple[AdapterFailure, ...]
