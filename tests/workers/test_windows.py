"""Pages of sequences where all layers have a window: given back, taken in their place, and found again."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.tests.rigs.scheduler_rig import Worker, asking, run, scheduler
from motet.workers.fairness.page_times import HeldPages, PageTimes
from motet.workers.plan import StepPlan
from motet.workers.scheduling.growing_sequence import refusal
from motet.workers.scheduling.prefix_reuse import PrefixReuse
from motet.workers.scheduling.scheduler import Scheduler
from motet.workers.scheduling.tier_traffic import TierSizes
from motet.workers.window_pages import FullLayers, GangLimits, kept_window, most_pages, num_unseen_pages
from motet.workers.wire.page_keys import KeyChain, PageKey, next_keys

WINDOW, BLOCK, BUDGET = 10, 4, 8
MOST = most_pages(1000, BLOCK, WINDOW, BUDGET)
PROMPT = [*range(1, 91)]  # 90 tokens: 22 full pages of four


def rig(
    num_pages: int, window: int | None = WINDOW, tiers: TierSizes | None = None, num_sequences: int = 16
) -> tuple[Scheduler, Worker]:
    of = GangLimits(400, 100, BLOCK, num_pages, BUDGET, num_sequences, window)
    s, worker = scheduler(of, tiers), Worker(of)
    worker.sequence_of = s._running.by_id.__getitem__
    return s, worker


def keys_of(prompt: list[int]) -> list[PageKey]:
    return next_keys(KeyChain.of(asking(0, prompt), 1).first_link, prompt, 0, BLOCK, len(prompt) // BLOCK)


def forget(s: Scheduler, prompt: list[int], pages: slice) -> None:
    """Evicts these pages of a prompt."""
    s.memory.prefixes.forget(keys_of(prompt)[pages])


@given(st.integers(0, 300), st.integers(1, 9), st.integers(1, 60))
def test_pages_are_unseen_when_no_later_token_sees_one_of_their_tokens(
    num_tokens: int, block_size: int, window: int
) -> None:
    seen = range(max(0, num_tokens - window + 1), num_tokens + 1)  # by the token after these, itself included
    first_page = num_unseen_pages(num_tokens, block_size, window)
    assert first_page * block_size <= seen.start < (first_page + 1) * block_size
    assert num_unseen_pages(num_tokens, block_size, None) == 0


def test_on_a_gpu_a_tile_before_the_window_is_kept_too() -> None:
    """Its kernels read it, and multiply it by a weight of zero."""
    assert kept_window(4096, "cpu") == 4096 and kept_window(4096, "cuda") == 4096 + 256
    assert kept_window(None, "cuda") is None


def test_a_sequence_of_any_length_takes_a_window_of_pages() -> None:
    """On a pool that holds a tenth of it. The worker checks that each token's window is there, and is its own."""
    s, worker = rig(num_pages=MOST)
    assert MOST < 400 // BLOCK // 5
    assert s.add(asking(0, [1, 2, 3] * 50, max_tokens=200), 0) is None
    most_held = 0
    while s.has_work():
        plan: StepPlan = s.schedule()
        s.commit(plan, worker.execute(plan))
        s.check_integrity()
        most_held = max([most_held, *(each.num_held_pages for each in s._running.by_id.values())])
    assert most_held == MOST
    assert s.load().counters.num_generated_tokens == 200
    assert s.load().counters.num_computed_tokens == 150 + 199, "something was computed twice"


