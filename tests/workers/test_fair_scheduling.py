"""Tenants share a gang fairly, whatever others do: the scheduler against the bound of virtual token counters."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.tests.rigs.full_pool import fill_to_the_last_page
from motet.tests.rigs.scheduler_rig import asking, limits, quick_result
from motet.tests.rigs.stand_in_engine import INFO
from motet.workers.engine import Engine
from motet.workers.fairness.prompt_budget import Rank, may_grow_over, should_preempt
from motet.workers.fairness.tenant_counters import CACHED_TOKEN, OUTPUT_TOKEN, Scheduling
from motet.workers.memory import prefix_cache
from motet.workers.plan import StepPlan, StepResult
from motet.workers.scheduling.scheduler import Scheduler
from motet.workers.window_pages import GangLimits
from motet.workers.wire.messages import Cancel, SamplingParams, SequenceRequest


class QuickExecutor:
    """Computes nothing; adapters come when they come."""

    feeds_tokens = False

    def __init__(self, rng: random.Random) -> None:
        self._rng, self._coming = rng, list[str]()
        self.plan = StepPlan(0, (), (), ())  # the last that was begun

    def begin(self, plan: StepPlan) -> None:
        self.plan = plan
        self._coming += [load.residence.digest for load in plan.loads]

    def finish(self) -> StepResult:
        came = [digest for digest in self._coming if self._rng.random() < 0.4]
        self._coming = [digest for digest in self._coming if digest not in came]
        return msgspec.structs.replace(quick_result(self.plan), loaded=tuple(came))

    def wake_on_copy_end(self, wake: Callable[[], None]) -> None: ...

    def close(self) -> None: ...


class Gang:
    """A scheduler that steps, and what it has served each tenant by its own count."""

    def __init__(self, of: GangLimits, rng: random.Random, scheduling: Scheduling = "fair") -> None:
        self.scheduler = Scheduler(of, frozenset(), lambda ref: max(ref.module_ranks.values()), scheduling=scheduling)
        self.executor = QuickExecutor(rng)
        self.num_steps = 0
        self.engine = Engine(self.scheduler, self.executor, INFO, clock=lambda: float(self.num_steps))
        self.requests: dict[int, SequenceRequest] = {}
        self.first_token_at: dict[int, int] = {}  # step, by sequence
        self.num_tokens: Counter[int] = Counter()
        self.ended: set[int] = set()
        self._open: defaultdict[str, list[int]] = defaultdict(list)  # that had not ended when that was looked at last

    def add(self, tenant: str, num_prompt: int, max_tokens: int, adapter: str | None = None, **more: object) -> int:
        number = len(self.requests)
        prompt = [(number * 7 + i * (1 + number % 5)) % 98 for i in range(num_prompt)]
        return self.add_prompt(tenant, prompt, max_tokens, adapter, **more)

    def add_prompt(
        self, tenant: str, prompt: list[int], max_tokens: int, adapter: str | None = None, **more: object
    ) -> int:
        number = len(self.requests)
        requested = msgspec.structs.replace(asking(number, prompt, max_tokens, adapter, tenant), **more)
        assert self.scheduler.add(requested, 1) is None
        self.requests[number] = requested
        self._open[tenant].append(number)
        return number

    def step(self) -> None:
        self.num_steps += 1
        for update in self.engine.step():
            self.first_token_at.setdefault(update.sequence_id, self.num_steps)
            self.num_tokens[update.sequence_id] += len(update.token_ids)
            if update.finish_reason or update.error:
                self.ended.add(update.sequence_id)

    def live(self, tenant: str) -> list[int]:
        self._open[tenant] = [number for number in self._open[tenant] if number not in self.ended]
        return [*self._open[tenant]]

    def served(self, tenant: str) -> float:
        """Prompts whose first token came, and tokens, by weight."""
        worth, weight = 0.0, 1.0
        for number in self.first_token_at:
            if (requested := self.requests[number]).tenant == tenant:
                worth += len(requested.prompt_token_ids) + OUTPUT_TOKEN * self.num_tokens[number]
                weight = requested.weight
        return worth / weight


def bound(of: GangLimits, s: Scheduler, least_weight: float) -> float:
    """What two backlogged tenants may differ by: see docs/fairness.md."""
    step = OUTPUT_TOKEN * (of.max_tokens_per_step + of.max_num_sequences)
    sequences = OUTPUT_TOKEN * of.num_pages * of.block_size  # those that run are not cut off by a newcomer without need
    return 2 * (s.counters.burst + 2 * s.counters.slack + step + sequences) / least_weight


def shared(seed: int, scheduling: Scheduling) -> tuple[float, float]:
    """The largest difference between two tenants that always had requests waiting, and the bound of it."""
    rng = random.Random(seed)
    of = limits(rng.randint(24, 60), rng.randint(6, 16), rng.randint(2, 8))
    gang, greedy = Gang(of, rng, scheduling), rng.randint(2, 20)
    weights = {"a": rng.choice([1.0, 1.0, 2.0]), "b": rng.choice([1.0, 1.0, 3.0])}
    worst = 0.0
    start: float | None = None
    for step in range(1500):
        for tenant, depth in (("a", 3), ("b", greedy)):  # one asks for far more than the other
            while len(gang.live(tenant)) < depth * of.max_num_sequences // 2 + 1:
                length = (
                    (rng.randint(1, 6), rng.randint(1, 6))
                    if tenant == "a"
                    else (rng.randint(1, 25), rng.randint(1, 12))
                )
                more: dict[str, Any] = {"weight": weights[tenant], "priority": rng.choice([0, 0, 1, -3])}
                kind = rng.random() if tenant == "b" else 1.0
                if kind < 0.05:
                    more["sampling"] = SamplingParams(max_tokens=0, pooling=rng.choice(["mean", "last"]))
                elif kind < 0.2:
                    more["sampling"] = SamplingParams(max_tokens=length[1], num_prompt_logprobs=rng.choice([0, 3]))
                gang.add(tenant, *length, **more)
        if step % 400 > 200 and rng.random() < 0.5:  # a third comes and goes
            adapter = rng.choice([None, f"{rng.choice('cdefghijkl')}{rng.randint(1, 4)}"])
            background = rng.random() < 0.3
            gang.add("z", rng.randint(1, 20), rng.randint(1, 10), adapter, is_background=background)
        if rng.random() < 0.1 and (live := gang.live("z")):
            gone = rng.choice(live)
            gang.engine.receive(Cancel(gone))
            gang.ended.add(gone)
        gang.step()
        if step == 100:
            start = gang.served("a") - gang.served("b")
        if start is not None:
            worst = max(worst, abs(gang.served("a") - gang.served("b") - start))
        if step % 50 == 0:
            gang.scheduler.check_integrity()
    return worst, bound(of, gang.scheduler, min(weights.values()))


@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 2**32))
def test_two_who_always_wait_are_served_alike_whatever_a_third_does(seed: int) -> None:
    worst, most = shared(seed, "fair")
    assert worst <= most


def test_first_come_first_served_breaks_the_bound() -> None:
    worst, most = shared(1, "fifo")
    assert worst > 2 * most


@pytest.mark.parametrize(("scheduling", "most_steps"), [("fair", 3), ("fifo", None)])
def test_a_quiet_tenant_starts_at_once_in_a_gang_full_of_anothers(
    scheduling: Scheduling, most_steps: int | None
) -> None:
    gang = Gang(limits(200, 16, 8), random.Random(1), scheduling)
    for _ in range(64):
        gang.add("flood", 20, 40)
    for _ in range(60):
        gang.step()
    waits = []
    for _ in range(4):
        came_at, number = gang.num_steps, gang.add("quiet", 6, 4)
        while number not in gang.first_token_at and gang.num_steps < came_at + 200:
            gang.step()
        waits.append(gang.num_steps - came_at)
        for _ in range(10):
            gang.step()
        gang.scheduler.check_integrity()
    assert max(waits) <= most_steps if most_steps else waits[0] > 30
    assert bool(gang.scheduler.load().counters.num_fair_preemptions) == (scheduling == "fair")


@settings(deadline=None, max_examples=6)
@given(seed=st.integers(0, 2**32))
def test_who_is_behind_waits_no_longer_because_pages_are_released_little_by_little(seed: int) -> None:
    """Short answers share a long document, so that their ends hold more pages than a step releases: always some."""
    waits, num_leaving = waits_beside_short_answers(seed, 2)
    waits_without, _ = waits_beside_short_answers(seed, 10_000)
    assert num_leaving > 20
    assert sum(waits) <= sum(waits_without) + 2 * len(waits)
    assert max(waits) <= max(waits_without) + 6


def waits_beside_short_answers(seed: int, most_given_back: int) -> tuple[list[int], int]:
    """Steps from each of several new tenants' requests to its first token, and the most pages that were to be released.

    The gang is full, of short answers on a document and of another tenant's long ones.
    """
    rng = random.Random(seed)
    document = [place * 7 % 98 for place in range(rng.randint(60, 160))]
    num_short, num_long, budget = rng.randint(2, 5), rng.randint(4, 8), rng.choice([32, 64])
    of = GangLimits(256, 100, 4, len(document) // 4 + 25 * num_long, budget, num_short + num_long)
    gang, most_leaving, waits = Gang(of, random.Random(1)), 0, list[int]()

    def step() -> None:
        nonlocal most_leaving
        while len(gang.live("short")) < num_short:
            gang.add_prompt("short", [*document, len(gang.requests) % 98], 2)
        while len(gang.live("long")) < num_long:
            gang.add_prompt("long", [len(gang.requests) % 98] * 20, 120)
        gang.step()
        most_leaving = max(most_leaving, gang.scheduler.memory.prefixes.num_leaving)

    with patch.object(prefix_cache, "MOST_GIVEN_BACK", most_given_back):
        for _ in range(60):
            step()
        for number in range(4):
            came_at, prompt = gang.num_steps, [rng.randrange(98) for _ in range(rng.randint(100, 200))]
            quiet = gang.add_prompt(f"quiet-{number}", prompt, 2)
            while quiet not in gang.first_token_at and gang.num_steps < came_at + 300:
                step()
            waits.append(gang.num_steps - came_at)
            for _ in range(10):
                step()
            gang.scheduler.check_integrity()
    return waits, most_leaving


@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(20, 40), (60, 2)])
def test_a_quiet_tenants_prompt_is_in_the_next_plan_that_is_made(num_prompt: int, max_tokens: int) -> None:
    gang = Gang(limits(400, 16, 8), random.Random(1))
    for _ in range(64):
        gang.add("flood", num_prompt, max_tokens)
    for _ in range(60):
        gang.step()
    for _ in range(10):
        number = gang.add("quiet", 6, 4)
        gang.step()  # its plan is executed already; the one after it is made
        (part,) = [part for part in gang.executor.plan.sequences if part.sequence_id == number]
        assert len(part.token_ids) == 6
        assert gang.scheduler.latency_mode.is_on
        for _ in range(7):
            gang.step()


def test_prompts_of_a_flood_make_no_step_long_while_a_tenant_arrives_that_is_clearly_behind() -> None:
    gang = Gang(GangLimits(64, 100, 4, 600, 64, 16), random.Random(1))

    def num_prompt_tokens(count: int) -> list[int]:
        """Of the flood, in each of so many steps."""
        found = []
        for _ in range(count):
            while sum(gang.requests[number].tenant == "flood" for number in gang.requests.keys() - gang.ended) < 16:
                gang.add("flood", 60, 2)
            gang.step()
            parts = gang.executor.plan.sequences
            mine = [part for part in parts if gang.requests[part.sequence_id].tenant == "flood"]
            found.append(sum(len(part.token_ids) for part in mine if len(part.token_ids) > 1))
        return found

    assert max(num_prompt_tokens(60)) > 50
    for _ in range(10):
        number = gang.add("quiet", 30, 4)
        gang.step()
        (part,) = [part for part in gang.executor.plan.sequences if part.sequence_id == number]
        assert len(part.token_ids) > 16, "its own prompt is not held"
        assert max(num_prompt_tokens(7)) <= 16
        assert sum(num_prompt_tokens(4)) > 0, "the flood goes on"
    assert max(num_prompt_tokens(300)) > 50, "no sequence arrives any more"


def test_who_is_held_goes_on_in_the_smallest_steps() -> None:
    """A quarter of three tokens is none."""
    gang = Gang(limits(num_pages=60, budget=3), random.Random(1))
    held = gang.add("a", 40, 4, is_background=True)
    gang.step()
    came = gang.add("b", 3, 2)
    for _ in range(40):
        gang.step()
    assert gang.ended == {came, held}


def test_background_work_has_only_what_others_could_not_use() -> None:
    gang = Gang(limits(200, 16, 4), random.Random(1))
    background = [gang.add("a", 4, 30, is_background=True) for _ in range(4)]
    gang.step()
    gang.step()
    assert all(gang.num_tokens[number] for number in background)  # no other tenant is there
    assert gang.scheduler.load().gauges.num_running_background == 4
    others = [gang.add("a", 4, 20), *(gang.add("b", 4, 20) for _ in range(7))]
    before = gang.num_tokens.copy()
    while not gang.ended.issuperset(others):
        gang.step()
        num_waiting = sum(number not in gang.first_token_at for number in others)
        assert num_waiting == 0 or all(gang.num_tokens[number] <= before[number] + 2 for number in background)
        gauges = gang.scheduler.load().gauges
        assert gauges.num_running_background <= 4
        assert (gauges.num_running_background < 4) == (gauges.num_queued_background_tokens > 0)
    while gang.engine.has_work():
        gang.step()
    assert gang.ended.issuperset(background)


def test_of_one_tenant_the_higher_priority_goes_first_and_age_decides_the_rest() -> None:
    gang = Gang(limits(200, 16, 1), random.Random(1))
    numbers = [gang.add("a", 3, 2, priority=priority) for priority in (0, 5, 0, -2, 5)]
    while gang.engine.has_work():
        gang.step()
    assert sorted(numbers, key=gang.first_token_at.__getitem__) == [1, 4, 0, 2, 3]
    other = Gang(limits(200, 16, 1), random.Random(1), "fifo")
    numbers = [other.add("a", 3, 2, priority=priority) for priority in (0, 5, 0)]
    while other.engine.has_work():
        other.step()
    assert sorted(numbers, key=other.first_token_at.__getitem__) == numbers


def test_a_weight_is_a_share() -> None:
    gang = Gang(limits(200, 16, 6), random.Random(1))
    for _ in range(300):
        gang.add("a", 6, 10, weight=1.0)
        gang.add("b", 6, 10, weight=3.0)
    for _ in range(300):
        gang.step()
    assert 2.5 < 3 * gang.served("b") / gang.served("a") < 3.5


def test_who_loads_an_adapter_for_every_request_has_that_charged() -> None:
    """Tokens alike, one with a cold adapter each time: the other gets clearly more tokens."""
    gang = Gang(limits(60, 16, 6), random.Random(1))
    for number in range(400):
        gang.add("cycles", 6, 6, f"{'abcdefghijklmnopqrstuvwxyz'[number % 26]}{number % 7 + 2}")
        gang.add("stays", 6, 6)
    for _ in range(300):
        gang.step()
    assert gang.served("stays") > 1.5 * gang.served("cycles") > 0


def test_tokens_that_are_found_are_charged_less() -> None:
    gang = Gang(limits(14, 16, 2), random.Random(1))
    prompt = [5] * 16
    for number, expected in ((100, 16 + OUTPUT_TOKEN), (101, 1 + 15 * CACHED_TOKEN + OUTPUT_TOKEN)):
        assert gang.scheduler.add(asking(number, prompt, 1, tenant="b"), 1) is None
        before = gang.scheduler.counters.join("b").served
        for _ in range(6):
            gang.engine.step()
        assert gang.scheduler.counters.join("b").served - before == pytest.approx(expected)


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32))
def test_the_first_goes_on_and_places_do_not_change_without_end(seed: int) -> None:
    """Many tenants on few pages: no victim resumes before what took its pages, all end, little is done twice."""
    rng = random.Random(seed)
    of = limits(rng.randint(18, 40), rng.randint(6, 16), rng.randint(2, 6))
    gang = Gang(of, rng)
    s, running = gang.scheduler, gang.scheduler._running
    if seed % 2:
        fill_to_the_last_page(s)
    preempt = s._decodes._preempt

    def watched(victim: object) -> None:
        assert victim is running.last
        first = min(running.by_id.values(), key=running.rank)
        assert victim is not first, "the first of all was preempted"
        preempt(victim)  # type: ignore[arg-type]

    s._decodes._preempt = watched
    for _ in range(rng.randint(1, 60)):
        gang.add(rng.choice("abcdef"), rng.randint(1, 24), rng.randint(1, 20), priority=rng.choice([0, 0, 2]))
        for _ in range(rng.randint(0, 3)):
            gang.step()
    while gang.engine.has_work():
        gang.step()
        assert gang.num_steps < 4000, "no end"
    assert gang.ended == gang.requests.keys()
    worth = sum(len(r.prompt_token_ids) + OUTPUT_TOKEN * gang.num_tokens[n] for n, r in gang.requests.items())
    num_bands = worth / s.counters.slack + 6
    assert s.load().counters.num_fair_preemptions <= 8 * of.max_num_sequences * num_bands
    s.check_integrity()


_RANKS = st.tuples(st.booleans(), st.floats(0, 9), st.integers(0, 9))


@given(_RANKS, _RANKS, st.floats(0, 4), st.floats(0, 4))
def test_a_place_is_only_given_to_who_is_clearly_behind(runs: Rank, waits: Rank, slack: float, others: float) -> None:
    if should_preempt(runs, waits, slack):
        assert (runs[0] and not waits[0]) or (runs[0] == waits[0] and runs[1] > waits[1] + slack - 1e-9)
        assert may_grow_over(runs, waits)
        assert not should_preempt(waits, runs, others)
