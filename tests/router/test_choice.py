from __future__ import annotations

import random

import pytest

from motet.router.generation.choice import Choice, Delta
from motet.router.text.stop_strings import StopMatcher, StopStrings
from motet.router.text.text import TextService
from motet.tests.rigs.router_rig import EOS, decoded, encoded, logprobs_of, text_service
from motet.workers.wire.messages import SequenceUpdate

ANSWER = "the quick 你猫 brown fox jumps 🎉 over"


@pytest.fixture(scope="module")
def text() -> TextService:
    return text_service()


def fold_all(choice: Choice, updates: list[SequenceUpdate]) -> list[Delta]:
    deltas = []
    for update in updates:
        deltas.append(choice.fold(update))
        if choice.finish_reason is not None:
            break
    return deltas


def in_random_updates(token_ids: list[int], rng: random.Random) -> list[SequenceUpdate]:
    """The tokens in updates of one to four tokens each, as in merged frames."""
    updates = []
    start = 0
    while start < len(token_ids):
        part = token_ids[start : start + rng.randrange(1, 5)]
        start += len(part)
        logprobs = [logprobs_of(token_id, 0) for token_id in part]
        updates.append(SequenceUpdate(1, part, logprobs, "stop" if part[-1] == EOS else None))
    return updates


@pytest.mark.parametrize("seed", range(60))
def test_any_stop_string_at_any_split(text: TextService, seed: int) -> None:
    rng = random.Random(seed)
    token_ids = [*encoded(text, ANSWER), EOS]
    strings = tuple(
        ANSWER[(start := rng.randrange(len(ANSWER))) : start + rng.randrange(1, 9)] for _ in range(rng.randrange(1, 4))
    )
    choice = Choice(text.detokenizer([]), StopStrings(strings), keep_token_ids=seed % 2 == 0, keep_logprobs=True)
    deltas = fold_all(choice, in_random_updates(token_ids, rng))
    shown = "".join(delta.text for delta in deltas)
    assert choice.finish_reason == "stop"
    assert ANSWER.startswith(shown)
    assert not any(string in shown for string in strings)
    assert ANSWER[len(shown) :].startswith(strings)
    # Counted up to the token that completed the match: with one token fewer no stop string is complete.
    before = decoded(text, token_ids[: choice.num_tokens - 1]).rstrip("�")
    assert not any(string in before for string in strings)
    reported = [token for delta in deltas for token in delta.logprobs]
    if seed % 2 == 0:
        assert [i for delta in deltas for i in delta.token_ids] == token_ids[: choice.num_tokens]
        assert [token.token_id for token in reported] == token_ids[: choice.num_tokens]
    else:
        assert all(token.offset < len(shown) for token in reported)
        assert [token.token_id for token in reported] == token_ids[: len(reported)]


def test_tokens_go_out_with_their_text(text: TextService) -> None:
    token_ids = [*encoded(text, "猫"), EOS]
    assert len(token_ids) == 4
    choice = Choice(text.detokenizer([]), StopStrings(), keep_token_ids=True)
    deltas = [choice.fold(SequenceUpdate(1, [token_id])) for token_id in token_ids[:-1]]
    assert [delta.is_empty for delta in deltas] == [True, True, False]
    assert deltas[-1] == Delta("猫", token_ids[:-1], [], None)
    assert choice.fold(SequenceUpdate(1, [EOS], None, "stop")) == Delta("", [EOS], [], "stop")
    assert choice.num_tokens == 4


def test_a_cut_character_is_reported_at_the_end(text: TextService) -> None:
    token_ids = encoded(text, "fox 猫")[:-1]
    choice = Choice(text.detokenizer([]), StopStrings(("xyz",)))
    deltas = fold_all(choice, [SequenceUpdate(1, token_ids, None, "length")])
    assert "".join(delta.text for delta in deltas) == decoded(text, token_ids) == "fox �"
    assert choice.finish_reason == "length"


def test_text_that_could_start_a_stop_string_is_held(text: TextService) -> None:
    choice = Choice(text.detokenizer([]), StopStrings(("fox!", "xy")))
    assert choice.fold(SequenceUpdate(1, encoded(text, "a fo"))).text == "a "
    assert choice.fold(SequenceUpdate(1, encoded(text, "g fox"))).text == "fog "
    assert choice.fold(SequenceUpdate(1, [EOS], None, "stop")).text == "fox"


@pytest.mark.parametrize(
    ("strings", "string", "found", "held"),
    [
        ((), "abc", None, 0),
        (("bc", "c"), "abc", 1, 0),
        (("c", "bc"), "abc", 1, 0),
        (("cd", "bcd"), "abc", None, 2),
        (("abcabd",), "abcab", None, 5),
        (("aa",), "ba", None, 1),
    ],
)
def test_stop_strings(strings: tuple[str, ...], string: str, found: int | None, held: int) -> None:
    stop = StopMatcher(StopStrings(strings).automaton)
    assert stop.find(string) == (None if found is None else (found, 3))
    if found is None:
        assert stop.num_held == held
