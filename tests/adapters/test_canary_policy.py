"""When a canary ends, and which requests get it: properties of the pure functions."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from motet.adapters.registry.versions.canary_policy import (
    ANSWERS_A_SHARE,
    FALSE_ALARM,
    FIRST_TOKEN_EDGES_S,
    FREE_ANSWERS,
    MIN_ANSWERS,
    ArmCounts,
    counts_still,
    first_token_bin,
    rate_bounds,
    why_worse,
)
from motet.adapters.registry.versions.rollout import gets_canary


class Trial:
    """Answers come to both versions; the policy is applied every few answers, as by a judge."""

    def __init__(self, chooser: random.Random) -> None:
        self._chooser = chooser
        self.counts: dict[str, Any] = {
            arm: dict.fromkeys(("answers", "errors", "refused", "thumbs_down"), 0) for arm in "sc"
        }
        self.first = {arm: [0] * (len(FIRST_TOKEN_EDGES_S) + 1) for arm in "sc"}

    def answer(self, arm: str, error_rate: float, first_token_s: float) -> None:
        counts = self.counts[arm]
        counts["answers"] += 1
        counts["errors"] += self._chooser.random() < error_rate
        self.first[arm][first_token_bin(first_token_s * self._chooser.lognormvariate(0, 0.5))] += 1

    def verdict(self) -> str | None:
        stable, canary = (ArmCounts(**self.counts[arm], first_token=tuple(self.first[arm])) for arm in "sc")
        return why_worse(stable, canary)


def length(seed: int, rates: tuple[float, float], times: tuple[float, float], num: int, share: float = 0.5) -> int:
    """After how many answers the canary goes; `num`: it does not within so many."""
    chooser = random.Random(seed)
    trial = Trial(chooser)
    for step in range(1, num):
        arm = chooser.random() < share
        trial.answer("c" if arm else "s", rates[arm], times[arm])
        if step % 10 == 0 and trial.verdict() is not None:
            return step
    return num


@pytest.mark.parametrize("rate", [0.0, 0.01, 0.3])
@pytest.mark.parametrize("share", [0.05, 0.5])
def test_equal_versions_are_not_distinguished(rate: float, share: float) -> None:
    trials = [length(seed, (rate, rate), (0.1, 0.1), 1000, share) for seed in range(60)]
    assert sum(end < 1000 for end in trials) == 0  # FALSE_ALARM of 60 trials is less than one


@pytest.mark.parametrize("rate", [0.02, 0.2, 0.5])
def test_bounds_hold_at_all_times_at_once_as_often_as_they_say(rate: float) -> None:
    chooser, wrong, num_trials, alarm = random.Random(1), 0, 400, 0.1
    for _ in range(num_trials):
        bad = 0
        for num in range(1, 200):
            bad += chooser.random() < rate
            low, high = rate_bounds(bad, num, alarm)
            assert 0 <= low <= bad / num <= high <= 1
            if not low <= rate <= high:
                wrong += 1
                break
    assert wrong <= num_trials * alarm
    assert FALSE_ALARM <= 0.01


@pytest.mark.parametrize(("rates", "most"), [((0.0, 1.0), 80), ((0.01, 0.5), 250), ((0.02, 0.2), 1500)])
def test_a_canary_that_fails_goes_quickly(rates: tuple[float, float], most: int) -> None:
    ends = sorted(length(seed, rates, (0.1, 0.1), most) for seed in range(20))
    assert ends[17] < most, ends
    assert ends[0] >= 2 * MIN_ANSWERS // 2


def test_a_canary_that_is_slow_goes() -> None:
    ends = sorted(length(seed, (0.0, 0.0), (0.1, 0.8), 600) for seed in range(10))
    assert ends[8] < 600, ends


def test_a_canary_is_not_judged_by_a_few_answers() -> None:
    few, many = MIN_ANSWERS - 1, 10_000
    assert why_worse(ArmCounts(answers=many), ArmCounts(answers=few, errors=few)) is None
    assert why_worse(ArmCounts(answers=few), ArmCounts(answers=many, errors=many)) is None


def test_refusals_and_thumbs_are_judged_too() -> None:
    good = ArmCounts(answers=500, thumbs_up=200)
    refused = why_worse(good, ArmCounts(answers=50, refused=50))
    assert refused is not None and "could not be loaded: 50 of 50, and 0 of 500" in refused
    disliked = why_worse(good, ArmCounts(answers=100, thumbs_down=60, thumbs_up=10))
    assert disliked is not None and "thumbs down" in disliked
    assert why_worse(ArmCounts(answers=100, errors=100), ArmCounts(answers=100)) is None  # better is no reason


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5, 0.9])
def test_a_share_of_the_keys_gets_the_canary(share: float) -> None:
    num = 50_000
    found = sum(gets_canary(share, f"user {number}", "a canary") for number in range(num))
    assert abs(found / num - share) < 0.01


def test_a_larger_share_only_adds_keys_and_another_canary_draws_anew() -> None:
    keys = [f"user {number}" for number in range(5000)]
    before: set[str] = set()
    for share in (0.0, 0.02, 0.1, 0.5, 0.99, 1.0):
        now = {key for key in keys if gets_canary(share, key, "c1")}
        assert before <= now
        before = now
    assert before == set(keys)
    other = {key for key in keys if gets_canary(0.1, key, "c2")}
    assert other != {key for key in keys if gets_canary(0.1, key, "c1")}


class Counted:
    """Answers by sticky keys, counted as `counts_still` lets."""

    def __init__(self) -> None:
        self.own: Counter[tuple[str, str]] = Counter()
        self.all: Counter[str] = Counter()
        self.bad: Counter[str] = Counter()

    def answer(self, arm: str, key: str, *, is_bad: bool) -> None:
        if counts_still(self.own[arm, key], self.all[arm]):
            self.own[arm, key] += 1
            self.all[arm] += 1
            self.bad[arm] += is_bad

    def verdicts(self) -> list[str | None]:
        """With bad answers as failures, as slow ones, and as thumbs down."""
        found = []
        for kind in ("errors", "first_token", "thumbs_down"):
            arms = []
            for arm in "sc":
                num, bad = self.all[arm], self.bad[arm]
                times = (num - bad, *[0] * (len(FIRST_TOKEN_EDGES_S) - 1), bad)
                given: dict[str, Any] = {"first_token": times} if kind == "first_token" else {kind: bad}
                arms.append(ArmCounts(answers=num, thumbs_up=num - bad, **given))
            found.append(why_worse(*arms))
        return found


@pytest.mark.parametrize("seed", range(30))
def test_two_keys_alone_never_take_a_canary_back_whatever_they_do(seed: int) -> None:
    """Answers in any order: two keys' are all bad, the others' as good with either version."""
    chooser = random.Random(seed)
    counted, num_others = Counted(), chooser.choice([8, 30, 300, 10_000])
    rate, eagerness = chooser.choice([0.0, 0.01, 0.1]), chooser.choice([0.05, 0.5, 0.95])
    for _ in range(1000):  # the current version is known well before the trial goes on
        counted.answer("s", f"good {chooser.randrange(num_others)}", is_bad=chooser.random() < rate)
    for step in range(2000):
        if chooser.random() < eagerness:
            counted.answer("c", chooser.choice(["bad 1", "bad 2"]), is_bad=True)
        else:
            arm = chooser.choice("sc")
            counted.answer(arm, f"good {chooser.randrange(num_others)}", is_bad=chooser.random() < rate)
        if step % 20 == 0:
            assert counted.verdicts() == [None] * 3


def test_two_keys_of_any_share_that_they_can_have_are_too_few() -> None:
    for num in (*range(MIN_ANSWERS, 300), *range(300, 20_000, 97)):
        bad = 2 * (FREE_ANSWERS + num // ANSWERS_A_SHARE)
        assert why_worse(ArmCounts(answers=1_000_000), ArmCounts(answers=num, errors=bad)) is None


def test_a_canary_that_fails_all_its_users_goes_once_ten_have_come() -> None:
    counted = Counted()
    for user in range(200):
        counted.answer("s", f"u{user}", is_bad=False)
    for user in range(9):
        for _ in range(50):
            counted.answer("c", f"u{user}", is_bad=True)
    assert counted.verdicts() == [None] * 3
    for _ in range(2):
        counted.answer("c", "u10", is_bad=True)
    assert counted.verdicts()[0] is not None


def test_all_answers_of_many_users_come_to_count() -> None:
    """A user's share grows with the sample, so that a long trial does not stop at two answers of each."""
    counted = Counted()
    for step in range(40_000):
        counted.answer("c", f"u{step % 200}", is_bad=False)
    assert counted.all["c"] > 30_000
