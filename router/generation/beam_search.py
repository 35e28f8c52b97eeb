"""A beam search as its router knows it: the gang's rounds, applied one after the other, make beams of tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ...workers.wire.beams import BeamRound, BeamRules, BeamsSoFar, SearchState, choose, score
from ...workers.wire.messages import TokenLogprobs


@dataclass(frozen=True)
class Beam:
    token_ids: tuple[int, ...] = ()  # after the prompt; an end token is the last one
    logprobs: tuple[TokenLogprobs, ...] = ()  # one for each token
    total: float = 0.0  # the natural log of its probability

    def score(self, rules: BeamRules) -> float:
        return score(self.total, len(self.token_ids), rules)


@dataclass(frozen=True)
class BeamSearch:
    """`live` and `finished` beams, the best first. The search is over when none is live."""

    live: tuple[Beam, ...]  # all of one length
    finished: tuple[Beam, ...]

    def state(self, rules: BeamRules) -> SearchState:
        """The state of a search that has not ended."""
        totals, finished = [each.total for each in self.live], [each.score(rules) for each in self.finished]
        return SearchState(totals, len(self.live[0].token_ids), finished)

    def so_far(self, rules: BeamRules) -> BeamsSoFar | None:
        """From where a gang goes on with a search that is not over; None: from its begin."""
        beams = [each.token_ids for each in self.live]
        return BeamsSoFar.of(self.state(rules), beams) if beams[0] else None


NEW_SEARCH: Final = BeamSearch((Beam(),), ())


def advanced(
    search: BeamSearch, one: BeamRound, rules: BeamRules, is_stopped: Callable[[Beam], bool] = lambda _: False
) -> tuple[BeamSearch, bool]:
    """The search after a round, and whether a beam was stopped in it: the gang does not know of that."""
    grown, stopped = dict[int, Beam](), set[int]()

    def beam(index: int) -> Beam:
        if index not in grown:
            candidate = one.candidates[index]
            parent = search.live[candidate.parent]
            shown = TokenLogprobs(candidate.logprob, candidate.top_ids, candidate.top_logprobs)
            grown[index] = Beam(
                (*parent.token_ids, candidate.token_id), (*parent.logprobs, shown), parent.total + candidate.logprob
            )
        return grown[index]

    def is_stopped_here(index: int) -> bool:
        if is_stopped(beam(index)):
            stopped.add(index)
        return index in stopped

    choice = choose(search.state(rules), one.candidates, rules, is_stopped_here)
    finished = [*search.finished, *map(beam, choice.finished)]
    finished.sort(key=lambda each: each.score(rules), reverse=True)
    after = BeamSearch(tuple(map(beam, choice.live)), tuple(finished[: rules.width]))
    return after, bool(stopped)
