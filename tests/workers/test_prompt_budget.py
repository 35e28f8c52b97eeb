"""How many tokens of prompts a step computes, and whose: the policies alone, and in the scheduler."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.benchmarks.scarce.calls import worst_step_over_interval
from motet.tests.rigs.scheduler_rig import asking, quick_result
from motet.workers.fairness import prompt_budget
from motet.workers.fairness.prompt_budget import PromptBudget, PromptBursts, divide_prompt_tokens, prompt_seconds
from motet.workers.fairness.tenant_counters import TenantCounter
from motet.workers.scheduling.measured_costs import MeasuredStepCosts
from motet.workers.scheduling.scheduler import Scheduler
from motet.workers.window_pages import GangLimits

_LEFT = st.lists(st.integers(1, 3000), max_size=12)
_BUDGETS = st.integers(0, 600)


@given(_LEFT, _BUDGETS)
def test_all_of_the_budget_is_used_and_no_more_than_there_is(num_left: list[int], budget: int) -> None:
    shares = divide_prompt_tokens(num_left, budget)
    assert sum(shares) == min(budget, sum(num_left))
    assert all(0 <= share <= left for share, left in zip(shares, num_left, strict=True))


@given(_LEFT.filter(bool), _BUDGETS)
def test_the_oldest_has_at_least_half(num_left: list[int], budget: int) -> None:
    assert divide_prompt_tokens(num_left, budget)[0] >= min(num_left[0], budget / 2)


@given(st.lists(st.integers(1025, 100_000), min_size=1, max_size=12), st.integers(1, 256))
def test_a_short_prompt_behind_long_ones_is_computed_at_once(long: list[int], short: int) -> None:
    assert divide_prompt_tokens([*long, short], 512)[-1] == short


@given(st.integers(1, 3000), st.integers(1, 12), st.integers(1, 600))
def test_prompts_of_one_length_come_as_they_came(length: int, number: int, budget: int) -> None:
    shares = divide_prompt_tokens([length] * number, budget)
    assert shares == [max(min(length, budget - i * length), 0) for i in range(number)]


@given(_LEFT.filter(bool), st.integers(1, 600))
def test_no_prompt_takes_more_than_twice_the_steps_of_its_turn(num_left: list[int], budget: int) -> None:
    """Short prompts come in every step besides: they hold up no other for ever."""
    prompts = dict(enumerate(num_left))
    steps = 0
    while prompts:
        steps += 1
        shares = divide_prompt_tokens([*prompts.values(), *[1] * budget], budget)
        for number, share in zip(list(prompts), shares, strict=False):
            prompts[number] -= share
            if not prompts[number]:
                del prompts[number]
                half = -(-budget // 2)
                assert steps <= sum(-(-left // half) for left in num_left[: number + 1])


_COSTS = st.tuples(st.floats(1e-6, 1e-2), st.floats(0, 1e-3))  # seconds of the first token, and a token's growth


def token_s(costs: tuple[float, float]) -> Callable[[int], float]:
    return lambda position: costs[0] * (1 + costs[1] * position)


_SECONDS = st.one_of(st.just(0.0), st.floats(1e-6, 10))


@given(_SECONDS, _SECONDS, _SECONDS)
def test_prompts_have_the_time_that_decodes_leave_and_never_none(
    interval_s: float, decode_s: float, later_s: float
) -> None:
    seconds = prompt_seconds(interval_s, decode_s, 1, later_s)
    assert seconds == max(interval_s - decode_s, decode_s / 4)
    assert prompt_seconds(interval_s + 1, decode_s) >= seconds


@given(_SECONDS, _SECONDS, _SECONDS, st.integers(2, 5), st.floats(1, 100))
def test_a_stretched_step_takes_so_many_times_what_steps_take_once_all_decode(
    interval_s: float, decode_s: float, later_s: float, stretch: int, slower: float
) -> None:
    def step_s(decode_s: float, later_s: float) -> float:
        return decode_s + prompt_seconds(interval_s, decode_s, stretch, later_s)

    longest_s = 1.5 * max(decode_s, later_s)  # with half as much for prompts as for decodes
    assert step_s(decode_s, later_s) == pytest.approx(stretch * max(interval_s, longest_s))
    assert step_s(decode_s, later_s) >= decode_s + prompt_seconds(interval_s, decode_s)
    if longest_s >= interval_s:  # on a slower device all takes as many times as long
        assert step_s(slower * decode_s, slower * later_s) == pytest.approx(slower * step_s(decode_s, later_s))


@given(
    st.lists(st.tuples(st.integers(0, 120_000), st.integers(1, 5000)), min_size=1, max_size=12),
    st.integers(1, 4096),
    st.floats(0, 1),
    _COSTS,
    st.integers(1, 64),
)
def test_chunks_are_made_smaller_until_they_fit_and_no_smaller_than_that(
    prompts: list[tuple[int, int]], most: int, seconds: float, costs: tuple[float, float], least: int
) -> None:
    """`prompts`: first position and length of what is left of each."""
    budget = PromptBudget(most, seconds, token_s(costs), least)

    def divided(num_tokens: int) -> list[tuple[int, int]]:
        granted = divide_prompt_tokens([left for _, left in prompts], num_tokens)
        return [(start, number) for (start, _), number in zip(prompts, granted, strict=True) if number]

    def time_of(chunks: list[tuple[int, int]]) -> float:
        return sum(budget.chunk_s(*chunk) for chunk in chunks)

    chunks, num_tries = divided(most), 1
    whole_s = time_of(chunks)
    while (fewer := budget.total_that_fits(chunks)) is not None:
        assert least <= fewer < sum(number for _, number in chunks)
        chunks, num_tries = divided(fewer), num_tries + 1
    num_tokens = sum(number for _, number in chunks)
    assert time_of(chunks) <= 1.05 * seconds or num_tokens <= least
    assert num_tokens >= min(least, most, sum(left for _, left in prompts))
    assert num_tries == 1 or whole_s > seconds
    assert num_tries < 200
    for start, number in chunks:
        budget.take(start, number)
    more = budget.tokens_that_fit(prompts[0][0], 10_000)
    assert 0 <= more <= max(most - num_tokens, 0)
    assert not more or budget.chunk_s(prompts[0][0], more) <= budget.seconds * 2 or num_tokens + more <= least


def first_tokens(s: Scheduler, num_steps: int) -> dict[int, int]:
    """The step, counted from one, in which each sequence has its first token."""
    steps: dict[int, int] = {}
    for step in range(1, num_steps + 1):
        plan = s.schedule()
        for update in s.commit(plan, quick_result(plan)):
            steps.setdefault(update.sequence_id, step)
    return steps


def gang(num_sequences: int = 97, token_interval_s: float = 0.0) -> Scheduler:
    of = GangLimits(131_072, 1000, 16, 60_000, 512, num_sequences)
    return Scheduler(of, frozenset(), lambda ref: 1, token_interval_s=token_interval_s)


@pytest.mark.parametrize("num_long", [1, 5])
def test_a_short_prompt_does_not_wait_for_a_long_one(num_long: int) -> None:
    s = gang()
    for i in range(num_long):
        s.add(asking(i, [1 + i] * 120_000, max_tokens=4), 0)
    first_tokens(s, 3)
    s.add(asking(100, [7] * 20), 0)
    assert first_tokens(s, 4)[100] <= 4
    s.check_integrity()


def test_a_long_prompt_is_not_starved_by_short_ones() -> None:
    s = gang()
    s.add(asking(0, [1] * 20_000, max_tokens=4), 0)
    for step in range(2 * 20_000 // 512 + 2):
        for i in range(4):
            s.add(asking(1 + 4 * step + i, [2 + (4 * step + i) % 900] * 250, max_tokens=1), 0)
        if 0 in first_tokens(s, 1):
            return
    raise AssertionError("the long prompt had less than half of the steps' tokens")


def test_what_one_leaves_over_another_takes() -> None:
    """Of three that begin alike only the first computes: the budget goes to those that can use it."""
    s = gang()
    for i in range(3):
        s.add(asking(i, [1] * 300, max_tokens=4), 0)
    s.add(asking(3, [2] * 1000, max_tokens=4), 0)
    assert {part.sequence_id: len(part.token_ids) for part in s.schedule().sequences} == {0: 300, 3: 212}


NUM_STREAMS = 16


class Device:
    """Takes as long for a step as its model says, and reports that to the scheduler."""

    def __init__(self, s: Scheduler, rng: random.Random, token_s: float, decode_s: float = 0.0004) -> None:
        self.s, self.rng, self.token_s, self.decode_s = s, rng, token_s, decode_s
        self.now = 0.0
        self.last_token_at: dict[int, float] = {}
        self.first_token_at: dict[int, float] = {}
        self.intervals: tuple[list[float], list[float]] = ([], [])  # of the others, and of those that stream

    def step(self) -> None:
        plan = self.s.schedule()
        seconds = 0.004 + self.decode_s * len(plan.sequences)
        for part in plan.sequences:
            if len(part.token_ids) > 1:
                context = part.start + len(part.token_ids) / 2
                seconds += len(part.token_ids) * self.token_s * (1 + context / 4000)
        seconds *= self.rng.uniform(0.95, 1.05) if self.rng.random() < 0.998 else 5.0
        self.s.observe(plan, seconds)
        self.now += seconds
        for update in self.s.commit(plan, quick_result(plan)):
            if not update.token_ids:
                continue  # a report of what its prompt has used so far
            if (before := self.last_token_at.get(update.sequence_id)) is not None:
                self.intervals[update.sequence_id < NUM_STREAMS].append(self.now - before)
            else:
                self.first_token_at[update.sequence_id] = self.now
            self.last_token_at[update.sequence_id] = self.now
            if update.finish_reason:
                del self.last_token_at[update.sequence_id]


def burst(token_interval_s: float, token_s: float, seed: int, tenant: str) -> tuple[float, float]:
    """The p99 between streams' tokens in seconds, and the seconds until all is computed: 32 prompts come meanwhile.

    `tenant`: whose prompts; "t" is the tenant of the streams.
    """
    s = gang(token_interval_s=token_interval_s)
    device = Device(s, random.Random(seed), token_s)
    for i in range(NUM_STREAMS):
        s.add(asking(i, [1 + i] * 64, max_tokens=400), 0)
    for _ in range(20):
        device.step()
    device.intervals[True].clear()
    for i in range(32):
        s.add(asking(100 + i, [100 + i] * 1500, max_tokens=100, tenant=tenant), 0)
    while s.has_work():
        device.step()
    s.check_integrity()
    return statistics.quantiles(device.intervals[True], n=100)[98], device.now


@pytest.mark.parametrize("token_s", [0.0005, 0.002])  # 0.25 and 1 s for a full budget
def test_who_decodes_has_tokens_in_time_while_prompts_burst_in(token_s: float) -> None:
    p99_s, seconds = burst(0.1, token_s, 1, "another")
    p99_of_own_s, _ = burst(0.1, token_s, 1, "t")
    p99_without_s, seconds_without = burst(0.0, token_s, 1, "another")
    assert p99_s <= 1.2 * 0.1
    assert p99_s < p99_of_own_s <= 1.2 * 5 * 0.1
    assert p99_without_s > 2 * 0.1, "the burst is too small to show anything"
    assert seconds_without / seconds >= 0.8  # each step has a cost of its own here, whatever it computes


def first_tokens_s(num_tenants: int, stretches: bool, slower: float, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """When each of 32 prompts that come at once has its first token, in order. A decode takes as long as 8 tokens."""
    if not stretches:
        monkeypatch.setattr(prompt_budget, "_MAX_STRETCH", 1)
    s = gang(token_interval_s=0.1)
    device = Device(s, random.Random(2), slower * 0.00066, decode_s=slower * 0.0055)
    for begin, number, max_tokens in ((1000, 8, 20), (0, 32, 80)):  # the first ones show what steps cost
        started_s = device.now
        for i in range(begin, begin + number):
            s.add(asking(i, [1 + i % 900] * 66, max_tokens=max_tokens, tenant=f"t{i % num_tenants}"), 0)
        while s.has_work():
            device.step()
    return sorted(device.first_token_at[i] - started_s for i in range(32))


@pytest.mark.parametrize("slower", [1, 3, 10, 100])
def test_first_tokens_of_a_burst_do_not_wait_for_its_next_ones(slower: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of 135 million parameters on two cores, on which all these prompts take 1.4 s, and on slower ones."""
    stretched, before = (first_tokens_s(1, stretches, slower, monkeypatch) for stretches in (True, False))
    assert stretched[-1] <= 2.0 * stretched[16]
    assert stretched[-1] <= before[-1] / 2


