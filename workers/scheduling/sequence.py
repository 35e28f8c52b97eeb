"""A sequence: one growing token list. The scheduler owns its state."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

from ..plan import SamplePlan
from ..wire.messages import SamplingParams, SequenceRequest
from ..wire.page_keys import PageKey


@dataclass(eq=False, slots=True, weakref_slot=True)
class Sequence:
    """What follows from the request is kept beside it: thousands of sequences are looked at in every step."""

    request: SequenceRequest
    arrival: int  # order of arrival; smaller is older
    seed: int
    token_ids: list[int]  # prompt, then generated, here or before
    stop_ids: frozenset[int] = frozenset()  # tokens that end it
    max_length: int = sys.maxsize  # it ends with so many tokens at the latest
    num_computed: int = 0  # tokens whose KV is in `pages`
    num_planned: int = 0  # tokens that uncommitted plans compute
    num_coming: int = 0  # tokens that uncommitted plans choose
    pages: tuple[int, ...] = ()  # plans hold it as it is, so it is another tuple when pages are added
    sequence_id: int = field(init=False)
    sampling: SamplingParams = field(init=False)
    adapter_digest: str | None = field(init=False)  # None: the base
    num_prompt_tokens: int = field(init=False)
    num_given_tokens: int = field(init=False)  # tokens that it came with
    has_penalty: bool = field(init=False)
    # What is above is needed in every step, and lies side by side in memory.
    page_keys: list[PageKey] = field(default_factory=list)  # of its first full pages, as far as keys were needed
    num_kept_pages: int = 0  # its first pages that the prefix cache has been told of
    num_found: int = 0  # tokens that the last look-up of its prefix found in the pool
    num_cached_tokens: int | None = None  # of its prompt, that its first run did not compute; None: it has not run yet
    was_looked_up: bool = False  # its prefix, in the pool and behind it, since it last began to wait
    began_at: float | None = None  # when a step was first planned for it, by the scheduler's clock; None: not yet
    awaited_key: PageKey | None = None  # of the first page that the last look-up did not find in the pool
    awaits_page: PageKey | None = None  # it waits until somebody has computed or copied the page with this key
    num_reserved_pages: int = 0  # that it will take when the page has come that is being copied for it

    def __post_init__(self) -> None:
        self.sequence_id = self.request.sequence_id
        self.adapter_digest = None if self.request.adapter is None else self.request.adapter.digest
        self.num_prompt_tokens = len(self.request.prompt_token_ids)
        self.num_given_tokens = len(self.token_ids)
        self.sampling = params = self.request.sampling
        self.has_penalty = (
            params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
        )

    @property
    def num_uncomputed(self) -> int:
        return len(self.token_ids) - self.num_computed

    @property
    def num_unplanned(self) -> int:
        """Tokens that the next plan could compute; the last of them may still be coming."""
        return len(self.token_ids) + self.num_coming - self.num_computed - self.num_planned

    def sample_plan(self, known: list[int]) -> SamplePlan:
        """How to choose the token after these, which are all of the sequence's so far. Penalties see them."""
        split = self.num_prompt_tokens
        return SamplePlan(
            self.sampling,
            self.seed,
            len(known) - split,
            tuple(known[:split]) if self.has_penalty else (),
            tuple(known[split:]) if self.has_penalty else (),
        )
