"""Pages that are kept back for running sequences: the policy alone, and in the scheduler."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.tests.rigs.full_pool import fill_to_the_last_page
from motet.tests.rigs.scheduler_rig import EOS, asking, request, scheduler
from motet.tests.workers.test_scheduling_cost import num_calls
from motet.workers.plan import SampledToken, StepPlan, StepResult
from motet.workers.scheduling.growing_sequence import GrowingSequence
from motet.workers.scheduling.page_reserve import (
    NUM_BUCKETS,
    STARTS,
    AnswerLengths,
    PageReserve,
    bucket_of,
    growth,
    margin,
    survival,
)
from motet.workers.scheduling.scheduler import Scheduler
from motet.workers.window_pages import GangLimits, pages_for


def ending(plan: StepPlan, lengths: dict[int, int]) -> StepResult:
    """The result of a plan whose answers end at these lengths, which the scheduler does not know."""
    tokens: dict[int, SampledToken | None] = {}
    for part in plan.sequences:
        if part.sample is not None:
            is_last = part.sample.index + 1 >= lengths[part.sequence_id]
            tokens[part.sequence_id] = SampledToken(EOS if is_last else 1, None)
    loaded = tuple(load.residence.digest for load in plan.loads)
    return StepResult(plan.step, tokens, loaded, ())


def serve(s: Scheduler, lengths: dict[int, int]) -> tuple[int, int]:
    """Serves answers of these lengths to prompts of 8 tokens; returns the tokens computed and the steps."""
    for sequence_id in lengths:
        assert s.add(asking(sequence_id, [2 + sequence_id % 90, *[1] * 7], None), 0) is None
    before = s.load().counters
    while s.has_work():
        s.commit(plan := s.schedule(), ending(plan, lengths))
    after = s.load().counters
    return after.num_computed_tokens - before.num_computed_tokens, after.num_steps - before.num_steps


@given(st.integers(0, 1 << 20))
def test_a_length_is_in_its_bucket(num_tokens: int) -> None:
    bucket = bucket_of(num_tokens)
    assert STARTS[bucket] <= num_tokens < STARTS[bucket + 1]


@settings(max_examples=25)
@given(st.lists(st.integers(0, 3000), min_size=100, max_size=200), st.integers(0, 2000))
def test_running_answers_do_not_make_answers_look_short(lengths: list[int], cut: int) -> None:
    """Of answers that are all cut at a length, what is learnt up to there is their true share."""
    learnt = AnswerLengths()
    for length in lengths:
        learnt.leave(0, bucket_of(min(length, cut)))
        if length < cut:
            learnt.end(bucket_of(length))
    reach = learnt.reach()
    assert (np.diff(reach) <= 0).all() and (reach >= 0).all()
    for bucket in range(bucket_of(cut)):
        true = sum(length >= STARTS[bucket] for length in lengths) / len(lengths)
        assert reach[bucket] == pytest.approx(true, abs=0.1)  # the prior counts for one answer in each bucket


def test_old_answers_are_forgotten() -> None:
    learnt = AnswerLengths()
    for length, number in ((1000, 3000), (10, 6000)):
        for _ in range(number):
            learnt.leave(0, bucket_of(length))
            learnt.end(bucket_of(length))
    assert learnt.reach()[1] < 0.1


@given(st.integers(0, NUM_BUCKETS - 20), st.integers(1, 50), st.integers(1, 1000))
def test_sequences_that_never_end_grow_by_a_page_every_block(bucket: int, num: int, num_pages: int) -> None:
    alive = survival(np.ones(NUM_BUCKETS + 1))
    sequences, pages = np.zeros(NUM_BUCKETS), np.zeros(NUM_BUCKETS)
    sequences[bucket], pages[bucket] = num, num_pages
    grown = growth(sequences, pages, alive, 16)
    assert grown[0] == pytest.approx(num * 8 / 16)
    assert (np.diff(grown) > 0).all()
    assert growth(sequences, pages, 0 * alive, 16) == pytest.approx(-num_pages)  # if all end, they give all back


def test_a_larger_pool_keeps_a_smaller_part_free() -> None:
    assert margin(0, 1000) == 0
    assert margin(16 * 50**2, 800) == 40  # sixteen sequences fill it: a twentieth at most
    assert margin(400 * 50**2, 20_000) == 300  # four hundred do


def test_what_is_known_to_fit_is_not_kept_waiting() -> None:
    """Four answers of at most eight tokens fit into the pool with their prompts: all start at once."""
    s = scheduler(GangLimits(64, 100, 4, 16, 64, 8))
    for i in range(4):
        s.add(request(i, num_prompt=8, max_tokens=8), 0)
    assert len(s.schedule().sequences) == 4


@given(st.lists(st.tuples(st.integers(1, 900), st.integers(1, 40), st.integers(0, 39)), min_size=2, max_size=12))
def test_no_more_is_kept_back_than_answers_can_reach(sequences: list[tuple[int, int, int]]) -> None:
    """`sequences`: tokens of each prompt, the most of its answer, and those that it has. The last one starts."""
    reserve, num_to_come = PageReserve(10_000, 16), 0
    for number, (num_prompt, most, num_generated) in enumerate(sequences):
        requested = asking(number, [1] * num_prompt)
        sequence = GrowingSequence(requested, number, 0, [1] * num_prompt, max_length=num_prompt + most)
        sequence.token_ids += [1] * min(num_generated, most - 1)
        num_pages = pages_for(len(sequence.token_ids), 16)
        num_to_come += pages_for(sequence.max_length, 16) - num_pages
        if number < len(sequences) - 1:
            sequence.hold(tuple(range(num_pages)))
            reserve.add(sequence)
    kept = reserve.num_pages(sequence, num_pages)
    least = margin(reserve._sum_squares, 10_000)
    assert kept == min(max(least, reserve.growth_with(sequence, num_pages)), num_to_come)
    assert reserve.min_pages <= min(least, num_to_come)


def test_short_answers_to_long_prompts_cost_no_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pages that are kept back in any case are enough for all of them."""
    monkeypatch.setattr("motet.workers.scheduling.page_reserve.growth", None)
    s = scheduler(GangLimits(512, 1000, 16, 1024, 512, 16))
    for i in range(32):
        s.add(asking(i, [2 + i] * 477, max_tokens=4), 0)
    while s.has_work():
        s.commit(plan := s.schedule(), ending(plan, dict.fromkeys(range(32), 4)))
    assert s.load().counters.num_generated_tokens == 32 * 4