def longest_steps_s(num_of_another: int) -> list[float]:
    """Times of steps, sorted: 4 streams of a tenant that has two prompts at any time, and prompts of another tenant.

    A device on which a prompt's token takes as long as a decode, as with 8 billion parameters on a CPU.
    """
    s = gang(256, 0.1)
    device, seconds, newest = Device(s, random.Random(3), 0.02, decode_s=0.02), list[float](), 3000
    for i, max_tokens in [(i, 900) for i in range(4)] + [(i, 20) for i in range(500, 508)]:
        s.add(asking(i, [1 + i] * 64, max_tokens=max_tokens), 0)
    for _ in range(60):  # that show what steps cost
        device.step()
    for i in range(num_of_another):
        s.add(asking(1000 + i, [1 + i] * 200, max_tokens=40, tenant="another"), 0)
    for _ in range(40):
        while sum(i not in device.first_token_at for i in range(3000, newest)) < 2:
            s.add(asking(newest, [1 + newest % 900] * 300, max_tokens=20), 0)
            newest += 1
        started_s = device.now
        device.step()
        seconds.append(device.now - started_s)
    return sorted(seconds)


def test_another_tenants_burst_makes_no_stretched_step_longer() -> None:
    """Its decodes may: there are few yet in these steps."""
    alone, beside_burst = longest_steps_s(0), longest_steps_s(200)
    assert beside_burst[20] <= 1.5 * alone[20]


