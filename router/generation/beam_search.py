"""Beam search as a policy: which continuations of a prompt are pursued, and which are the best in the end.

Pure functions of plain values. A round is one token for each live beam; whoever drives it asks the model for the
likeliest next tokens of each, `num_candidates` of them, and gives them to `advanced`. The rules are those of
transformers' `generate(num_beams=width, early_stopping="never")`, so its scores and sequences are too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from ...workers.wire.messages import TokenLogprobs


@dataclass(frozen=True)
class BeamRules:
    width: int  # beams that are pursued side by side, and that are found
    max_tokens: int
    end_token_ids: frozenset[int]  # a beam is finished with the first of them
    length_penalty: float = 1.0
    num_logprobs: int = 0  # of the likeliest tokens at each place, that beams remember

    @property
    def num_candidates(self) -> int:
        """Next tokens of each beam among which are the best `width` ones that go on, and the best `width` at all."""
        return max(self.width + len(self.end_token_ids), self.num_logprobs)


@dataclass(frozen=True)
class Beam:
    token_ids: tuple[int, ...] = ()  # after the prompt; an end token is the last one
    logprobs: tuple[TokenLogprobs, ...] = ()  # one for each token
    total: float = 0.0  # the natural log of its probability

    def score(self, length_penalty: float) -> float:
        """By which beams are compared that have finished: more is better. Above 0 the penalty favours long ones."""
        return self.total / math.pow(len(self.token_ids), length_penalty)


@dataclass(frozen=True)
class BeamSearch:
    """`live` and `finished` with the best first. Over when none is live."""

    live: tuple[Beam, ...]  # all of one length
    finished: tuple[Beam, ...]


NEW_SEARCH: Final = BeamSearch((Beam(),), ())


def advanced(
    search: BeamSearch,
    told: Sequence[TokenLogprobs],
    rules: BeamRules,
    is_stopped: Callable[[Beam], bool] = lambda _: False,
) -> BeamSearch:
    """The search after one more token. `told`: for each live beam its likeliest next tokens; `chosen` is not looked at.

    Of the best `width` continuations of all beams those that end with an end token are finished; the best `width`
    others go on, but for those that are stopped, which are finished too. It is over at `max_tokens`, and as soon as
    nothing that is live can become one of the best `width` finished ones.
    """
    candidates = [
        (beam.total + logprob, beam, row, token_id, logprob)
        for beam, row in zip(search.live, told, strict=True)
        for token_id, logprob in zip(row.top_ids, row.top_logprobs, strict=True)
        if math.isfinite(logprob)
    ]
    candidates.sort(key=lambda candidate: candidate[0], reverse=True)  # ties stay as they are
    finished, live = [*search.finished], list[Beam]()
    for rank, (total, beam, row, token_id, logprob) in enumerate(candidates):
        is_end = token_id in rules.end_token_ids
        if rank >= rules.width and (is_end or len(live) == rules.width):
            continue
        shown = TokenLogprobs(logprob, row.top_ids[: rules.num_logprobs], row.top_logprobs[: rules.num_logprobs])
        grown = Beam((*beam.token_ids, token_id), (*beam.logprobs, shown), total)
        is_last = len(grown.token_ids) >= rules.max_tokens
        (finished if is_end or is_last or is_stopped(grown) else live).append(grown)
    finished.sort(key=lambda beam: beam.score(rules.length_penalty), reverse=True)
    best = tuple(finished[: rules.width])
    if len(best) == rules.width and live and _bound(live[0], rules) <= best[-1].score(rules.length_penalty):
        return BeamSearch((), best)
    return BeamSearch(tuple(live), best)


def _bound(beam: Beam, rules: BeamRules) -> float:
    """No continuation of this one scores more: its probability cannot grow, and its length only so far."""
    length = rules.max_tokens if rules.length_penalty > 0 else len(beam.token_ids)
    return beam.total / math.pow(length, rules.length_penalty)
