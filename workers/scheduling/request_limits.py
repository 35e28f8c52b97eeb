"""A gang's limits, and whether a request can ever be served there: a pure check on arrival."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np

from ..window_pages import FullLayers, most_pages, num_unseen_pages
from ..wire.beams import BeamRules
from ..wire.messages import SequenceError, SequenceRequest


@dataclass(frozen=True)
class GangLimits:
    """Limits of one gang and of one step."""

    max_model_len: int  # tokens
    vocab_size: int
    block_size: int  # tokens a page
    num_pages: int
    max_tokens_per_step: int
    max_num_sequences: int
    window: int | None = None  # newest tokens whose pages a sequence keeps (`kept_window`); None: all
    full_layers: FullLayers | None = None  # with a window: layers that see all tokens nevertheless; None: none does
    has_head: bool = True  # False: the base was saved without its head, and makes embeddings alone

    def num_unseen_pages(self, num_tokens: int) -> int:
        """The first pages of a sequence that are not needed whole any more, once so many of its tokens are computed.

        No layer sees them. With full layers: as many of those that only these see as whole dense pages hold.
        """
        num_unseen = num_unseen_pages(num_tokens, self.block_size, self.window)
        return num_unseen if self.full_layers is None else num_unseen - num_unseen % self.full_layers.num_blocks

    def most_pages(self, num_tokens: int) -> int:
        """The most pages that a sequence of so many tokens holds at once."""
        return most_pages(num_tokens, self.block_size, self.window, self.max_tokens_per_step, self.full_layers)

    def needed_pages(self, num_tokens: int) -> int:
        """Pages of a pool in which a sequence of so many tokens always gets on: a dense page is filled before others
        are given back for it."""
        return min(pages_for(num_tokens, self.block_size), self.most_pages(num_tokens) + (self.full_layers is not None))


def pages_for(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


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
        return _invalid(
            f"the request needs {num_pages} pages ({num_adapter_pages} of them for its adapter) and can never fit the "
            f"pool of {limits.num_pages}: a shorter prompt, fewer max_tokens or a larger pool is needed"
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
    if limits.window is None:
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
