"""When to roll back a canary: a sequential test that may be made after every answer.

For each kind of bad event the two versions' rates get bounds that hold at all times at once: confidence sequences from
a beta-binomial mixture (Robbins 1970; Howard et al., arXiv 1810.08240 §3), by Ville's inequality. A canary is rolled
back when its lower bound exceeds the stable version's upper bound by a margin. So a canary that is as good as the
stable version is rolled back with probability FALSE_ALARM at most, however long the trial lasts and however often it is
judged.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import lgamma, log
from typing import Final

FALSE_ALARM: Final = 0.01  # of a whole trial
MIN_ANSWERS: Final = 20  # of each version, and the same number of thumbs where thumbs are judged
FAULT_MARGIN: Final = 0.02  # how much larger the canary's share of failures may be
SLOW_MARGIN: Final = 0.15  # how much larger its share of answers slower than any edge may be
THUMB_MARGIN: Final = 0.1
FREE_ANSWERS: Final = 2  # of each sticky key that always count, with each version
ANSWERS_A_SHARE: Final = 100  # one more of a key counts for each 100 counted, of the same kind and version
# Edges of the histograms of times, each twice the previous one.
FIRST_TOKEN_EDGES_S: Final = tuple(0.004 * 2**step for step in range(15))  # up to 66 s
PER_TOKEN_EDGES_S: Final = tuple(0.0005 * 2**step for step in range(14))  # up to 4 s
_NUM_KINDS: Final = 5
_PRIOR: Final = 0.5  # Jeffreys' of a rate
_STEPS: Final = 40  # of a bisection


@dataclass(frozen=True)
class ArmCounts:
    """Counts of the answers of one version since the trial began."""

    answers: int = 0
    errors: int = 0  # by faults of motet, during the answer
    refused: int = 0  # because a gang could not load the version
    first_token: tuple[int, ...] = (0,) * (len(FIRST_TOKEN_EDGES_S) + 1)  # answers by time, between the edges
    per_token: tuple[int, ...] = (0,) * (len(PER_TOKEN_EDGES_S) + 1)
    thumbs_up: int = 0
    thumbs_down: int = 0
    uncounted: int = 0  # further answers, of sticky keys that had reached their limit of counted answers


@dataclass(frozen=True)
class _Question:
    """Whether the canary's share of bad events is larger."""

    symptom: str
    stable: tuple[int, int]  # bad ones, and all
    canary: tuple[int, int]
    margin: float
    false_alarm: float


def counts_still(num_of_key: int, num_of_all: int) -> bool:
    """Whether one more answer of a sticky key counts, given how many of its own and of all have counted.

    Both numbers are of one kind and version. A key makes up at most a hundredth of the sample plus two answers. So two
    keys alone cannot roll back a canary that is good for all others: two hundredths are within every margin, and four
    of MIN_ANSWERS decide nothing. At least ten keys are needed to judge a version.

    >>> [counts_still(num_of_key, 1000) for num_of_key in (0, 11, 12)]
    [True, True, False]
    """
    return num_of_key < FREE_ANSWERS + num_of_all // ANSWERS_A_SHARE


def why_worse(stable: ArmCounts, canary: ArmCounts) -> str | None:
    """Why the canary must be rolled back; None: it need not be."""
    if min(stable.answers, canary.answers) < MIN_ANSWERS:
        return None
    for ask in _questions(stable, canary):
        if min(ask.stable[1], ask.canary[1]) < MIN_ANSWERS:
            continue
        if ask.canary[0] / ask.canary[1] <= ask.stable[0] / ask.stable[1] + ask.margin:
            continue
        lowest, _ = rate_bounds(*ask.canary, ask.false_alarm / 2)
        _, highest = rate_bounds(*ask.stable, ask.false_alarm / 2)
        if lowest > highest + ask.margin:
            return (
                f"{ask.symptom}: {ask.canary[0]} of {ask.canary[1]}, "
                f"and {ask.stable[0]} of {ask.stable[1]} with the current version"
            )
    return None


def _questions(stable: ArmCounts, canary: ArmCounts) -> Iterator[_Question]:
    share = FALSE_ALARM / _NUM_KINDS
    for symptom, bad in (("answers that failed", "errors"), ("answers refused, as it could not be loaded", "refused")):
        pairs = [(getattr(arm, bad), arm.answers) for arm in (stable, canary)]
        yield _Question(symptom, pairs[0], pairs[1], FAULT_MARGIN, share)
    for symptom, times, edges in (
        ("first tokens later than {:g} s", "first_token", FIRST_TOKEN_EDGES_S),
        ("answers slower than {:g} s a token", "per_token", PER_TOKEN_EDGES_S),
    ):
        for place, edge in enumerate(edges):
            counts = [getattr(arm, times) for arm in (stable, canary)]
            pairs = [(sum(count[place + 1 :]), sum(count)) for count in counts]
            yield _Question(symptom.format(edge), pairs[0], pairs[1], SLOW_MARGIN, share / len(edges))
    thumbs = [(arm.thumbs_down, arm.thumbs_down + arm.thumbs_up) for arm in (stable, canary)]
    yield _Question("thumbs down", thumbs[0], thumbs[1], THUMB_MARGIN, share)


@lru_cache(maxsize=4096)
def rate_bounds(num_bad: int, num: int, false_alarm: float) -> tuple[float, float]:
    """Bounds of the rate. With probability 1 - `false_alarm` all of them, for all later counts too, hold at once."""
    num_good = num - num_bad
    evidence = _log_beta(_PRIOR + num_bad, _PRIOR + num_good) - _log_beta(_PRIOR, _PRIOR) + log(false_alarm)

    def is_possible(rate: float) -> bool:
        """Whether this rate explains the counts nearly as well as a mixture of all rates does."""
        bad = num_bad * log(rate) if num_bad else 0.0
        return evidence < bad + (num_good * log(1 - rate) if num_good else 0.0)

    likeliest = num_bad / num if num else 0.5
    lowest = _border(is_possible, likeliest, 0.0) if num_bad else 0.0
    highest = _border(is_possible, likeliest, 1.0) if num_good else 1.0
    return lowest, highest


def _border(is_possible: Callable[[float], bool], inside: float, outside: float) -> float:
    for _ in range(_STEPS):
        middle = (inside + outside) / 2
        if is_possible(middle):
            inside = middle
        else:
            outside = middle
    return outside


def _log_beta(a: float, b: float) -> float:
    return lgamma(a) + lgamma(b) - lgamma(a + b)


def first_token_bin(seconds: float) -> int:
    return bisect_right(FIRST_TOKEN_EDGES_S, seconds)


def per_token_bin(seconds: float) -> int:
    return bisect_right(PER_TOKEN_EDGES_S, seconds)
