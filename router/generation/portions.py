"""An update of many tokens, as it comes of a reader that was slow or resumes a stream, in several of a few tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from msgspec import structs

from ...workers.wire.messages import SequenceUpdate

MAX_TOKENS: Final = 32  # that are taken in at once
MAX_VALUES: Final = 256  # log-probabilities that are taken in at once: about a millisecond


def portions(update: SequenceUpdate) -> Sequence[SequenceUpdate]:
    """Splits the update into updates of at most `MAX_TOKENS` tokens, and fewer with many log-probabilities.

    Scores of a prompt come before its tokens, of as many at most in an update, too.
    """
    if update.prompt_scores is not None:
        scores, rest = update.prompt_scores, structs.replace(update, prompt_scores=None)
        limit = _max_tokens(scores.num_top)
        parts = [scores.part(start, start + limit) for start in range(0, scores.num_rows, limit)]
        return [*(SequenceUpdate(update.sequence_id, prompt_scores=part) for part in parts), *portions(rest)]
    token_ids, logprobs = update.token_ids, update.logprobs
    limit = _max_tokens(len(logprobs[0].top_ids) if logprobs else 0)
    if len(token_ids) <= limit:
        return (update,)
    starts = range(0, len(token_ids), limit)
    return [
        SequenceUpdate(
            update.sequence_id,
            token_ids[start : start + limit],
            None if logprobs is None else logprobs[start : start + limit],
            update.finish_reason if start == starts[-1] else None,
            update.error if start == starts[-1] else None,
            update.num_cached_tokens if start == 0 else None,
            update.computing_s if start == 0 else None,
            update.usage if start == 0 else None,
        )
        for start in starts
    ]


def _max_tokens(num_top: int) -> int:
    return min(MAX_TOKENS, 1 + MAX_VALUES // (1 + num_top))
