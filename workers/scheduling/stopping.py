"""When a sequence ends: a pure check after each token."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from ..wire.messages import FinishReason
from .request_limits import GangLimits
from .sequence import Sequence


def finish_reason(
    sequence: Sequence, eos_token_ids: AbstractSet[int], num_adapter_pages: int, limits: GangLimits
) -> FinishReason | None:
    """Why the sequence ends with its last token, or None if it goes on."""
    if is_stop(sequence.token_ids[-1], sequence, eos_token_ids):
        return "stop"
    return "length" if is_long_enough(sequence, 0, num_adapter_pages, limits) else None


def is_stop(token_id: int, sequence: Sequence, eos_token_ids: AbstractSet[int]) -> bool:
    """Whether the token ends the sequence by itself."""
    params = sequence.sampling
    return token_id in params.stop_token_ids or (token_id in eos_token_ids and not params.ignore_eos)


def is_long_enough(sequence: Sequence, num_more: int, num_adapter_pages: int, limits: GangLimits) -> bool:
    """Whether the sequence ends with its next `num_more` tokens at the latest, whatever they are."""
    params, num_tokens = sequence.sampling, len(sequence.token_ids) + num_more
    if params.max_tokens is not None and sequence.num_generated + num_more >= params.max_tokens:
        return True
    # Only a sequence without max_tokens can outgrow the pool: one with it would have been refused on arrival.
    room = (limits.num_pages - num_adapter_pages) * limits.block_size
    return num_tokens >= limits.max_model_len or num_tokens > room
