"""The automaton of stop strings against a search that knows all of the text."""

from __future__ import annotations

import random
import time

import pytest

from motet.router.text.stop_strings import StopMatcher, StopStrings


def naive_find(text: str, strings: tuple[str, ...]) -> int | None:
    return min((start for string in strings if (start := text.find(string)) >= 0), default=None)


def naive_held(text: str, strings: tuple[str, ...]) -> int:
    lengths = [length for string in strings for length in range(1, len(string)) if text.endswith(string[:length])]
    return max(lengths, default=0)


@pytest.mark.parametrize("seed", range(200))
def test_it_finds_what_a_search_of_the_whole_text_finds(seed: int) -> None:
    rng = random.Random(seed)
    letters = "ab" if seed % 2 else "abc\u00e9\U0001f600"
    strings = tuple("".join(rng.choices(letters, k=rng.randrange(1, 2 + seed % 9))) for _ in range(rng.randrange(1, 6)))
    matcher, text = StopMatcher(StopStrings(strings).automaton), ""
    for _ in range(60):
        piece = "".join(rng.choices(letters, k=rng.randrange(4)))
        expected = naive_find(text + piece, strings)
        found = matcher.find(piece)
        assert (None if found is None else len(text) + found[0]) == expected
        text += piece
        if found is not None:
            assert text[len(text) - len(piece) + found[0] : len(text) - len(piece) + found[1]] in strings
            return
        assert matcher.num_held == naive_held(text, strings)


def test_a_copy_goes_on_by_itself() -> None:
    matcher = StopMatcher(StopStrings(("abc",)).automaton)
    assert matcher.find("ab") is None
    copy = matcher.copy()
    assert copy.find("x") is None
    assert (matcher.num_held, copy.num_held) == (2, 0)
    assert matcher.find("c") == (-2, 1)


def test_what_it_costs_does_not_grow_with_the_strings() -> None:
    """Text that always is nearly a stop string: the worst that there is for a search that begins anew each time."""

    def cost(length: int) -> float:
        strings = tuple("a" * (length - 1) + chr(ord("b") + number) for number in range(16))
        automaton = StopStrings(strings).automaton
        matcher, fastest = StopMatcher(automaton), float("inf")
        for _ in range(5):
            began_at = time.thread_time()
            for _ in range(2000):
                matcher.find("aaaa")
            fastest = min(fastest, time.thread_time() - began_at)
        return fastest

    assert cost(1000) < 4 * cost(10)
