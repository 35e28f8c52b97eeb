"""A sequence: one growing token list, from the request that can be served to its end. The scheduler owns its state."""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from ..fairness.page_times import HeldPages
from ..fairness.tenant_counters import TenantCounter
from ..plan import INT32_BYTES, Int32s, PoolPlan, SamplePlan, ScorePlan, SeenTokens, StatePlan, packed
from ..window_pages import FullLayers, GangLimits
from ..wire.beams import BeamRules
from ..wire.messages import FinishReason, SamplingParams, SequenceError, SequenceRequest, SequenceUsage
from ..wire.page_keys import NO_ADAPTER, KeyChain, PageKey
from ..wire.prompt_scores import packed_vector, pooled_positions, unpacked_vector

if TYPE_CHECKING:
    from .beam_searches import BeamGroup

ARRIVAL_STEP = 1 << 24  # between the arrivals of two sequences; sequences that are promoted have values in between


class StateSnapshot(msgspec.Struct, frozen=True):
    """A recurrent state that a plan writes to pages of its own, which others go on from once it is there."""

    sequence: GrowingSequence
    position: int  # tokens before it
    pages: tuple[int, ...]
    is_of_answer: bool = False
    position_before: int = 0  # of the snapshot of the answer that it takes the place of; 0: there is none


