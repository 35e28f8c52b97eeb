"""Beam search as a policy: which continuations of a prompt are pursued, and which are the best in the end.

Pure functions of plain values. A round is one token for each live beam: the caller asks the model for the
`num_candidates` likeliest next tokens of each, and gives them to `advanced`. The rules are those of transformers'
`generate(num_beams=width, early_stopping="never")`, and so are the scores and sequences.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from ...workers.wire.messages import TokenLogprobs


@dataclass(frozen=True)
class BeamRules:
    width: int  # beams that are pursued side by side, and that are found
    max_tokens: int
    end_token_ids: frozenset[int]  # a beam is finished with the first of them
    length_penalty: float = 1.0
    num_logprobs: int = 0  # of the likeliest tokens at each place; beams remember them

    @property
    def num_candidates(self) -> int:
        """Next tokens of each beam that are asked for: they hold the best `width`, and the best `width` that go on."""
        return max(self.width + len(self.end_token_ids), self.num_logprobs)


@dataclass(frozen=True)
class Beam:
    token_ids: tuple[int, ...] = ()  # after the prompt; an end token is the last one
    logprobs: tuple[TokenLogprobs, ...] = ()  # one for each token
    total: float = 0.0  # the natural log of its probability

    def score(self, length_penalty: float) -> float:
        """What finished beams are compared by: more is better. A penalty above 0 favours long beams."""
        return self.total / math.pow(len(self.token_ids), length_penalty)


@dataclass(frozen=True)
class BeamSearch:
    """`live` and `finished` beams, the best first. The search is over when none is live."""

    live: tuple[Beam, ...]  # all of one length
    finished: tuple[Beam, ...]


NEW_SEARCH: Final = BeamSearch((Beam(),), ())


def advanced(
    search: BeamSearch,
    rows: Sequence[TokenLogprobs],
    rules: BeamRules,
    is_stopped: Callable[[Beam], bool] = lambda _: False,
) -> BeamSearch:
    """The search after one more token. `rows`: for each live beam its likeliest next tokens, the likeliest
    first; `chosen` is not looked at.

    Among the best `width` continuations of all beams, those with an end token are finished. Of those without one the
    best `width` go on, unless they are stopped, which finishes them too. The search is over at `max_tokens`, and as
    soon as no live beam can become one of the best `width` finished ones.
    """
    # Only the best are looked at: rows come in the order of their log-probabilities. Ties stay as they are.
    continuations = [_continuations(beam, row) for beam, row in zip(search.live, rows, strict=True)]
    candidates = heapq.merge(*continuations, key=lambda candidate: candidate[0], reverse=True)
    finished, live = [*search.finished], list[Beam]()
    for rank, (total, beam, row, token_id, logprob) in enumerate(candidates):
        is_end = token_id in rules.end_token_ids
        if rank >= rules.width:
            if len(live) == rules.width:
                break
            if is_end:
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


def _continuations(beam: Beam, row: TokenLogprobs) -> Iterator[tuple[float, Beam, TokenLogprobs, int, float]]:
    """The beam's candidates, the best first. Those that cannot be have no finite log-probability."""
    for token_id, logprob in zip(row.top_ids, row.top_logprobs, strict=True):
        if math.isfinite(logprob):
            yield beam.total + logprob, beam, row, token_id, logprob


def _bound(beam: Beam, rules: BeamRules) -> float:
    """The most that a continuation of this beam can score: its probability cannot grow, and its length is limited."""
    length = rules.max_tokens if rules.length_penalty > 0 else len(beam.token_ids)
    return beam.total / math.pow(length, rules.length_penalty)
