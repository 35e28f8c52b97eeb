"""The policy of beam search, against an exhaustive search and against a search that never ends early."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from itertools import product

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.router.generation.beam_streams import NEW_SEARCH, Beam, BeamSearch
from motet.router.generation.beam_streams import advanced as followed
from motet.workers.wire.beams import BeamRules, BeamsSoFar, SearchPath, SearchState, best_candidates, forks
from motet.workers.wire.messages import TokenLogprobs

Model = Callable[[tuple[int, ...]], list[float]]  # log-probabilities of the next token after these


def random_model(seed: int, vocab_size: int) -> Model:
    def model(token_ids: tuple[int, ...]) -> list[float]:
        generator = random.Random(f"{seed} {token_ids}")
        weights = [generator.random() ** 3 + 1e-6 for _ in range(vocab_size)]
        return [math.log(weight / sum(weights)) for weight in weights]

    return model


def reported(model: Model, beam: Beam, num_top: int) -> TokenLogprobs:
    """The update of an engine."""
    logprobs = model(beam.token_ids)
    top = sorted(range(len(logprobs)), key=lambda token: -logprobs[token])[:num_top]
    return TokenLogprobs(0.0, top, [logprobs[token] for token in top])


def advanced(
    state: BeamSearch, rows: list[TokenLogprobs], rules: BeamRules, is_stopped: Callable[[Beam], bool] = lambda _: False
) -> BeamSearch:
    """The search after a round, as the gang lists it and the router follows."""
    one = best_candidates([beam.total for beam in state.live], rows, rules)
    return followed(state, one, rules, is_stopped)[0]


def search(
    model: Model, rules: BeamRules, is_stopped: Callable[[Beam], bool] = lambda _: False
) -> tuple[BeamSearch, int]:
    """The search at its end, and the number of its rounds."""
    state, num_rounds = NEW_SEARCH, 0
    while state.live:
        state = advanced(state, [reported(model, beam, rules.num_candidates) for beam in state.live], rules, is_stopped)
        num_rounds += 1
    return state, num_rounds


def total_of(model: Model, token_ids: tuple[int, ...]) -> float:
    return sum(model(token_ids[:i])[token] for i, token in enumerate(token_ids))


def patient(model: Model, rules: BeamRules) -> list[tuple[int, ...]]:
    """A plain beam search over the whole vocabulary that never ends early."""
    live: list[tuple[int, ...]] = [()]
    finished: list[tuple[int, ...]] = []
    for length in range(1, rules.max_tokens + 1):
        grown = [(*tokens, token) for tokens in live for token in range(len(model(())))]
        grown.sort(key=lambda tokens: -total_of(model, tokens))
        finished += [tokens for tokens in grown[: rules.width] if tokens[-1] in rules.end_token_ids]
        live = [tokens for tokens in grown if tokens[-1] not in rules.end_token_ids][: rules.width]
        if length == rules.max_tokens:
            finished += live
    finished.sort(key=lambda tokens: -total_of(model, tokens) / len(tokens) ** rules.length_penalty)
    return finished[: rules.width]


@given(
    seed=st.integers(0, 10**6),
    vocab_size=st.integers(4, 12),
    width=st.integers(1, 4),
    max_tokens=st.integers(1, 6),
    num_ends=st.integers(0, 3),
    length_penalty=st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0]),
)
@settings(max_examples=150, deadline=None)
def test_it_finds_what_a_patient_search_over_all_tokens_finds(
    seed: int, vocab_size: int, width: int, max_tokens: int, num_ends: int, length_penalty: float
) -> None:
    model = random_model(seed, vocab_size)
    rules = BeamRules(width, max_tokens, frozenset(range(num_ends)), length_penalty)
    found, num_rounds = search(model, rules)
    assert [beam.token_ids for beam in found.finished] == patient(model, rules)
    assert num_rounds <= max_tokens
    for beam in found.finished:
        assert beam.total == pytest.approx(total_of(model, beam.token_ids))
        assert [one.chosen for one in beam.logprobs] == pytest.approx(
            [model(beam.token_ids[:i])[token] for i, token in enumerate(beam.token_ids)]
        )


@given(seed=st.integers(0, 10**6), length_penalty=st.sampled_from([0.0, 1.0, 1.5]))
@settings(max_examples=30, deadline=None)
def test_with_room_for_all_it_finds_the_best_there_are(seed: int, length_penalty: float) -> None:
    vocab_size, max_tokens, end = 3, 4, 0
    model = random_model(seed, vocab_size)
    width = vocab_size**max_tokens
    found, _ = search(model, BeamRules(width, max_tokens, frozenset({end}), length_penalty))
    everything = [
        tokens
        for length in range(1, max_tokens + 1)
        for tokens in product(range(vocab_size), repeat=length)
        if end not in tokens[:-1] and (tokens[-1] == end or length == max_tokens)
    ]
    everything.sort(key=lambda tokens: -total_of(model, tokens) / len(tokens) ** length_penalty)
    assert [beam.token_ids for beam in found.finished] == everything


def test_it_ends_once_nothing_better_can_come() -> None:
    def model(token_ids: tuple[int, ...]) -> list[float]:
        return [math.log(0.9), math.log(0.06), math.log(0.04)]

    rules = BeamRules(1, 1000, frozenset({0}), length_penalty=0.0)
    found, num_rounds = search(model, rules)
    assert num_rounds == 1
    assert [beam.token_ids for beam in found.finished] == [(0,)]
    # With a reward for length, something that is still unlikely may win in the end, so it goes on for longer.
    assert search(model, BeamRules(1, 30, frozenset({0}), length_penalty=1.0))[1] > 1


def test_a_stopped_beam_is_finished_and_the_others_go_on() -> None:
    model = random_model(3, 6)
    rules = BeamRules(3, 5, frozenset(), length_penalty=0.0, may_stop=True)
    stop = search(model, rules)[0].finished[0].token_ids[1]
    found, _ = search(model, rules, lambda beam: beam.token_ids[-1] == stop)
    assert any(beam.token_ids[-1] == stop for beam in found.finished)
    assert all(stop not in beam.token_ids[:-1] for beam in found.finished)
    assert all(len(beam.token_ids) == 5 or beam.token_ids[-1] == stop for beam in found.finished)


def test_a_token_without_any_chance_is_no_candidate() -> None:
    row = TokenLogprobs(0.0, [4, 5, 6], [-0.1, -2.5, -math.inf])
    state = advanced(NEW_SEARCH, [row], BeamRules(3, 2, frozenset()))
    assert [beam.token_ids for beam in state.live] == [(4,), (5,)]


def test_beams_remember_as_many_alternatives_as_requested() -> None:
    rules = BeamRules(1, 1, frozenset({9}), num_logprobs=1)
    assert rules.num_candidates == 2
    state = advanced(NEW_SEARCH, [TokenLogprobs(0.0, [4, 9], [-0.1, -2.5])], rules)
    assert state.finished == (Beam((4,), (TokenLogprobs(-0.1, [4], [-0.1]),), -0.1),)
    assert BeamRules(2, 1, frozenset({9}), num_logprobs=20).num_candidates == 20


@given(
    seed=st.integers(0, 10**6),
    width=st.integers(1, 5),
    max_tokens=st.integers(2, 7),
    num_ends=st.integers(0, 2),
    stops=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_a_search_is_fixed_by_its_rounds(seed: int, width: int, max_tokens: int, num_ends: int, stops: bool) -> None:
    """And by where it was so far: it goes on from there once a beam was stopped, which the gang does not know of."""
    model = random_model(seed, 9)
    rules = BeamRules(width, max_tokens, frozenset(range(num_ends)), may_stop=stops)
    is_stopped: Callable[[Beam], bool] = lambda beam: stops and sum(beam.token_ids) % 7 == 3  # noqa: E731
    state, path = NEW_SEARCH, SearchPath(rules)
    while state.live:
        rows = [reported(model, beam, rules.num_candidates) for beam in state.live]
        one = best_candidates([beam.total for beam in state.live], rows, rules)
        assert len(one.candidates) <= 2 * (1 + stops) * width
        state, has_stopped = followed(state, one, rules, is_stopped)
        path.add(one)
        if has_stopped and state.live:
            path = SearchPath(rules, state.so_far(rules))
        if state.live:
            so_far = state.so_far(rules)
            assert so_far is not None and so_far == path.so_far
            assert so_far.state(rules) == state.state(rules)
            assert [tuple(beam) for beam in so_far.beams] == [beam.token_ids for beam in state.live]
        elif not has_stopped:
            assert path.so_far is None


def test_a_search_that_goes_on_is_as_short_as_its_beams() -> None:
    """What all beams have in common is sent once, and nothing of beams that have died."""
    beams = [(*range(1000), 2000 + number) for number in range(64)]
    state = SearchState([-1.0] * 64, 1001, [-2.0] * 64)
    so_far = BeamsSoFar.of(state, beams)
    assert [tuple(beam) for beam in so_far.beams] == beams
    assert len(msgspec.msgpack.encode(so_far)) < 3 * 1000 + 64 * (4 + 9 + 9) + 20


@given(st.integers(1, 8).flatmap(lambda width: st.tuples(st.just(width), st.data())))
@settings(max_examples=200)
def test_no_more_beams_are_forked_than_must_be(case: tuple[int, st.DataObject]) -> None:
    width, data = case
    places = data.draw(st.lists(st.sampled_from(range(width)), unique=True, min_size=1))
    parents = data.draw(st.lists(st.sampled_from(places), min_size=1, max_size=width))
    found = forks(parents, width)
    assert len({*found}) == len(found) and {*found} <= {*range(width)}
    assert 0 in found
    num_forks = sum(place != parent for place, parent in zip(found, parents, strict=True))
    least = len(parents) - len({*parents})
    assert num_forks <= least + (0 not in parents and not least)
    for place, parent in zip(found, parents, strict=True):  # none is written over before it was forked from
        assert place == parent or place not in parents or place == 0