@dataclass(eq=False, slots=True, weakref_slot=True)
class GrowingSequence:
    """A request and its state. Fields derived from the request are stored, as steps read them of thousands."""

    request: SequenceRequest
    arrival: int  # its position in its tenant's order, by priority and age; smaller is older
    seed: int
    token_ids: list[int]  # prompt, then generated, here or before
    stop_ids: frozenset[int] = frozenset()  # tokens that end it
    max_length: int = sys.maxsize  # it ends at this number of tokens
    num_computed: int = 0  # tokens whose KV is in `pages`
    num_planned: int = 0  # tokens that uncommitted plans compute
    num_coming: int = 0  # tokens that uncommitted plans choose
    pages: tuple[int, ...] = ()  # all that it has had, in order; changed by `hold` and `grow`
    num_gone: int = 0  # its first pages that it holds no more: no layer sees them. Their numbers mean nothing
    dense_pages: tuple[int, ...] = ()  # that have what full layers see of its first `num_gone` pages
    state_pages: tuple[int, ...] = ()  # of its recurrent state, where the base has one
    snapshots_at: tuple[int, ...] = ()  # positions after which its recurrent state is kept, ascending
    last_snapshot: int = 0  # the last position at which it is kept or planned to be, and stays
    answer_snapshot: int = 0  # a later one in the answer, until the next one takes its place; 0: there is none
    state_in_place: StatePlan | None = None  # for plans that bring its state up to date and keep none on the way
    packed_pages: Int32s = b""  # the table as plans carry it, updated only when pages are added or given back
    sequence_id: int = field(init=False)
    sampling: SamplingParams = field(init=False)
    adapter_digest: str | None = field(init=False)  # None: the base
    num_prompt_tokens: int = field(init=False)
    num_given_tokens: int = field(init=False)  # tokens that it arrived with
    has_penalty: bool = field(init=False)
    is_constrained: bool = field(init=False)  # it has a grammar
    awaits_mask: bool = False  # its mask was late: no step is planned for it until the mask is made
    beams: BeamGroup | None = None  # the search that it is a beam of: it gets its tokens from there
    is_pooled: bool = field(init=False)  # an embedding of its prompt is requested, and no token
    counter: TenantCounter = field(default_factory=TenantCounter)  # its tenant's
    page_use: HeldPages = field(init=False)  # page-seconds
    # Fields above are read in every step, and lie side by side in memory.
    turn: tuple[bool, float, int] = (
        False,
        0.0,
        0,
    )  # order among waiting sequences, as last computed; the least goes first. Compared with running ones' ranks
    num_at_start: int = 0  # tokens that were cached when its run began
    first_decoded: int = 0  # the run has computed the tokens from this one on one by one
    num_counted_at_start: int = 0  # `num_counted` when its run began
    counter_at_start: float = 0.0  # its tenant's counter when its run began
    full_layers: FullLayers | None = None  # of the base
    num_adapter_pages: int = 0
    num_places: int = 1  # that it takes among the sequences that may run at once
    prepaid: range = range(0)  # positions that it computes again at the cost of the tenant that it was preempted for
    num_load_tokens: int = 0  # price of the load of its adapter that its tenant has paid, in tokens' worth
    is_load_prepaid: bool = False  # the next load of its adapter costs the tenant that it was preempted for
    num_counted: int = 0  # its first tokens, which its usage has counted: they are recomputed if they come again
    num_computed_prompt_tokens: int = 0  # for its usage, like the next two; all gangs included
    num_cached_prompt_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_recomputed_before: int = 0  # of these, those that the gang's counter has, or that another gang has computed
    num_generated_before: int = 0  # tokens, as counted by the gangs where it was before
    tokens_sent: bool = False  # the workers have the tokens of this run, if it has penalties
    key_chain: KeyChain = NO_ADAPTER  # of its pages
    page_keys: list[PageKey] = field(default_factory=list)  # of its first full pages, as far as computed
    tail_link: PageKey | None = None  # the key before its last page, if others may copy what that has
    num_kept_pages: int = 0  # its first pages that are in the prefix cache
    num_found: int = 0  # tokens that the last look-up of its prefix found in the pool
    num_cached_tokens: int | None = None  # of its prompt, that its first run found; None: it has not run yet
    was_looked_up: bool = False  # its prefix was looked up since it last began to wait
    began_at: float | None = None  # when a step was first planned for it, by the scheduler's clock; None: not yet
    first_wanted: int = 0  # the last look-up of its prefix looked for the pages from this one on
    num_here: int = 0  # pages before the first one from there on that it did not find in the pool
    awaited_key: PageKey | None = None  # that page's
    awaits_page: PageKey | None = None  # it waits until the page with this key is computed or copied
    num_reserved_pages: int = 0  # that it will take when the page that it awaits is copied
    last_place: int = 0  # once so many sequences of its tenant have left the queue, none passes it over
    own_arrival: int | None = None  # while it is promoted: its `arrival` before and afterwards
    # Pages of its prefix in the pool or coming, while copies are under way for it; None: no more copies should start.
    num_brought: int | None = None
    num_scored: int = 0  # leading rows whose scores were sent, or that are in `pooled` or need not be
    num_to_score: int = 0  # leading rows that are to be scored or pooled
    pooled: npt.NDArray[np.float64] | None = None  # sum of the states of the rows pooled so far; None: no row was

    def __post_init__(self) -> None:
        self.sequence_id = self.request.sequence_id
        self.adapter_digest = None if self.request.adapter is None else self.request.adapter.digest
        self.num_prompt_tokens = len(self.request.prompt_token_ids)
        self.num_given_tokens = len(self.token_ids)
        self.sampling = params = self.request.sampling
        self.has_penalty, self.is_constrained = params.has_penalty, bool(params.grammar)
        if self.is_constrained:  # workers do not need the text, which would be sent to them with each token
            self.sampling = msgspec.structs.replace(params, grammar="")
        before = self.request.usage or SequenceUsage()
        self.page_use = HeldPages(before)
        self.num_computed_prompt_tokens = before.num_computed_prompt_tokens
        self.num_cached_prompt_tokens = before.num_cached_prompt_tokens
        self.num_recomputed_tokens = self.num_recomputed_before = before.num_recomputed_tokens
        self.num_generated_before = max(before.num_generated_tokens, len(self.request.generated_token_ids))
        self.num_counted = min(self.num_computed_prompt_tokens + self.num_cached_prompt_tokens, self.num_prompt_tokens)
        if self.num_counted == self.num_prompt_tokens:  # all but the newest generated token have been computed too
            self.num_counted += max(0, self.num_generated_before - 1)

        if params.num_prompt_logprobs is not None and not self.request.generated_token_ids:
            self.num_scored, self.num_to_score = self.request.num_scored, self.num_prompt_tokens - 1
        self.is_pooled = params.pooling is not None
        if params.pooling is not None:
            positions = pooled_positions(params.pooling, self.num_prompt_tokens)
            self.num_scored, self.num_to_score = positions.start, positions.stop

    @property
    def is_scored(self) -> bool:
        """All requested scores were sent, and all rows that are to be pooled were."""
        return self.num_scored >= self.num_to_score

    @property
    def num_to_lose(self) -> int:
        """What would be lost if this run ended now, in tokens' worth: what it has computed, and its adapter's load.

        A beam's run ends with those of all others of its search.
        """
        if self.beams is None:
            return self._num_lost + (0 if self.is_load_prepaid else self.num_load_tokens)
        root = self.beams.root
        num_load_tokens = 0 if root.is_load_prepaid else root.num_load_tokens
        return sum([place._num_lost for place in self.beams.places]) + num_load_tokens

    def prepay(self) -> int:
        """Another tenant pays for what the sequence loses now, and its search; returns that in tokens' worth."""
        root = self if self.beams is None else self.beams.root
        num_tokens = 0 if root.is_load_prepaid else root.num_load_tokens
        root.is_load_prepaid = root.num_load_tokens > 0
        for each in (self,) if self.beams is None else self.beams.places:
            if each._num_lost or each is self:
                each.prepaid = range(each.num_at_start, max(each.next_position, each.prepaid.stop))
                num_tokens += each._num_lost
        return num_tokens

    @property
    def _num_lost(self) -> int:
        """Tokens that this run has computed; 0: it does not run."""
        return self.num_computed + self.num_planned - self.num_at_start

    def put_back_late(self, num_tokens: int) -> None:
        """A step that computed so many tokens chose none, for want of a mask: the last of them is to be computed again.

        So is what the plan after that step has for it.
        """
        self.count_in_vain(num_tokens)
        self.num_computed += num_tokens - 1
        self.num_planned = self.num_coming = 0
        self.tokens_sent = False  # workers count the last token each time that it is computed
        self.awaits_mask = True

    def take_prepaid(self, start: int, end: int) -> int:
        """Tokens at the positions from `start` to `end` are computed: how many of them are paid for already."""
        num_tokens = max(0, min(end, self.prepaid.stop) - max(start, self.prepaid.start))
        self.prepaid = range(max(end, self.prepaid.start), self.prepaid.stop)
        return num_tokens

    @property
    def has_run(self) -> bool:
        """It has run before, here or at another gang."""
        return self.began_at is not None or self.num_given_tokens > self.num_prompt_tokens

    @property
    def num_uncomputed(self) -> int:
        return len(self.token_ids) - self.num_computed

    @property
    def next_position(self) -> int:
        """Of the first token that the next plan could compute."""
        return self.num_computed + self.num_planned

    @property
    def num_unplanned(self) -> int:
        """Tokens that the next plan could compute; the last of them may not be known yet."""
        return len(self.token_ids) + self.num_coming - self.num_computed - self.num_planned

    @property
    def held_pages(self) -> tuple[int, ...]:
        return (*self.dense_pages, *self.pages[self.num_gone :], *self.state_pages)

    @property
    def num_held_pages(self) -> int:
        return len(self.pages) - self.num_gone + len(self.dense_pages) + len(self.state_pages)

    def num_that_fit(self, block_size: int) -> int:
        """Tokens that the next plan could compute on the pages that the sequence has, all of them by one adapter.

        Less than `num_unplanned` only for prompts that take pages as they give others back, and for what stands before
        the invocation of an activated LoRA.
        """
        position, adapter_start = self.next_position, self.key_chain.start or 0
        num_tokens = min(self.num_unplanned, len(self.pages) * block_size - position)
        return num_tokens if position >= adapter_start else min(num_tokens, adapter_start - position)

    def hold(
        self,
        pages: tuple[int, ...],
        num_gone: int = 0,
        dense_pages: tuple[int, ...] = (),
        state_pages: tuple[int, ...] = (),
    ) -> None:
        """Sets the sequence's pages, the first `num_gone` of which are not held."""
        self.pages, self.num_gone, self.dense_pages = pages, num_gone, dense_pages
        if state_pages != self.state_pages:
            self.hold_state(state_pages)
        layers = self.full_layers
        self.packed_pages = packed(
            pages if layers is None else [*layers.dense_entries(dense_pages), *layers.entries(pages[num_gone:])]
        )

    def hold_state(self, pages: tuple[int, ...]) -> None:
        """Sets the pages of its recurrent state."""
        self.state_pages, packed_pages = pages, packed(pages)
        self.state_in_place = StatePlan(packed_pages, packed_pages) if pages else None

    def fork(self, parent: GrowingSequence) -> None:
        """From now on it is where the other one is, on the same pages, which the caller shares."""
        split = self.num_prompt_tokens  # all before is the same
        self.token_ids[split:] = parent.token_ids[split:]
        self.page_keys = parent.page_keys[:]
        self.pages, self.num_gone, self.dense_pages = parent.pages, parent.num_gone, parent.dense_pages
        self.state_pages, self.state_in_place = parent.state_pages, parent.state_in_place
        self.packed_pages, self.num_kept_pages = parent.packed_pages, parent.num_kept_pages
        self.num_computed = parent.num_computed
        self.num_counted = parent.num_counted

    def replace_last(self, page: int) -> None:
        """Its last page is this one from now on."""
        entries = packed((page,) if self.full_layers is None else self.full_layers.entries((page,)))
        self.pages = (*self.pages[:-1], page)
        self.packed_pages = self.packed_pages[: -len(entries)] + entries

    def grow(self, pages: tuple[int, ...]) -> None:
        """Appends pages."""
        self.pages += pages
        self.packed_pages += packed(pages if self.full_layers is None else self.full_layers.entries(pages))

    @property
    def next_dense(self) -> range:
        """The pages for which the next dense page will stand."""
        assert self.full_layers is not None
        return range(self.num_gone, self.num_gone + self.full_layers.num_blocks)

    def condense(self, dense_page: int) -> tuple[int, ...]:
        """From now on a dense page stands for its next pages; returns those, which are not held any more."""
        assert self.full_layers is not None
        going, table = self.next_dense, self.packed_pages
        entries = packed(self.full_layers.dense_entries((dense_page,)))
        self.packed_pages = table[: going.start * INT32_BYTES] + entries + table[going.stop * INT32_BYTES :]
        self.dense_pages += (dense_page,)
        return self.give_back(going.stop)

    def give_back(self, num_gone: int) -> tuple[int, ...]:
        """From now on its first `num_gone` pages are not held; returns those of them that were.

        They stay in the table, where kernels do not look them up.
        """
        pages, self.num_gone = self.pages[self.num_gone : num_gone], num_gone
        return pages

    def keeps_state(self, position: int) -> bool:
        """Whether its recurrent state after so many tokens is to be kept."""
        return position in self.snapshots_at

    def state_plan(self, start: int, snapshots: Sequence[StateSnapshot] = ()) -> StatePlan | None:
        """Where its state is for a part of a plan that begins at position `start`; None: the base has none.

        `snapshots`: states that are kept on the way, all after `start`.
        """
        if self.state_in_place is None or (start and not snapshots):  # thousands decode
            return self.state_in_place
        pages = self.state_in_place.target
        rows = tuple(each.position - start for each in snapshots)
        return StatePlan(pages if start else b"", pages, rows, b"".join(packed(each.pages) for each in snapshots))

    def begin_run(self) -> None:
        """Its run begins with `num_computed` tokens that need not be computed."""
        self.num_at_start = self.first_decoded = self.num_computed
        self.num_cached_prompt_tokens += max(0, min(self.num_computed, self.num_prompt_tokens) - self.num_counted)
        self.num_counted = self.num_counted_at_start = max(self.num_counted, self.num_computed)

    def count_computed(self, num_tokens: int) -> None:
        """So many tokens after the first `num_computed` were computed."""
        start, end = self.num_computed, self.num_computed + num_tokens
        self.num_recomputed_tokens += self._num_decoded_again + max(0, min(end, self.num_counted) - start)
        self.first_decoded = end
        if end > self.num_counted:
            new_start = max(start, self.num_counted)
            self.num_computed_prompt_tokens += max(0, min(end, self.num_prompt_tokens) - new_start)
            self.num_counted = end

    def count_in_vain(self, num_tokens: int) -> None:
        """So many tokens after the first `num_computed` were computed, and what followed from the last was dropped."""
        self.count_computed(num_tokens - 1)
        self.num_recomputed_tokens += 1

    def end_run(self) -> int:
        """Returns how many tokens were computed again since this was called last."""
        self.num_recomputed_tokens += self._num_decoded_again
        self.first_decoded = self.num_computed
        self.num_counted = max(self.num_counted, self.num_computed)
        num_more = self.num_recomputed_tokens - self.num_recomputed_before
        self.num_recomputed_before = self.num_recomputed_tokens
        return num_more

    @property
    def _num_decoded_again(self) -> int:
        """Tokens from `first_decoded` on that had been computed before."""
        if self.beams is not None:
            return 0  # they are decoded once
        return max(0, min(self.num_computed, self.num_counted_at_start) - self.first_decoded)

    def usage(self, pages: SequenceUsage) -> SequenceUsage:
        """Its cost so far. `pages`: the part that is of pages."""
        num_generated = len(self.token_ids) - self.num_prompt_tokens
        return SequenceUsage(
            pages.kv_page_s,
            pages.adapter_page_s,
            pages.num_kv_pages,
            pages.num_adapter_pages,
            self.num_computed_prompt_tokens,
            self.num_cached_prompt_tokens,
            max(num_generated, self.num_generated_before),
            self.num_recomputed_tokens + self._num_decoded_again,
            self.request.attempt,
        )

    def pool_plan(self, start: int, end: int) -> PoolPlan | None:
        """What to pool of these rows of its prompt; None: nothing."""
        first, last = max(start, self.num_scored), min(end, self.num_to_score)
        return PoolPlan(first - start, last - first) if self.is_pooled and first < last else None

    def add_pooled(self, plan: PoolPlan, total: bytes) -> None:
        """Takes in the packed sum of rows."""
        states = unpacked_vector(total).astype(np.float64)
        self.pooled = states if self.pooled is None else self.pooled + states
        self.num_scored += plan.num_rows

    def embedding(self) -> bytes | None:
        """The packed mean of all rows that were to be pooled; None: it is not finite."""
        assert self.pooled is not None and self.is_scored and self.sampling.pooling is not None
        return packed_vector(self.pooled / len(pooled_positions(self.sampling.pooling, self.num_prompt_tokens)))

    def score_plan(self, start: int, end: int) -> ScorePlan | None:
        """What to score of these rows of its prompt; None: nothing."""
        first, last = max(start, self.num_scored), min(end, self.num_to_score)
        if first >= last or self.is_pooled:
            return None
        num_top = self.sampling.num_prompt_logprobs or 0
        return ScorePlan(num_top, first - start, packed(self.token_ids[first + 1 : last + 1]))

    def sample_plan(self, token_ids: list[int]) -> SamplePlan:
        """How to choose the token after these, which are all of the sequence's so far.

        With penalties, the first plan of a run that chooses a token also carries the tokens so far.
        """
        seen, split = None, self.num_prompt_tokens
        if self.has_penalty and not self.tokens_sent:
            self.tokens_sent = True
            prompt = token_ids[:split] if self.sampling.repetition_penalty != 1 else ()
            seen = SeenTokens(packed(prompt), packed(token_ids[split:]))
        return SamplePlan(self.sampling, self.seed, len(token_ids) - split, seen, self.is_constrained)