def test_steps_of_background_work_do_not_keep_a_request_that_comes_waiting() -> None:
    """Seconds of a slow device: without a request that waits, a step takes a quarter longer than its decodes."""
    s = gang(256, 0.1)
    device, over = Device(s, random.Random(4), 0.02, decode_s=0.02), list[float]()
    for begin, number, length, max_tokens in ((100, 40, 8, 900), (600, 100, 200, 60)):
        for i in range(begin, begin + number):
            s.add(msgspec.structs.replace(asking(i, [1 + i] * length, max_tokens=max_tokens), is_background=True), 0)
        over.clear()
        for _ in range(80 if begin == 100 else 30):
            began_s = device.now
            device.step()
            over.append((device.now - began_s) / (0.004 + 0.02 * len(s._running.decoding)))
    assert len(s._running.decoding) >= 40
    assert statistics.median(over) <= 1.5


_CHANGES = st.lists(st.tuples(st.integers(0, 5), st.integers(-2, 9), st.integers(-1, 2)), max_size=60)


@given(_CHANGES)
def test_an_interval_is_stretched_by_no_tenant_but_those_that_wait(changes: list[tuple[int, int, int]]) -> None:
    """`changes`: a tenant, and how many more prompts and decodes it has; the last tenant's are background work."""
    bursts, counters = PromptBursts(), [TenantCounter(f"t{i}", is_background=i == 5) for i in range(6)]
    counts = dict.fromkeys(counters, (0, 0))
    for tenant, more_prompts, more_decodes in changes:
        num_decodes, num_prompts = counts[counter := counters[tenant]]
        now = counts[counter] = max(0, num_decodes + more_decodes), max(0, num_prompts + more_prompts)
        bursts.change(counter, now[1] - num_prompts, now[0] - num_decodes)
        bursts.check_integrity({of: each for of, each in counts.items() if any(each)})
        waiting = [prompts for of, (decodes, prompts) in counts.items() if decodes and not of.is_background]
        assert bursts.stretch == max(1, min([5, *waiting]))
        assert bursts.num_coming() == len(waiting) * min(waiting, default=0)


