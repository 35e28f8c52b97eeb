"""When a sequence ends: limits computed when it arrives, and a check after each token."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Set as AbstractSet

from ..wire.messages import FinishReason, SequenceError, SequenceRequest
from .growing_sequence import GrowingSequence
from .request_limits import GangLimits


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
        left = "its grammar, allowed_token_ids and bad_words leave no token that could come next"
        return SequenceError("invalid_request", left)
    if sequence.adapter_digest is None:
        return SequenceError("internal", "the model gave no finite number for the next token")
    message = f"adapter {sequence.adapter_digest} gave no finite number for the next token: its weights are too large"
    return SequenceError("adapter_overflow", message)
