"""An update of many tokens, as it comes of a reader that was slow or resumes a stream, in several of a few tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from msgspec import structs

from ...workers.wire.messages import SequenceUpdate

MAX_TOKENS: Final = 32  # that are taken in at once: with 20 log-probabilities each a few ms


def portions(update: SequenceUpdate) -> Sequence[SequenceUpdate]:
    """Splits the update into updates of at most `MAX_TOKENS` tokens.

    Scores of a prompt come before its tokens, of at most `MAX_TOKENS` in an update, too.
    """
    if update.prompt_scores is not None:
        scores, rest = update.prompt_scores, structs.replace(update, prompt_scores=None)
        starts = range(0, scores.num_rows, MAX_TOKENS)
        parts = [scores.part(start, start + MAX_TOKENS) for start in starts]
        return [*(SequenceUpdate(update.sequence_id, prompt_scores=part) for part in parts), *portions(rest)]
    token_ids, logprobs = update.token_ids, update.logprobs
    if len(token_ids) <= MAX_TOKENS:
        return (update,)
    starts = range(0, len(token_ids), MAX_TOKENS)
    return [
        SequenceUpdate(
            update.sequence_id,
            token_ids[start : start + MAX_TOKENS],
            None if logprobs is None else logprobs[start : start + MAX_TOKENS],
            update.finish_reason if start == starts[-1] else None,
            update.error if start == starts[-1] else None,
            update.num_cached_tokens if start == 0 else None,
            update.computing_s if start == 0 else None,
            update.usage if start == 0 else None,
        )
        for start in starts
    ]