def test_limits_of_all_sizes_cost_a_look_no_more_than_one() -> None:
    def look(limits: list[int]) -> int:
        reserve = PageReserve(10_000, 16)
        for number, most in enumerate([*limits, 1]):
            sequence = GrowingSequence(asking(number, [1] * 20), number, 0, [1] * 20, max_length=20 + most)
            if number < len(limits):
                sequence.hold((0, 1))
                reserve.add(sequence)
        return num_calls(lambda: reserve.growth_with(sequence, 2))

    assert look([*range(2, 60_000, 400)]) == look([5])


def test_a_gang_that_runs_nothing_keeps_nothing_back() -> None:
    s = scheduler(GangLimits(4096, 100, 4, 100, 512, 8))
    s.add(asking(0, [5] * 397, max_tokens=3), 0)  # all 100 pages
    assert [part.sequence_id for part in s.schedule().sequences] == [0]


def test_lengths_of_answers_decide_how_many_start() -> None:
    started = {}
    for length in (4, 200):
        s = scheduler(GangLimits(4096, 100, 4, 400, 512, 256))
        serve(s, dict.fromkeys(range(100), length))
        for i in range(200):
            s.add(asking(1000 + i, [2 + i % 90, *[1] * 7], None), 0)
        s.commit(plan := s.schedule(), ending(plan, {1000 + i: length for i in range(200)}))
        started[length] = s.load().gauges.num_running
    assert started[4] > 60  # of 400 pages, 2 each, within the budget of 512 tokens
    assert started[200] < 16  # 52 pages each


