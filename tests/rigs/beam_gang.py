"""What a gang sends for a beam search, of a model that is a function of the tokens after the prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from motet.workers.wire.beams import NEW_STATE, BeamRound, BeamRules, BeamsSoFar, SearchPath, best_candidates, choose
from motet.workers.wire.messages import FinishReason, SequenceRequest, SequenceUpdate, TokenLogprobs

# Of the tokens so far: the likeliest next ones and their log-probabilities, the likeliest first.
Model = Callable[[Sequence[int]], tuple[list[int], list[float]]]


def beam_updates(request: SequenceRequest, model: Model) -> list[SequenceUpdate]:
    """An update for each round of the search, from where it is so far."""
    rules, so_far, updates = request.beams, request.beams_so_far, list[SequenceUpdate]()
    assert rules is not None
    state = NEW_STATE if so_far is None else so_far.state(rules)
    beams = [[]] if so_far is None else so_far.beams
    while beams:
        tops = [model(beam) for beam in beams]
        num = rules.num_candidates
        rows = [TokenLogprobs(0.0, ids[:num], logprobs[:num]) for ids, logprobs in tops]
        one = best_candidates(state.totals, rows, rules)
        choice = choose(state, one.candidates, rules, lambda _: False)
        candidates = [one.candidates[index] for index in choice.live]
        beams = [[*beams[candidate.parent], candidate.token_id] for candidate in candidates]
        state = choice.state
        reason: FinishReason | None = None if beams else "length"
        updates.append(SequenceUpdate(request.sequence_id, finish_reason=reason, beam_rounds=[one]))
    return updates


def beams_after(rounds: Sequence[BeamRound], rules: BeamRules | None) -> BeamsSoFar | None:
    """A search after these rounds."""
    assert rules is not None
    path = SearchPath(rules)
    for one in rounds:
        path.add(one)
    return path.so_far
