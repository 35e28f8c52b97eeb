"""Beam search as a policy: which continuations of a prompt are pursued, and which are the best in the end.

Pure functions of plain values, for the gang that computes a search and for the router that follows it. A round is one
token for each live beam. The gang lists its candidates (`best_candidates`), and both sides `choose` from these, so a
router knows at each moment from where the search goes on at any gang (`BeamsSoFar`). The rules are those of
transformers' `generate(num_beams=width, early_stopping="never")`, and so are the scores and sequences.
"""

from __future__ import annotations

import heapq
import math
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

if TYPE_CHECKING:
    from .messages import TokenLogprobs


class BeamRules(msgspec.Struct, frozen=True):
    width: int  # beams that are pursued side by side, and that are found
    max_tokens: int
    end_token_ids: frozenset[int]  # a beam is finished with the first of them
    length_penalty: float = 1.0
    num_logprobs: int = 0  # of the likeliest tokens at each place; beams remember them
    may_stop: bool = False  # the router may finish beams by rules of its own: it needs more candidates

    @property
    def num_candidates(self) -> int:
        """Next tokens of each beam that are computed: they hold the best `width`, and the best `width` that go on."""
        return max(self.width + len(self.end_token_ids), self.num_logprobs)


class BeamCandidate(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One token after one of the live beams."""

    parent: int  # the beam's place among the live ones
    token_id: int
    logprob: float  # natural
    top_ids: list[int] = []  # the likeliest tokens at its place, as many as requested
    top_logprobs: list[float] = []


class BeamRound(msgspec.Struct, frozen=True, array_like=True):
    """The candidates of one round, the best first."""

    candidates: list[BeamCandidate]


class SearchState(NamedTuple):
    """What the choice of a round depends on."""

    totals: Sequence[float]  # of live beams, the best first: natural logs of their probabilities
    num_tokens: int  # of each live beam
    finished: Sequence[float]  # scores of the best finished beams, the best first


class BeamChoice(NamedTuple):
    """Indices of candidates, the best first."""

    live: list[int]
    finished: list[int]
    state: SearchState  # after the round. The search is over when no beam is live


NEW_STATE = SearchState((0.0,), 0, ())


def score(total: float, num_tokens: int, rules: BeamRules) -> float:
    """What finished beams are compared by: more is better. A penalty above 0 favours long beams."""
    return total / math.pow(num_tokens, rules.length_penalty)


def best_candidates(totals: Sequence[float], rows: Sequence[TokenLogprobs], rules: BeamRules) -> BeamRound:
    """The candidates that `choose` looks at. `rows`: for each live beam its likeliest next tokens, the likeliest
    first; `chosen` is ignored.

    Ties stay as they are. A token without a finite log-probability is no candidate.
    """
    merged = heapq.merge(
        *[_continuations(parent, total, row) for parent, (total, row) in enumerate(zip(totals, rows, strict=True))],
        key=lambda candidate: candidate[0],
        reverse=True,
    )
    candidates, num_going_on = list[BeamCandidate](), 0
    max_going_on = 2 * rules.width if rules.may_stop else rules.width
    for _, parent, token_id, logprob in merged:
        is_end = token_id in rules.end_token_ids
        if len(candidates) >= rules.width:
            if num_going_on == max_going_on:
                break
            if is_end:
                continue
        num_going_on += not is_end
        logprobs, num = rows[parent], rules.num_logprobs
        candidates.append(BeamCandidate(parent, token_id, logprob, logprobs.top_ids[:num], logprobs.top_logprobs[:num]))
    return BeamRound(candidates)


def _continuations(parent: int, total: float, row: TokenLogprobs) -> Iterator[tuple[float, int, int, float]]:
    """A beam's candidates, the best first."""
    for token_id, logprob in zip(row.top_ids, row.top_logprobs, strict=True):
        if math.isfinite(logprob):
            yield total + logprob, parent, token_id, logprob


def choose(
    state: SearchState, candidates: Sequence[BeamCandidate], rules: BeamRules, is_stopped: Callable[[int], bool]
) -> BeamChoice:
    """The next beams.

    Among the best `width` candidates, those with an end token are finished. Of those without one the best `width` go
    on, unless they are stopped, which finishes them too. The search is over at `max_tokens`, and as soon as no live
    beam can become one of the best `width` finished ones. `is_stopped` is called with the indices of candidates that
    would go on, in their order.
    """
    num_tokens, totals = state.num_tokens + 1, list[float]()
    live, finished = list[int](), list[int]()
    scores = [*state.finished]
    for index, candidate in enumerate(candidates):
        is_end = candidate.token_id in rules.end_token_ids
        if index >= rules.width:
            if len(live) == rules.width:
                break
            if is_end:
                continue
        total = state.totals[candidate.parent] + candidate.logprob
        if is_end or num_tokens >= rules.max_tokens or is_stopped(index):
            finished.append(index)
            scores.append(score(total, num_tokens, rules))
        else:
            live.append(index)
            totals.append(total)
    scores.sort(reverse=True)
    del scores[rules.width :]
    if len(scores) == rules.width and live and _bound(totals[0], num_tokens, rules) <= scores[-1]:
        live.clear()
        totals.clear()
    return BeamChoice(live, finished, SearchState(totals, num_tokens, scores))


def _bound(total: float, num_tokens: int, rules: BeamRules) -> float:
    """The most that a continuation of a beam can score: its probability cannot grow, and its length is limited."""
    return score(total, rules.max_tokens if rules.length_penalty > 0 else num_tokens, rules)


class BeamsSoFar(msgspec.Struct, frozen=True, array_like=True):
    """A search after some rounds: all that the further ones depend on, so that a gang need not choose these again."""

    totals: list[float]  # see `SearchState`
    finished: list[float]
    common: list[int]  # first tokens of all live beams: most, as a rule
    ends: list[list[int]]  # of each live beam, the best first: the tokens after them

    @staticmethod
    def of(state: SearchState, beams: Sequence[tuple[int, ...]]) -> BeamsSoFar:
        """`beams`: the tokens of each live one, of which there are some."""
        low, high = min(beams), max(beams)  # what these have in common all others have, which lie between them
        num_common = bisect_left(range(1, len(low) + 1), True, key=lambda number: low[:number] != high[:number])
        ends = [[*beam[num_common:]] for beam in beams]
        return BeamsSoFar([*state.totals], [*state.finished], [*beams[0][:num_common]], ends)

    def state(self, rules: BeamRules) -> SearchState:
        """Raises ValueError if no such search can be so far."""
        lengths = {len(end) for end in self.ends}
        num_tokens = len(self.common) + max(lengths, default=0)
        if not (1 <= len(self.ends) == len(self.totals) <= rules.width >= len(self.finished) and len(lengths) == 1):
            raise ValueError(
                f"{len(self.ends)} beams with {len(self.totals)} totals and {len(self.finished)} finished ones"
            )
        if not 1 <= num_tokens < rules.max_tokens:
            raise ValueError(f"beams of {num_tokens} tokens, of {rules.max_tokens}")
        return SearchState(self.totals, num_tokens, self.finished)

    @property
    def beams(self) -> list[list[int]]:
        """The tokens of each live beam."""
        return [[*self.common, *end] for end in self.ends]


class SearchPath:
    """Follows a search round by round, and keeps of each round no more than the beams that went on."""

    def __init__(self, rules: BeamRules, so_far: BeamsSoFar | None = None) -> None:
        self._rules = rules
        self._beams_so_far = [[]] if so_far is None else so_far.beams
        self.state = NEW_STATE if so_far is None else so_far.state(rules)
        self._rounds: list[tuple[array[int], array[int]]] = []  # of each round: parents and tokens of the live beams

    def add(self, beam_round: BeamRound) -> None:
        choice = choose(self.state, beam_round.candidates, self._rules, lambda _: False)
        chosen = [beam_round.candidates[index] for index in choice.live]
        self.state = choice.state
        self._rounds.append(
            (array("I", [each.parent for each in chosen]), array("I", [each.token_id for each in chosen]))
        )

    @property
    def so_far(self) -> BeamsSoFar | None:
        """None: no round has been chosen, or the search is over."""
        beams = list[tuple[int, ...]]()
        for beam in range(len(self.state.totals)):
            token_ids = list[int]()
            for parents, tokens in reversed(self._rounds):
                token_ids.append(tokens[beam])
                beam = parents[beam]
            beams.append((*self._beams_so_far[beam], *reversed(token_ids)))
        return BeamsSoFar.of(self.state, beams) if beams and beams[0] else None


def forks(parents: Sequence[int], num_places: int, root: int = 0) -> list[int]:
    """For each child, the place that it is computed at: a search's beams are at places, each on pages of its own.

    `parents`: the place of each child's parent. `num_places`: at least as many as there are children. The first child
    of a parent stays where the parent is, so only the others are forked: no fewer forks are possible, but that one is
    added if no child were at the place `root`.
    """
    places, used = [-1] * len(parents), set[int]()
    for child, parent in enumerate(parents):
        if parent not in used:
            places[child] = parent
            used.add(parent)
    free = iter([root] * (root not in used) + [each for each in range(num_places) if each not in {*used, root}])
    for child in range(len(parents)):
        if places[child] < 0:
            places[child] = next(free)
    if parents and root not in places:
        places[-1] = root
    return places
