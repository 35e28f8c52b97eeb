"""How long a whole answer is, as JSON, before it is made and while it grows: estimates that err upwards."""

from __future__ import annotations

from typing import Final

from ..generation.choice import Delta
from ..generation.generation import GenerationRequest
from ..text.response_reader import TextPiece

_FIXED_BYTES: Final = 4096  # of an answer beside its tokens
_CHOICE_BYTES: Final = 256
_TOKEN_BYTES: Final = 16  # of its text and its id
_LIKELY_BYTES: Final = 96  # of a token with its log-probability and bytes
_NUMBER_BYTES: Final = 24  # of an embedding
_CHAR_BYTES: Final = 2  # escapes included


def max_answer_bytes(request: GenerationRequest, context: int, hidden_size: int) -> int:
    """Of an answer that uses all tokens that it may. `context`: tokens of a sequence, its prompt included."""
    total = _FIXED_BYTES
    for prompt in request.prompts:
        sampling, num_prompt = prompt.sampling, len(prompt.token_ids)
        if sampling.pooling is not None:
            total += _CHOICE_BYTES + hidden_size * _NUMBER_BYTES
            continue
        room = max(0, context - num_prompt)
        num_new = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
        total += request.n * (_CHOICE_BYTES + num_new * (_TOKEN_BYTES + _likely_bytes(sampling.num_logprobs)))
        if request.is_echoed or request.keep_token_ids or sampling.num_prompt_logprobs is not None:
            total += request.n * num_prompt * (_TOKEN_BYTES + _likely_bytes(sampling.num_prompt_logprobs))
    return total


def delta_bytes(delta: Delta) -> int:
    """What a delta adds to its answer."""
    total = len(delta.text) * _CHAR_BYTES + len(delta.token_ids) * _TOKEN_BYTES
    for piece in delta.pieces:
        text = piece.text if isinstance(piece, TextPiece) else piece.arguments
        total += len(text) * _CHAR_BYTES
    if delta.logprobs:
        total += len(delta.logprobs) * _likely_bytes(len(delta.logprobs[0].logprobs.top_ids))
    if delta.prompt_scores is not None:
        total += delta.prompt_scores.num_rows * _likely_bytes(delta.prompt_scores.num_top)
    if delta.embedding is not None:
        total += len(delta.embedding) // 4 * _NUMBER_BYTES
    return total


def _likely_bytes(num_top: int | None) -> int:
    """Of a token's log-probability and those of the likeliest tokens; None: there are none."""
    return 0 if num_top is None else (1 + num_top) * _LIKELY_BYTES
