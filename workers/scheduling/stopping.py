"""When a sequence ends: a pure check after each token."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from ..messages import FinishReason
from .admission import Limits
from .sequence import Sequence


def finish_reason(
    sequence: Sequence, eos_token_ids: AbstractSet[int], num_adapter_pages: int, limits: Limits
) -> FinishReason | None:
    """Why the sequence ends with its last token, or None if it goes on."""
    token, params = sequence.token_ids[-1], sequence.sampling
    if token in params.stop_token_ids or (token in eos_token_ids and not params.ignore_eos):
        return "stop"
    if params.max_tokens is not None and sequence.num_generated >= params.max_tokens:
        return "length"
    if len(sequence.token_ids) >= limits.max_model_len:
        return "length"
    # Only without max_tokens can a sequence outgrow the pool: others are refused on arrival.
    room = (limits.num_pages - num_adapter_pages) * limits.block_size
    return "length" if len(sequence.token_ids) > room else None