by_arrival = attrgetter("arrival")


def remove_by_arrival(sequences: list[GrowingSequence], sequence: GrowingSequence) -> None:
    """Removes a sequence from a list that is sorted by arrival, and has it."""
    index = bisect_left(sequences, sequence.arrival, key=by_arrival)
    assert sequences[index] is sequence
    del sequences[index]


# When a sequence ends: limits computed when it arrives, and a check after each token.


def stop_ids(request: SequenceRequest, eos_token_ids: AbstractSet[int]) -> frozenset[int]:
    """Tokens that end the sequence.

    With a grammar the model's own end tokens always do: they are allowed only at its end.
    """
    params = request.sampling
    ignores_eos = params.ignore_eos and not params.grammar
    return frozenset(params.stop_token_ids) | (frozenset() if ignores_eos else eos_token_ids)


def max_length(request: SequenceRequest, num_adapter_pages: int, limits: GangLimits) -> int:
    """The most tokens of the sequence, prompt and answer together."""
    # The last token is never computed, so it takes no room. A sequence with max_tokens always fits the pool, or it
    # would have been refused on arrival.
    longest, num_pages = limits.max_model_len, limits.num_pages - num_adapter_pages
    if limits.needed_pages(longest - 1) > num_pages:
        longest = bisect_right(range(longest), num_pages, key=limits.needed_pages)
    max_tokens = request.sampling.max_tokens
    if max_tokens == 0:  # a token is chosen, and not sent
        return len(request.prompt_token_ids) + 1
    return longest if max_tokens is None else min(longest, len(request.prompt_token_ids) + max_tokens)