def test_a_decoding_sequence_holds_its_window_alone() -> None:
    s, worker = rig(num_pages=100)
    s.add(asking(0, [1] * 40, max_tokens=60), 0)
    for _ in range(30):
        plan = s.schedule()
        s.commit(plan, worker.execute(plan))
    (sequence,) = s._running.by_id.values()
    assert sequence.num_held_pages <= -(-WINDOW // BLOCK) + 1
    assert s.load().gauges.num_free_pages + s.load().gauges.num_idle_prefix_pages >= 96


def test_what_does_not_fit_without_a_window_is_refused_and_with_one_is_served() -> None:
    without, _ = rig(num_pages=MOST, window=None)
    error = without.add(asking(0, PROMPT, max_tokens=200), 0)
    assert error is not None and "can never fit the pool" in error.message
    s, worker = rig(num_pages=MOST)
    assert s.add(asking(0, PROMPT, max_tokens=None), 0) is None
    assert sum(len(update.token_ids) for update in run(s, worker)) == 400 - len(PROMPT), "the context is its only end"
    too_small = GangLimits(400, 100, BLOCK, MOST - 1, BUDGET, 8, WINDOW)
    assert refusal(asking(0, PROMPT, max_tokens=200), 0, too_small) is not None


def test_more_sequences_run_at_once() -> None:
    """Those beyond their window need no more pages, and none are kept back for them."""

    def most_running(window: int | None) -> int:
        s, worker = rig(num_pages=80, window=window, num_sequences=64)
        for number in range(30):
            s.add(asking(number, [number] * 60, max_tokens=120), 0)
        most = 0
        while s.has_work():
            plan = s.schedule()
            s.commit(plan, worker.execute(plan))
            most = max(most, s.load().gauges.num_running)
        s.check_integrity()
        return most

    assert most_running(WINDOW) > 2 * most_running(None)


@settings(max_examples=40)
@given(st.integers(0, 40), st.integers(1, 40), st.integers(0, 1 << 40), st.floats(0.3, 1.0))
def test_the_longest_prefix_is_found_whose_last_window_is_there(
    num_pages: int, window: int, seed: int, share: float
) -> None:
    s, _ = rig(num_pages=100, window=window)
    keys, rng = [bytes([index]) for index in range(num_pages)], random.Random(seed)
    there = {key for key in keys if rng.random() < share}
    reuse: PrefixReuse = s._prefixes

    def is_enough(length: int) -> bool:
        return there >= {*keys[num_unseen_pages(length * BLOCK, BLOCK, window) : length]}

    looked_up: list[PageKey] = []

    def is_there(key: PageKey) -> bool:
        looked_up.append(key)
        return key in there

    expected = max(length for length in range(num_pages + 1) if is_enough(length))
    assert reuse._num_reached(keys, num_pages, is_there) == expected
    num_seen = -(-(window - 1) // BLOCK)  # pages, by the token after a full one
    assert len(looked_up) <= num_pages + num_seen, "pages are looked up again and again"
    looked_up.clear()
    there.clear()
    reuse._num_reached(keys, num_pages, is_there)
    assert len(looked_up) <= num_pages // max(1, num_seen) + 1, "absent pages are looked up one by one"


def test_a_prefix_is_found_though_its_first_pages_are_gone() -> None:
    s, worker = rig(num_pages=60)
    s.add(asking(0, PROMPT, max_tokens=1), 0)
    run(s, worker)
    forget(s, PROMPT, slice(0, 18))
    before = worker.num_computed
    s.add(asking(1, PROMPT, max_tokens=9), 0)
    (waiting,) = s._waiting.first(1)
    assert s._prefixes.prefix_here(waiting).num_found == 88, "the order of the queue does not know of it"
    assert len(s._prefixes.pages_here([waiting], 100)) == 3, "others could be evicted after these"
    plan = s.schedule()
    assert [(part.start, len(part.token_ids)) for part in plan.sequences] == [(88, 2)]
    s.commit(plan, worker.execute(plan))
    s.check_integrity()
    run(s, worker)
    assert worker.num_computed == before + 2 + 8


def test_a_prefix_without_a_page_of_its_last_window_is_computed_from_where_one_is_whole() -> None:
    s, worker = rig(num_pages=60)
    s.add(asking(0, PROMPT, max_tokens=1), 0)
    run(s, worker)
    forget(s, PROMPT, slice(20, 21))
    s.add(asking(1, PROMPT, max_tokens=1), 0)
    plan = s.schedule()
    assert [part.start for part in plan.sequences] == [80]
    s.commit(plan, worker.execute(plan))
    run(s, worker)


def test_samples_of_a_long_prompt_compute_it_once() -> None:
    """Though the first pages are given back before the last ones are computed."""
    s, worker = rig(num_pages=60)
    for number in range(4):
        s.add(asking(number, PROMPT, max_tokens=5, seed=number), number)
    run(s, worker)
    assert worker.num_computed <= len(PROMPT) + 3 * 2 + 4 * 4


def test_a_window_comes_back_from_host_memory_alone() -> None:
    """What lies before it in the tier is not copied."""
    s, worker = rig(num_pages=MOST + 4, tiers=TierSizes(host=200))
    s._costs.observe_step = lambda *_: None  # type: ignore[method-assign]  # copies are worth it
    s.add(asking(0, PROMPT, max_tokens=1), 0)
    run(s, worker)
    forget(s, PROMPT, slice(None))
    before = worker.num_computed
    s.add(asking(1, PROMPT, max_tokens=1), 0)
    run(s, worker)
    num_seen = 22 - num_unseen_pages(88, BLOCK, WINDOW)
    assert s.load().counters.num_pages_in == num_seen < 5
    assert worker.num_computed == before + 2


@pytest.mark.parametrize("num_here", [1, 2])
def test_pages_of_a_window_come_from_the_pool_and_from_host_memory(num_here: int) -> None:
    s, worker = rig(num_pages=60, tiers=TierSizes(host=200))
    s._costs.observe_step = lambda *_: None  # type: ignore[method-assign]
    s.add(asking(0, PROMPT, max_tokens=1), 0)
    run(s, worker)
    first = num_unseen_pages(88, BLOCK, WINDOW)
    forget(s, PROMPT, slice(0, first))
    forget(s, PROMPT, slice(first + num_here, None))
    before = worker.num_computed
    s.add(asking(1, PROMPT, max_tokens=1), 0)
    run(s, worker)
    assert s.load().counters.num_pages_in == 22 - first - num_here
    assert worker.num_computed == before + 2


@pytest.mark.parametrize(("layers", "num_pages"), [(None, 80), (FullLayers(2, 13), 110)])
def test_ends_of_conversations_stay_longest(layers: FullLayers | None, num_pages: int) -> None:
    """The pool holds the windows of all, and dense pages, but not all pages: those before are of no use alone."""
    of = GangLimits(400, 1000, BLOCK, num_pages, BUDGET, 4, WINDOW, layers)
    s, worker = scheduler(of), Worker(of)
    worker.sequence_of = s._running.by_id.__getitem__
    conversations = [[10 + number, *PROMPT] for number in range(8)]  # 23 pages of four tokens each
    for turn in range(3):
        before = worker.num_computed
        for number, tokens in enumerate(conversations):
            s.add(asking(8 * turn + number, tokens, max_tokens=1), 0)
            run(s, worker)
            tokens += [500 + turn] * 4
    assert worker.num_computed - before <= 8 * 3 * BLOCK


def test_a_preempted_sequence_goes_on_from_its_window() -> None:
    s, worker = rig(num_pages=60)
    s.add(asking(0, PROMPT, max_tokens=20), 0)
    for _ in range(15):
        plan = s.schedule()
        s.commit(plan, worker.execute(plan))
    (sequence,) = s._running.by_id.values()
    num_full = sequence.num_computed // BLOCK
    s._preempt(sequence)
    s.check_integrity()
    forget(s, PROMPT, slice(0, 15))
    plan = s.schedule()
    assert [part.start for part in plan.sequences] == [num_full * BLOCK]
    s.commit(plan, worker.execute(plan))
    s.check_integrity()
    run(s, worker)


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(-5, 5)), max_size=20))
def test_pages_are_charged_for_as_long_as_they_are_held(changes: list[tuple[float, int]]) -> None:
    now, num_pages, expected = 0.0, 7, 0.0
    times, held = PageTimes(lambda: now), HeldPages()
    times.start(held, num_pages)
    for seconds, change in changes:
        change = max(change, -num_pages)
        now, expected = now + seconds, expected + seconds * num_pages
        if change < 0:
            times.shrink(held, -change)
        else:
            times.grow(held, change)
        num_pages += change
        assert times.usage(held).kv_page_s == pytest.approx(expected, abs=1e-6)
        assert times.usage(held).num_kv_pages == num_pages
    times.stop(held)
    assert times.usage(held).kv_page_s == pytest.approx(expected, abs=1e-6)
