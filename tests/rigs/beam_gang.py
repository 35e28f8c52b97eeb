"""What a gang sends for a beam search, of a model that is a function of the tokens after the prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from motet.workers.wire.beams import best_candidates, choose, replayed
from motet.workers.wire.messages import SequenceRequest, SequenceUpdate, TokenLogprobs

# Of the tokens so far: the likeliest next ones and their log-probabilities, the likeliest first.
Model = Callable[[Sequence[int]], tuple[list[int], list[float]]]


def beam_updates(request: SequenceRequest, model: Model) -> list[SequenceUpdate]:
    """An update for each round of the search, after those that come with the request."""
    rules, updates = request.beams, list[SequenceUpdate]()
    assert rules is not None
    rounds = [*request.beam_rounds]
    state, beams = replayed(rounds, rules)
    while beams:
        tops = [model(beam) for beam in beams]
        num = rules.num_candidates
        rows = [TokenLogprobs(0.0, ids[:num], logprobs[:num]) for ids, logprobs in tops]
        rounds.append(best_candidates(state.totals, rows, rules))
        choice = choose(state, rounds[-1].candidates, rules, lambda _: False)
        candidates = [rounds[-1].candidates[index] for index in choice.live]
        beams = [[*beams[candidate.parent], candidate.token_id] for candidate in candidates]
        state = choice.state
        updates.append(
            SequenceUpdate(request.sequence_id, finish_reason=None if beams else "length", beam_rounds=[rounds[-1]])
        )
    return updates
