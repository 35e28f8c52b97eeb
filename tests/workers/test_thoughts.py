"""A budget of thinking tokens, against its definition and in engines."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.workers.decoding.token_counts import Thoughts
from motet.workers.wire.messages import ThinkingBudget

TOKENS = st.integers(0, 3)
MARKS = st.lists(TOKENS, min_size=1, max_size=3).map(tuple)


def found_at(mark: tuple[int, ...], tokens: Sequence[int], start: int) -> int | None:
    """Where the first mark from here on ends."""
    ends = range(start + len(mark), len(tokens) + 1)
    return next((end for end in ends if (*tokens[end - len(mark) : end],) == mark), None)


def must_come(budget: ThinkingBudget, output: Sequence[int]) -> int | None:
    """The definition: cut at its marks, one after the other."""
    place, is_thinking, num = 0, budget.has_begun, 0
    while True:
        end = found_at(budget.end if is_thinking else budget.begin, output, place)
        if is_thinking:
            num += (len(output) if end is None else end) - place
        if end is None:
            break
        place, is_thinking = end, not is_thinking
    if not is_thinking or num < budget.num_tokens:
        return None
    rest = [*output[place:]]
    kept = max(k for k in range(len(budget.end)) if k <= len(rest) and (*rest[len(rest) - k :],) == budget.end[:k])
    return budget.end[kept]


@given(
    budget=st.builds(ThinkingBudget, st.integers(0, 6), MARKS, MARKS, st.booleans()),
    output=st.lists(TOKENS, max_size=16),
    follows=st.booleans(),
)
def test_what_must_come_follows_from_the_tokens_however_they_came(
    budget: ThinkingBudget, output: list[int], follows: bool
) -> None:
    """Also of outputs that did not obey, as those behind a grammar's mask."""
    if follows:
        for place in range(len(output)):
            forced = must_come(budget, output[:place])
            output[place] = output[place] if forced is None else forced
    for num_given in range(len(output) + 1):
        thoughts = Thoughts(budget, output[:num_given])
        for place in range(num_given, len(output)):
            assert thoughts.forced == must_come(budget, output[:place])
            thoughts.add(output[place])
        assert thoughts.forced == must_come(budget, output)


@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_thoughts_have_no_more_tokens_than_the_budget(num_tokens: int) -> None:
    """All of them together, however often they begin."""
    budget, rng = ThinkingBudget(num_tokens, (7,), (8, 9)), random.Random(num_tokens)
    thoughts, output, num_thought, is_thinking = Thoughts(budget, ()), list[int](), 0, False
    for _ in range(400):
        token = thoughts.forced
        if token is None:
            token = rng.choice([1, 2, 3, 7, 8])
            num_thought += is_thinking
        thoughts.add(token)
        output.append(token)
        if is_thinking and output[-2:] == [8, 9]:
            is_thinking = False
        elif not is_thinking and token == 7:
            is_thinking = True
    assert num_thought == num_tokens
    assert output.count(9) > 3