def finish_reason(sequence: GrowingSequence) -> FinishReason | None:
    """Why the sequence ends with its last token, or None if it goes on."""
    if sequence.sampling.max_tokens == 0:
        return "length"
    if sequence.token_ids[-1] in sequence.stop_ids:
        return "stop"
    return "length" if len(sequence.token_ids) >= sequence.max_length else None


def not_finite(sequence: GrowingSequence) -> SequenceError:
    """Why a sequence ends whose logits are not finite."""
    rules = sequence.sampling.rules
    if sequence.is_constrained and rules is not None and (rules.allowed_token_ids or rules.bad_words):
        reason = "its grammar, allowed_token_ids and bad_words leave no token that could come next"
        return SequenceError("invalid_request", reason)
    if sequence.adapter_digest is None:
        return SequenceError("internal", "the model gave no finite number for the next token")
    message = f"adapter {sequence.adapter_digest} gave no finite number for the next token: its weights are too large"
    return SequenceError("adapter_overflow", message)


# Whether a request can ever be served: a pure check on arrival.


def refusal(request: SequenceRequest, num_adapter_pages: int, limits: GangLimits) -> SequenceError | None:
    """Why the request can never be served, or None. `num_adapter_pages` are those of its adapter, 0 for the base."""
    num_prompt, max_tokens = len(request.prompt_token_ids), request.sampling.max_tokens
    num_generated = len(request.generated_token_ids)
    if num_prompt == 0:
        return _invalid("the prompt is empty: at least one token is needed")
    if not 0 < request.weight < float("inf"):
        return _invalid(f"weight = {request.weight:g}: a positive number is needed")
    so_far = request.beams_so_far
    beams = () if so_far is None else (so_far.common, *so_far.ends)
    token_lists = (request.prompt_token_ids, request.generated_token_ids, *beams)
    if not all(_are_below(ids, limits.vocab_size) for ids in token_lists):
        return _invalid(f"the prompt has a token id outside 0..{limits.vocab_size - 1}")
    if max_tokens is not None and max_tokens < 0:
        return _invalid(f"max_tokens = {max_tokens}: at least 0 is needed")
    if max_tokens is not None and 0 < num_generated >= max_tokens:
        return _invalid(f"max_tokens = {max_tokens}, and {num_generated} were generated before: nothing is left to do")
    if request.sampling.pooling is not None and max_tokens != 0:
        return _invalid(f"max_tokens = {max_tokens}: no token is chosen after a prompt that is pooled, 0 is needed")
    if request.beams is not None and (problem := _beam_problem(request)):
        return _invalid(problem)
    if not limits.has_head and request.sampling.pooling is None:
        return _invalid("this model was saved without its head (lm_head): it makes embeddings alone, at /v1/embeddings")
    num_tokens = num_prompt + (num_generated + 1 if max_tokens is None else max_tokens)
    if num_tokens > limits.max_model_len:
        over = num_tokens - limits.max_model_len
        requested = f" and {num_tokens - num_prompt} to generate" if max_tokens is not None or num_generated else ""
        return _invalid(
            f"{num_prompt} prompt tokens{requested} are {over} over the context of {limits.max_model_len} tokens"
        )
    # The last token is never computed, so it takes no room.
    num_pages = limits.needed_pages(max(num_tokens - 1, num_prompt)) + num_adapter_pages
    if request.beams is not None:
        num_pages += _pages_of_beams(request.beams, num_prompt, limits)
    if num_pages > limits.num_pages:
        fits_alone = num_adapter_pages + limits.needed_pages(1) <= limits.num_pages
        remedy = (
            "a shorter prompt, fewer max_tokens" if fits_alone else "an adapter of lower rank or with fewer token rows"
        )
        return _invalid(
            f"the request needs {num_pages} pages ({num_adapter_pages} of them for its adapter) and can never fit the "
            f"pool of {limits.num_pages}: {remedy} or a larger pool is needed"
        )
    return None


