"""A sequence: one growing token list. The scheduler owns its state."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

from ..fairness.page_times import HeldPages
from ..fairness.preemption import Rank
from ..fairness.standing import Standing
from ..plan import Int32s, SamplePlan, SeenTokens, packed
from ..wire.messages import SamplingParams, SequenceRequest
from ..wire.page_keys import PageKey
from ..wire.sequence_usage import SequenceUsage


@dataclass(eq=False, slots=True, weakref_slot=True)
class Sequence:
    """What follows from the request is kept beside it: thousands of sequences are looked at in every step."""

    request: SequenceRequest
    arrival: int  # its place in its tenant's order, by priority and age; smaller is older
    seed: int
    token_ids: list[int]  # prompt, then generated, here or before
    stop_ids: frozenset[int] = frozenset()  # tokens that end it
    max_length: int = sys.maxsize  # it ends with so many tokens at the latest
    num_computed: int = 0  # tokens whose KV is in `pages`
    num_planned: int = 0  # tokens that uncommitted plans compute
    num_coming: int = 0  # tokens that uncommitted plans choose
    pages: tuple[int, ...] = ()  # changed by `hold` and `grow`
    packed_pages: Int32s = b""  # the same as plans carry them, which is made when pages are added and not in every step
    sequence_id: int = field(init=False)
    sampling: SamplingParams = field(init=False)
    adapter_digest: str | None = field(init=False)  # None: the base
    num_prompt_tokens: int = field(init=False)
    num_given_tokens: int = field(init=False)  # tokens that it came with
    has_penalty: bool = field(init=False)
    standing: Standing = field(default_factory=Standing)  # its tenant's
    held: HeldPages = field(init=False)  # for how long it held pages
    # What is above is needed in every step, and lies side by side in memory.
    turn: tuple[bool, float, int] = (False, 0.0, 0)  # while it waits, as it was last looked at: the least goes first
    num_charged: int = 0  # its first tokens, which are not charged again when they are computed again
    num_counted: int = 0  # its first tokens, which its usage has counted: they are recomputed if they come again
    num_computed_prompt_tokens: int = 0  # for its usage, like the next two; all gangs included
    num_cached_prompt_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_generated_before: int = 0  # tokens, as counted by the gangs from which it came
    is_told: bool = False  # workers were told the tokens of its run, if it has penalties
    page_keys: list[PageKey] = field(default_factory=list)  # of its first full pages, as far as keys were needed
    num_kept_pages: int = 0  # its first pages that the prefix cache has been told of
    num_found: int = 0  # tokens that the last look-up of its prefix found in the pool
    num_cached_tokens: int | None = None  # of its prompt, that its first run did not compute; None: it has not run yet
    was_looked_up: bool = False  # its prefix, in the pool and behind it, since it last began to wait
    began_at: float | None = None  # when a step was first planned for it, by the scheduler's clock; None: not yet
    awaited_key: PageKey | None = None  # of the first page that the last look-up did not find in the pool
    awaits_page: PageKey | None = None  # it waits until somebody has computed or copied the page with this key
    num_reserved_pages: int = 0  # that it will take when the page has come that is being copied for it
    # Pages of its prefix that are in the pool or coming, while copies come for it; None: no more of them should come.
    num_brought: int | None = None

    def __post_init__(self) -> None:
        self.sequence_id = self.request.sequence_id
        self.adapter_digest = None if self.request.adapter is None else self.request.adapter.digest
        self.num_prompt_tokens = len(self.request.prompt_token_ids)
        self.num_given_tokens = len(self.token_ids)
        self.sampling = params = self.request.sampling
        self.has_penalty = params.has_penalty
        before = self.request.usage or SequenceUsage()
        self.held = HeldPages(before)
        self.num_computed_prompt_tokens = before.num_computed_prompt_tokens
        self.num_cached_prompt_tokens = before.num_cached_prompt_tokens
        self.num_recomputed_tokens = before.num_recomputed_tokens
        self.num_generated_before = max(before.num_generated_tokens, len(self.request.generated_token_ids))
        self.num_counted = min(self.num_computed_prompt_tokens + self.num_cached_prompt_tokens, self.num_prompt_tokens)
        if self.num_counted == self.num_prompt_tokens:  # all but the newest generated token have been computed too
            self.num_counted += max(0, self.num_generated_before - 1)

    @property
    def rank(self) -> Rank:
        """Of all that run, the least is the last to be preempted."""
        return (self.standing.is_background, self.standing.band, self.arrival)

    @property
    def turn_rank(self) -> Rank:
        """The rank that it would have now if it ran, after those of its tenant that come before it."""
        is_background, counter, arrival = self.turn
        return (is_background, int(counter // self.standing.slack), arrival)

    @property
    def num_uncomputed(self) -> int:
        return len(self.token_ids) - self.num_computed

    @property
    def num_unplanned(self) -> int:
        """Tokens that the next plan could compute; the last of them may still be coming."""
        return len(self.token_ids) + self.num_coming - self.num_computed - self.num_planned

    def hold(self, pages: tuple[int, ...]) -> None:
        """These are the sequence's pages from now on."""
        self.pages, self.packed_pages = pages, packed(pages)

    def grow(self, pages: tuple[int, ...]) -> None:
        """The sequence has these pages too, after its others."""
        self.pages += pages
        self.packed_pages += packed(pages)

    def count_cached(self) -> None:
        """Its run begins with `num_computed` tokens that need not be computed."""
        self.num_cached_prompt_tokens += max(0, min(self.num_computed, self.num_prompt_tokens) - self.num_counted)
        self.num_counted = max(self.num_counted, self.num_computed)

    def count_computed(self, num_tokens: int) -> None:
        """So many tokens after the first `num_computed` were computed."""
        start, end = self.num_computed, self.num_computed + num_tokens
        self.num_recomputed_tokens += max(0, min(end, self.num_counted) - start)
        if end > self.num_counted:
            new_start = max(start, self.num_counted)
            self.num_computed_prompt_tokens += max(0, min(end, self.num_prompt_tokens) - new_start)
            self.num_counted = end

    def usage(self, pages: SequenceUsage) -> SequenceUsage:
        """Its cost so far. `pages`: the part that is of pages."""
        num_generated = len(self.token_ids) - self.num_prompt_tokens
        num_had = self.num_given_tokens - self.num_prompt_tokens
        num_again = min(num_generated, self.num_generated_before) - num_had  # generated after they were counted
        return SequenceUsage(
            pages.kv_page_s,
            pages.adapter_page_s,
            pages.num_kv_pages,
            pages.num_adapter_pages,
            self.num_computed_prompt_tokens,
            self.num_cached_prompt_tokens,
            max(num_generated, self.num_generated_before),
            self.num_recomputed_tokens + num_again,
        )

    def sample_plan(self, known: list[int]) -> SamplePlan:
        """How to choose the token after these, which are all of the sequence's so far.

        Where penalties need them, the workers are told of them with the first token that a run chooses.
        """
        seen, split = None, self.num_prompt_tokens
        if self.has_penalty and not self.is_told:
            self.is_told = True
            prompt = known[:split] if self.sampling.repetition_penalty != 1 else ()
            seen = SeenTokens(packed(prompt), packed(known[split:]))
        return SamplePlan(self.sampling, self.seed, len(known) - split, seen)