@pytest.mark.parametrize("max_tokens", [512, 2048])
def test_no_step_takes_much_longer_than_the_interval_wherever_its_tokens_look_back(max_tokens: int) -> None:
    """Questions about kept documents beside new prompts: a token costs up to nine times the first one."""
    assert worst_step_over_interval(max_tokens, seed=1, num_steps=250) <= 1.3


def test_steps_have_all_tokens_that_the_interval_allows_after_a_cold_start() -> None:
    """A flood of prompts on a small model, whose first step was slow: 512 tokens take an eighth of the interval."""
    s = gang(num_sequences=16, token_interval_s=0.1)

    def step(seconds: float, token_s: float) -> int:
        plan = s.schedule()
        num_tokens = sum(len(part.token_ids) for part in plan.sequences)
        s.observe(plan, seconds + token_s * num_tokens)
        s.commit(plan, quick_result(plan))
        return num_tokens

    s.add(asking(0, [1], max_tokens=2), 0)
    step(0.02, 0.0)
    step(0.02, 0.0)
    for i in range(120):
        s.add(asking(1 + i, [2 + i] * 477, max_tokens=4, tenant=f"tenant-{i % 2}"), 0)
    num_tokens = [step(0.001, 22e-6) for _ in range(100)]
    assert num_tokens[8:] == [512] * 92