def _beam_problem(request: SequenceRequest) -> str | None:
    """Why there can be no search with these rules, apart from its length; None: there can."""
    rules, params = request.beams, request.sampling
    assert rules is not None
    if rules.width < 1 or rules.max_tokens < 1 or rules.max_tokens != params.max_tokens:
        return f"width = {rules.width}, max_tokens = {rules.max_tokens}: at least 1 is needed, as many as of `sampling`"
    wants_more = params.grammar or params.logit_bias or params.rules is not None or params.pooling is not None
    if params.has_penalty or wants_more or params.num_prompt_logprobs is not None or request.generated_token_ids:
        return "beams are ranked by the model's own probabilities, after a prompt that is not scored"
    return None


def _pages_of_beams(rules: BeamRules, num_prompt: int, limits: GangLimits) -> int:
    """Pages that a search needs beside those of its first beam, if the beams share nothing after their prompt."""
    num_tokens = num_prompt + rules.max_tokens - 1
    num_pages = limits.needed_pages(num_tokens)
    if limits.window is None and not limits.num_state_pages:  # else beams that go on elsewhere compute it apart
        num_pages -= num_prompt // limits.block_size
    return (rules.width - 1) * num_pages


def _are_below(token_ids: list[int], vocab_size: int) -> bool:
    """Whether all are ids of tokens; ten times as fast as `min` and `max` of a long list."""
    try:
        numbers = np.frombuffer(array("I", token_ids), np.uint32)
    except OverflowError:  # one is negative, or far too large
        return False
    return not len(numbers) or bool(numbers.max() < vocab_size)


def _invalid(message: str) -> SequenceError:
    return SequenceError("invalid_request", message)
