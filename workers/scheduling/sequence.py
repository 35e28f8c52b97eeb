"""A sequence: one growing token list. The scheduler owns its state."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from ..plan import SamplePlan, SeenTokens, packed
from ..wire.messages import SamplingParams, SequenceRequest
from ..wire.page_keys import PageKey


@dataclass(eq=False)
class Sequence:
    request: SequenceRequest
    arrival: int  # order of arrival; smaller is older
    seed: int
    token_ids: list[int]  # prompt, then generated, here or before
    num_computed: int = 0  # tokens whose KV is in `pages`
    num_planned: int = 0  # tokens that uncommitted plans compute
    num_coming: int = 0  # tokens that uncommitted plans choose
    run: int = 0  # number of its run: plans that were made in an earlier run are stale
    told_run: int = -1  # the last run of which workers were told the tokens, if it has penalties
    pages: array[int] = field(default_factory=lambda: array("i"))
    page_keys: list[PageKey] = field(default_factory=list)  # of its first full pages, as far as keys were needed
    num_kept_pages: int = 0  # its first pages that the prefix cache has been told of
    num_found: int = 0  # tokens that the last look-up of its prefix found in the pool
    num_cached_tokens: int | None = None  # of its prompt, that its first run did not compute; None: it has not run yet
    was_looked_up: bool = False  # its prefix, in the pool and behind it, since it last began to wait
    began_at: float | None = None  # when a step was first planned for it, by the scheduler's clock; None: not yet
    awaited_key: PageKey | None = None  # of the first page that the last look-up did not find in the pool
    # Pages of its prefix that are in the pool or coming, while copies come for it; None: no more of them should come.
    num_brought: int | None = None
    has_penalty: bool = field(init=False)

    def __post_init__(self) -> None:
        self.has_penalty = self.sampling.has_penalty

    @property
    def sequence_id(self) -> int:
        return self.request.sequence_id

    @property
    def sampling(self) -> SamplingParams:
        return self.request.sampling

    @property
    def adapter_digest(self) -> str | None:
        return None if self.request.adapter is None else self.request.adapter.digest

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed(self) -> int:
        return len(self.token_ids) - self.num_computed

    @property
    def num_unplanned(self) -> int:
        """Tokens that the next plan could compute; the last of them may still be coming."""
        return len(self.token_ids) + self.num_coming - self.num_computed - self.num_planned

    def sample_plan(self) -> SamplePlan:
        """How to choose the next token that no plan chooses yet."""
        seen = None
        if self.has_penalty and self.told_run != self.run:
            assert not self.num_coming, "the first token that a run chooses follows on known ones"
            self.told_run, split = self.run, self.num_prompt_tokens
            prompt = self.token_ids[:split] if self.sampling.repetition_penalty != 1 else ()
            seen = SeenTokens(packed(prompt), packed(self.token_ids[split:]))
        return SamplePlan(self.sampling, self.seed, self.num_generated + self.num_coming, seen)