def test_without_decodes_the_whole_budget_is_used() -> None:
    s = gang(token_interval_s=0.001)
    s.add(asking(0, [1] * 2000, max_tokens=4), 0)
    for _ in range(3):
        plan = s.schedule()
        s.observe(plan, 1.0)
        s.commit(plan, quick_result(plan))
        assert sum(len(part.token_ids) for part in plan.sequences) == 512


def test_another_interval_counts_from_the_next_plan() -> None:
    s = gang(token_interval_s=0.0)
    s.add(asking(0, [1] * 8, max_tokens=500), 0)
    first_tokens(s, 1)
    s.add(asking(1, [2] * 4000, max_tokens=4), 0)

    def num_prompt_tokens() -> int:
        plan = s.schedule()
        s.observe(plan, 1.0)
        s.commit(plan, quick_result(plan))
        return sum(len(part.token_ids) for part in plan.sequences) - 1

    assert [num_prompt_tokens() for _ in range(3)] == [511] * 3
    s.token_interval_s = 0.001
    assert num_prompt_tokens() < 400
    s.token_interval_s = 0.0
    assert num_prompt_tokens() == 511


def test_prompts_go_on_however_long_decodes_take() -> None:
    s = gang(token_interval_s=0.001)
    s.add(asking(0, [1] * 8, max_tokens=500), 0)
    first_tokens(s, 1)
    s.add(asking(1, [2] * 320, max_tokens=4), 0)
    for _ in range(320 // 16):
        plan = s.schedule()
        s.observe(plan, 1.0)
        s.commit(plan, quick_result(plan))
    assert s.load().gauges.num_queued_tokens == 2


@given(st.floats(1e-4, 1e-2), st.floats(0, 1e-4), st.integers(0, 2**32))
def test_costs_are_learnt_with_how_far_back_tokens_look(token_s: float, growth: float, seed: int) -> None:
    """`growth`: of the cost with each token before, as a part of the first token's cost."""
    per_context_s = growth * token_s
    costs, rng = MeasuredStepCosts(), random.Random(seed)
    starts = [rng.randrange(60_000) for _ in range(60)]
    for start in starts:
        costs.observe(0, [(start, 100)], 100 * (token_s + per_context_s * (start + 50)))
    low, high = min(starts), max(starts)
    for context in (low + 50, high + 50):
        assert costs.prompt_tokens.at(context) == pytest.approx(token_s + per_context_s * context, rel=0.3)
    before = costs.prompt_tokens.at(low)
    costs.observe(0, [(low, 100)], 1000.0)  # a stall
    assert costs.prompt_tokens.at(low) <= 2 * before


_TOKEN_S = 22e-6


@given(st.integers(0, 400), st.integers(1, 100), st.floats(1e-3, 0.1), st.integers(0, 2**32))
def test_a_slow_first_step_is_soon_as_good_as_forgotten(start: int, num_tokens: int, seconds: float, seed: int) -> None:
    """Though no other step may look as far back as it did."""
    costs, rng = MeasuredStepCosts(), random.Random(seed)
    costs.observe(0, [(start, num_tokens)], seconds)
    for _ in range(100):
        chunks = [(rng.randint(100, 200), rng.randint(100, 256)) for _ in range(2)]
        costs.observe(2, chunks, 0.001 + _TOKEN_S * sum(number for _, number in chunks))
    assert costs.prompt_tokens.at(200) == pytest.approx(_TOKEN_S, rel=0.15)


def test_steps_with_few_tokens_do_not_make_those_with_many_expensive() -> None:
    """What a step costs, whatever it computes, is not known: a short prompt's tokens seem to cost ten times more."""
    costs = MeasuredStepCosts()
    for _ in range(50):
        costs.observe(1, [(0, 8)], 0.001 + 0.002)
        costs.observe(1, [(200, 512)], 0.001 + 0.002 + 512 * _TOKEN_S)
    assert costs.prompt_tokens.at(300) == pytest.approx(_TOKEN_S + 0.002 / 512, rel=0.1)