def test_answers_that_end_at_their_limits_are_learnt_from_too() -> None:
    """None ends before, so those that start get as long as that."""
    s = scheduler(GangLimits(4096, 100, 4, 400, 512, 256))
    for begin, number in ((0, 100), (1000, 200)):
        for i in range(begin, begin + number):
            s.add(asking(i, [2 + i % 90, *[1] * 7], max_tokens=200, ignore_eos=True), 0)
        while s.has_work() and begin == 0:
            s.commit(plan := s.schedule(), ending(plan, dict.fromkeys(range(100), 1000)))
    s.schedule()
    assert s.load().gauges.num_running <= 400 * 4 // 208 + 1


def test_hardly_anything_is_computed_twice() -> None:
    """Less than half of what is where the pool is filled to its last page, where it is free: steps are hardly fewer."""
    rng = random.Random(1)
    lengths = {i: min(1 + int(rng.expovariate(1 / 60)), 500) for i in range(300)}
    num_needed = sum(8 + length - 1 for length in lengths.values())
    num_computed, num_steps = {}, {}
    for keeps_reserve in (True, False):
        s = scheduler(GangLimits(4096, 100, 4, 600, 512, 256))
        if not keeps_reserve:
            fill_to_the_last_page(s)
        num_computed[keeps_reserve], num_steps[keeps_reserve] = serve(s, lengths)
    assert num_computed[True] - num_needed < (num_computed[False] - num_needed) / 2
    assert num_steps[True] <= 1.15 * num_steps[False]


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**32), num_pages=st.integers(6, 60), most=st.sampled_from([4, 30]))
def test_no_reserve_leaves_a_gang_idle(seed: int, num_pages: int, most: int) -> None:
    """Whatever the requests and however long the answers: a step computes if a sequence waits that lacks nothing."""
    rng = random.Random(seed)
    of = GangLimits(256, 100, 4, num_pages, rng.randint(4, 64), rng.randint(1, 12))
    s = scheduler(of)
    lengths: dict[int, int] = {}
    ended: set[int] = set()
    for step in range(4000):
        if step < 40 and rng.random() < 0.6:
            num_prompt, limit = rng.randint(1, min(60, 4 * num_pages - 8)), rng.choice([None, rng.randint(1, 40)])
            adapter = rng.choice([None, "a1", "b2"])
            prompt = [rng.randrange(3) for _ in range(num_prompt)]
            requested = asking(step, prompt, limit, adapter, rng.choice("tuv"))
            if s.add(requested, 0) is None:
                lengths[step] = rng.randint(1, most)
        if step >= 40 and not s.has_work():
            break
        gauges = s.load().gauges
        plan = s.schedule()
        s.check_integrity()
        is_ready = gauges.num_waiting > gauges.num_waiting_for_adapters
        assert plan.sequences or plan.loads or not (is_ready or gauges.num_running), "nothing is computed"
        updates = s.commit(plan, ending(plan, lengths))
        s.check_integrity()
        ended |= {update.sequence_id for update in updates if update.finish_reason}
    assert ended == lengths.keys()


def test_a_tenant_that_is_behind_starts_though_the_pool_keeps_pages_back() -> None:
    """Another one fills what is not kept back: its sequences give way until what is to be left free is free too."""
    s = scheduler(GangLimits(512, 100, 4, 200, 64, 64))
    lengths = dict.fromkeys(range(100), 300)
    for i in range(60):
        s.add(asking(i, [2 + i] * 8, None, tenant="flood"), 0)
    for _ in range(60):
        s.commit(plan := s.schedule(), ending(plan, lengths))
    for i in range(60, 64):
        s.add(asking(i, [2 + i] * 20, None, tenant="quiet"), 0)
    planned: set[int] = set()
    for _ in range(8):
        s.commit(plan := s.schedule(), ending(plan, lengths))
        planned |= {part.sequence_id for part in plan.sequences}
    assert planned >= {60, 61}
    assert pages_for(20, 4) == 5
