"""What sequences with a common beginning share, and what they must never share."""

from __future__ import annotations

import random
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.tests.rigs.full_pool import fill_to_the_last_page
from motet.tests.rigs.scheduler_rig import Worker, asking, limits, run, scheduler
from motet.workers.memory import prefix_cache
from motet.workers.memory.paged_memory import PagedMemory
from motet.workers.plan import INT32_BYTES, StepPlan
from motet.workers.scheduling import prefix_reuse
from motet.workers.scheduling.measured_costs import MeasuredCosts, PageCosts, is_worth_bringing
from motet.workers.scheduling.scheduler import Scheduler
from motet.workers.scheduling.tier_traffic import TierSizes
from motet.workers.wire.messages import SequenceRequest
from motet.workers.wire.page_keys import KeyChain, PageKey, next_keys, short_key, state_key

PROMPT = [*range(1, 31)]  # 30 tokens: seven full pages of four


@pytest.fixture(autouse=True)
def short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """States of answers are kept every four pages, as there are so few."""
    monkeypatch.setattr(prefix_reuse, "_ANSWER_PAGES", 4)


def rig(
    num_pages: int = 60, budget: int = 64, *, prefix_cache: bool = True, tiers: TierSizes | None = None
) -> tuple[Scheduler, Worker]:
    of = limits(num_pages, budget, num_sequences=16)
    s = scheduler(of, tiers) if prefix_cache else Scheduler(of, frozenset({99}), lambda ref: 1, prefix_cache=False)
    worker = Worker(of)
    worker.sequence_of = s._running.by_id.__getitem__
    return s, worker


def ask(s: Scheduler, worker: Worker, request: SequenceRequest) -> list[int]:
    """Runs a request alone, and returns its tokens."""
    assert s.add(request, 0) is None
    return [token_id for update in run(s, worker) for token_id in update.token_ids]


def test_what_was_computed_is_not_computed_again() -> None:
    s, worker = rig()
    ask(s, worker, asking(0, PROMPT, max_tokens=8))
    assert worker.num_computed == 37
    ask(s, worker, asking(1, PROMPT, max_tokens=8))
    assert worker.num_computed == 37 + 8  # the prompt's last token, and those generated
    assert s.load().counters.num_cached_tokens == 29


def test_the_next_turn_of_a_conversation_computes_only_what_is_new() -> None:
    s, worker = rig()
    answer = ask(s, worker, asking(0, PROMPT, max_tokens=11))
    before = worker.num_computed
    ask(s, worker, asking(1, [*PROMPT, *answer, 7, 7, 7], max_tokens=1))
    assert worker.num_computed - before == 44 - 40  # 40 tokens were computed, ten full pages


def test_samples_of_one_prompt_store_it_once_though_they_come_together() -> None:
    s, worker = rig()
    for i in range(8):
        s.add(asking(i, PROMPT, max_tokens=5, seed=i), i)
    plan = s.schedule()
    assert [planned.sequence_id for planned in plan.sequences] == [0]
    s.commit(plan, worker.execute(plan))
    plan = s.schedule()
    assert {planned.sequence_id: planned.start for planned in plan.sequences} == {
        0: 30,
        **dict.fromkeys(range(1, 8), 29),
    }
    assert len({planned.pages[: 7 * INT32_BYTES] for planned in plan.sequences}) == 1
    s.commit(plan, worker.execute(plan))
    load = s.load()
    assert load.gauges.num_pages - load.gauges.num_free_pages == 7 + 8
    run(s, worker)


@pytest.mark.parametrize("num_more_pages", range(6))
def test_a_snapshot_that_the_pool_has_no_room_for_beside_a_sequence_keeps_it_from_nothing(num_more_pages: int) -> None:
    of = limits(num_pages=5 + 8 + num_more_pages, num_state_pages=5)
    s, worker = scheduler(of), Worker(of)
    worker.sequence_of = s._running.by_id.__getitem__
    ask(s, worker, asking(1, PROMPT[:13], 2))
    ask(s, worker, asking(2, PROMPT, 2))
    assert worker.num_computed == 13 + 1 + 31 - (12 if num_more_pages == 5 else 0)


@pytest.mark.parametrize(("budget", "num_tokens"), [(4, 9), (8, 17), (8, 20), (16, 17), (16, 30)])
def test_a_state_is_kept_where_a_chunk_ends_too_and_the_next_token_may_be_the_last(
    budget: int, num_tokens: int
) -> None:
    prompt, of = PROMPT[:num_tokens], limits(60, budget, num_state_pages=2)
    again = num_tokens - (num_tokens - 1) // 4 * 4 + 1
    s, worker = scheduler(of), Worker(of)
    worker.sequence_of = s._running.by_id.__getitem__
    ask(s, worker, asking(1, prompt, 2))
    ask(s, worker, asking(2, prompt, 2))
    assert worker.num_computed == num_tokens + 1 + again
    s, worker = scheduler(of), Worker(of)
    for number in range(3):
        assert s.add(asking(number, prompt, 2), 0) is None
    run(s, worker)
    assert worker.num_computed == num_tokens + 1 + 2 * again, "who came with the first one did not wait for its state"


@pytest.mark.parametrize("num_pages", [19, 20, 21])
def test_no_adapter_that_a_sequence_waits_with_goes_for_a_snapshot(num_pages: int) -> None:
    of, num_loads = limits(num_pages, budget=4, num_state_pages=3), 0
    s, worker = scheduler(of), Worker(of)
    assert s.add(asking(1, PROMPT, 2, tenant="t"), 0) is None
    assert s.add(asking(2, [*range(40, 60)], 2, adapter="a8", tenant="u"), 0) is None  # waits for room, and 8 pages
    while s.has_work():
        plan = s.schedule()
        num_loads += len(plan.loads)
        s.commit(plan, worker.execute(plan))
    assert num_loads == 1


def test_what_an_earlier_run_looked_for_says_nothing_of_the_next_one() -> None:
    """A preempted sequence looks anew: its pages may have gone, and that of its last look-up may be another's."""
    s, worker = rig(budget=2)
    ask(s, worker, asking(0, PROMPT, max_tokens=1))
    keys = next_keys(KeyChain.of(asking(0, PROMPT), 1).first_link, PROMPT, 0, 4, 7)
    s.memory.prefixes.forget(keys[5:])
    for i in (1, 2):
        s.add(asking(i, PROMPT, max_tokens=1), 0)
    plan = s.schedule()
    s.commit(plan, worker.execute(plan))
    preempted, other = s._running.by_id[1], s._waiting.get(2)
    assert other is not None
    s._preempt(preempted)
    s.memory.prefixes.forget(keys[1:2])
    s._prefixes._pending[keys[5]] = other  # it has begun, and is beyond the page that is not there any more
    found = s._prefixes.find(preempted, frozenset())
    assert found is not None or s._prefixes.key_to_await(preempted) in s._prefixes._pending, "nothing would wake it"


def test_who_waits_for_another_goes_on_alone_when_that_one_is_cancelled() -> None:
    s, worker = rig(budget=8)
    for i in range(2):
        s.add(asking(i, PROMPT), 0)
    plan = s.schedule()
    assert [planned.sequence_id for planned in plan.sequences] == [0]
    s.commit(plan, worker.execute(plan))
    s.cancel(0)
    s.check_integrity()
    plan = s.schedule()
    assert [(planned.sequence_id, planned.start) for planned in plan.sequences] == [(1, 8)]
    s.commit(plan, worker.execute(plan))
    run(s, worker)


def test_a_prompt_that_is_there_in_full_still_computes_its_last_token() -> None:
    s, worker = rig()
    for i in range(2):
        assert len(ask(s, worker, asking(i, PROMPT[:28], max_tokens=3))) == 3
    assert s.load().counters.num_cached_tokens == 27


@pytest.mark.parametrize(
    "other",
    [
        asking(1, PROMPT, tenant="other"),
        asking(1, PROMPT, adapter="a1"),
        msgspec.structs.replace(asking(1, PROMPT), cache_salt="other"),
        asking(1, [2, *PROMPT[1:]]),
    ],
    ids=["tenant", "adapter", "salt", "first token"],
)
def test_what_differs_in_whose_it_is_is_never_shared(other: SequenceRequest) -> None:
    s, worker = rig()
    ask(s, worker, asking(0, PROMPT))
    ask(s, worker, other)
    assert s.load().counters.num_cached_tokens == 0


def test_a_new_version_never_meets_the_old_ones_pages() -> None:
    s, worker = rig()
    ask(s, worker, asking(0, PROMPT, adapter="a1"))
    ask(s, worker, asking(1, PROMPT, adapter="b1"))  # another digest, be its name the same
    assert s.load().counters.num_cached_tokens == 0
    ask(s, worker, asking(2, PROMPT, adapter="a1"))
    assert s.load().counters.num_cached_tokens == 29


def test_what_came_of_broken_weights_is_not_kept() -> None:
    s, worker = rig()
    s.add(asking(0, PROMPT, adapter="a1"), 0)
    while s.has_work():
        plan: StepPlan = s.schedule()
        result = worker.execute(plan)
        result.tokens.update(dict.fromkeys(result.tokens))
        s.commit(plan, result)
        s.check_integrity()
    assert s.load().gauges.num_prefix_pages == 0


def test_who_gave_way_comes_back_to_what_is_left_of_its_pages() -> None:
    s, worker = rig(num_pages=12)
    fill_to_the_last_page(s)
    s.add(asking(0, PROMPT[:20], max_tokens=20), 0)
    s.add(asking(1, PROMPT[4:20], max_tokens=20), 0)
    run(s, worker)
    assert s.load().counters.num_preemptions > 0
    assert s.load().counters.num_cached_tokens > 0


def test_without_the_cache_nothing_is_kept_or_waited_for() -> None:
    s, worker = rig(prefix_cache=False)
    for i in range(3):
        s.add(asking(i, PROMPT[:10]), 0)
    assert len(s.schedule().sequences) == 3
    s, worker = rig(prefix_cache=False)
    for i in range(2):
        ask(s, worker, asking(i, PROMPT, max_tokens=8))
    load = s.load()
    assert (load.counters.num_cached_tokens, load.gauges.num_prefix_pages) == (0, 0)
    assert load.gauges.num_free_pages == load.gauges.num_pages


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**32), num_pages=st.integers(12, 40))
def test_just_what_is_not_resident_is_computed(seed: int, num_pages: int) -> None:
    """Against a plain model: the set of keys of pages that are resident. Each request runs alone."""
    rng = random.Random(seed)
    s, worker = rig(num_pages)
    resident: set[int] = set()
    for i in range(40):
        prompt = [rng.choice([1, 1, 1, 2]) for _ in range(rng.randint(1, 30))]
        requested = asking(i, prompt, rng.randint(1, 8), rng.choice([None, "a1", "b2"]), rng.choice("tu"))
        own = [*map(short_key, next_keys(KeyChain.of(requested, 1).first_link, prompt, 0, 4, (len(prompt) - 1) // 4))]
        assert s.add(requested, 0) is None
        start = None
        while s.has_work():
            found = next((depth for depth, key in enumerate(own) if key not in resident), len(own))
            plan = s.schedule()
            if plan.sequences and start is None:
                start = plan.sequences[0].start
                assert found == start // 4, "a page that is there is computed, or one is used that is not"
            s.commit(plan, worker.execute(plan))
            s.check_integrity()
            change = s.take_residency_changes()
            resident = (resident - set(change.pages_went)) | set(change.pages_came)
            worker.check_residence(s)
        assert start is not None
        full = next_keys(KeyChain.of(requested, 1).first_link, prompt, 0, 4, len(prompt) // 4)
        assert {short_key(key) for key in full} <= resident, "what was computed is not kept"


def flood(s: Scheduler, worker: Worker, num_prompts: int = 6, first: int = 50) -> None:
    """Runs prompts of seven pages each, which evict everything idle."""
    for i in range(first, first + num_prompts):
        ask(s, worker, asking(i, [i] * 30, max_tokens=1))


def test_what_was_pushed_out_comes_back_from_host_memory() -> None:
    s, worker = rig(num_pages=12, tiers=TierSizes(host=100))
    texts = [ask(s, worker, asking(0, PROMPT, max_tokens=8))]
    flood(s, worker)
    before = worker.num_computed
    texts.append(ask(s, worker, asking(1, PROMPT, max_tokens=8)))
    assert worker.num_computed - before == 9  # two tokens of the page that is not full, and seven generated
    assert texts[0] == texts[1]
    load = s.load()
    assert (load.counters.num_pages_in, load.counters.num_move_failures) == (7, 0)
    assert load.gauges.num_host_pages == 9 + 6 * 7  # of the first answer two more pages were filled
    assert load.counters.num_pages_out == load.gauges.num_host_pages


def state_rig(num_pages: int, tiers: TierSizes | None, num_state_pages: int = 3) -> tuple[Scheduler, Worker]:
    """Of a base with recurrent states, in which a copy costs less than computing a page."""
    of = limits(num_pages, budget=64, num_sequences=16, num_state_pages=num_state_pages)
    s, worker = scheduler(of, tiers), Worker(of)
    worker.sequence_of = s._running.by_id.__getitem__
    s._costs.observe_step = lambda *_: None  # type: ignore[method-assign]
    s._costs.observe_copy = lambda *_: None  # type: ignore[method-assign]
    return s, worker


def tiers_with(s: Scheduler, key: PageKey) -> set[str]:
    tiers = {name for name, slots in s._tiers._tiers.items() if key in slots}
    return tiers | ({"device"} if s.memory.prefixes.page_of(key) is not None else set())


@pytest.mark.parametrize(
    ("tiers", "there"), [(TierSizes(100), {"host"}), (TierSizes(16, 100), {"disk"})], ids=["host memory", "disk"]
)
def test_a_state_that_was_evicted_comes_back_with_its_prefix(tiers: TierSizes, there: set[str]) -> None:
    s, worker = state_rig(16, tiers)
    ask(s, worker, asking(0, PROMPT, max_tokens=8))
    flood(s, worker, num_prompts=8)
    keys = keys_of(PROMPT)
    assert [tiers_with(s, key) for key in (*keys, state_key(keys[-1]))] == 8 * [there]
    before = worker.num_computed
    ask(s, worker, asking(1, PROMPT, max_tokens=8))
    assert worker.num_computed - before == 9  # as of a base without states
    assert s.load().counters.num_pages_in == 7 + 3
    worker.check_residence(s)


@pytest.mark.parametrize("num_missing", [0, 1, 7])
@pytest.mark.parametrize("is_state_missing", [False, True])
def test_a_prefix_may_lie_in_several_tiers(num_missing: int, is_state_missing: bool) -> None:
    """What the pool has of it is not copied, and what host memory lacks is read from disk."""
    s, worker = state_rig(60, TierSizes(100, 100))
    ask(s, worker, asking(0, PROMPT, max_tokens=1))
    keys = keys_of(PROMPT)
    going = keys[7 - num_missing :] + ([state_key(keys[-1])] if is_state_missing else [])
    host, disk = s._tiers._tiers.values()
    for key in going[::2]:  # every other one is on disk alone
        slots = disk.reserve(key, host.num_pages_of([key]))
        for source, target in zip(host._slots[key], slots or (), strict=True):
            worker._tiers["disk", target] = worker._tiers["host", source]
        disk.written([key])
        host.drop(key)
    s.memory.prefixes.forget(going)
    before = worker.num_computed
    ask(s, worker, asking(1, PROMPT, max_tokens=1))
    assert worker.num_computed - before == 2
    assert s.load().counters.num_pages_in == num_missing + 3 * is_state_missing
    worker.check_residence(s)


@pytest.mark.parametrize("lacks", ["a page", "the state"])
def test_of_a_prefix_that_lacks_something_in_all_tiers_nothing_is_copied(lacks: str) -> None:
    s, worker = state_rig(16, TierSizes(100))
    ask(s, worker, asking(0, PROMPT, max_tokens=1))
    flood(s, worker, num_prompts=8)
    keys = keys_of(PROMPT)
    (host,) = s._tiers._tiers.values()
    host.drop(keys[3] if lacks == "a page" else state_key(keys[-1]))
    before = worker.num_computed
    ask(s, worker, asking(1, PROMPT, max_tokens=1))
    assert worker.num_computed - before == 30
    assert s.load().counters.num_pages_in == 0


def test_a_prefix_is_not_copied_for_a_sequence_that_has_no_room_for_its_state_twice() -> None:
    """It needs its own state, and one to copy: with fewer pages what was copied would be of no use to it."""
    for num_pages, num_in in ((13, 0), (14, 10)):
        s, worker = state_rig(num_pages, TierSizes(100))
        ask(s, worker, asking(0, PROMPT[:29], max_tokens=1))
        flood(s, worker, num_prompts=8)
        ask(s, worker, asking(1, PROMPT[:29], max_tokens=1))
        assert s.load().counters.num_pages_in == num_in


def test_a_state_for_which_host_memory_is_too_small_is_not_copied_out() -> None:
    s, worker = state_rig(16, TierSizes(2))
    ask(s, worker, asking(0, PROMPT, max_tokens=1))
    assert not s.has_work()
    assert s.load().gauges.num_host_pages == 2


def test_a_state_that_was_made_anew_on_other_pages_is_not_copied_from_its_old_ones() -> None:
    """Its first page may be the same: what waits to be copied may be evicted, and made again by another sequence."""
    s, _ = state_rig(num_pages=30, tiers=TierSizes(host=30))
    key, allocator, prefixes = state_key(keys_of(PROMPT)[-1]), s.memory.allocator, s.memory.prefixes
    old = allocator.allocate(3)
    assert old is not None and prefixes.insert_state(old, key, 7, 7)
    prefixes.release(old)
    s._tiers.offer(old, key)
    prefixes.forget([key])
    others = allocator.allocate(2) or ()
    new = (old[0], *(allocator.allocate(3) or ())[1:])
    assert {*others} == {*old[1:]} and prefixes.insert_state(new, key, 7, 7)
    assert [move.source_pages for move in s._tiers.plan_moves()] == [new]


def test_a_state_that_costs_more_to_copy_than_to_compute_is_not_copied() -> None:
    s, worker = state_rig(50, TierSizes(800), num_state_pages=20)
    ask(s, worker, asking(0, PROMPT, max_tokens=1))
    flood(s, worker, num_prompts=8)
    for copy_s, num_in in ((3e-4, 0), (1e-4, 27)):  # a page takes 1e-3 to compute, and a step as long
        s._costs._copies["host"].value = copy_s
        ask(s, worker, asking(1, PROMPT, max_tokens=1))
        assert s.load().counters.num_pages_in == num_in
        flood(s, worker, num_prompts=8, first=70)


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_state_that_cannot_be_read_back_is_computed(tier: str) -> None:
    s, worker = state_rig(16, TierSizes(100) if tier == "host" else TierSizes(16, 100))
    first = ask(s, worker, asking(0, PROMPT))
    flood(s, worker, num_prompts=8)
    worker.failing_tiers = {tier}
    before = worker.num_computed
    assert ask(s, worker, asking(1, PROMPT)) == first
    assert worker.num_computed - before == 33
    assert s.load().counters.num_pages_in == 0
    keys = keys_of(PROMPT)
    assert not tiers_with(s, state_key(keys[-1])) & {tier}, "what is damaged is dropped"


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32), num_pages=st.integers(20, 30), num_state_pages=st.integers(1, 3))
def test_just_what_no_tier_has_with_its_state_is_computed(seed: int, num_pages: int, num_state_pages: int) -> None:
    """Against a plain model: the sets of keys that each tier has. Each request runs alone."""
    rng = random.Random(seed)
    sizes = rng.choice([TierSizes(), TierSizes(30), TierSizes(100), TierSizes(12, 60)])
    s, worker = state_rig(num_pages, sizes, num_state_pages)
    s._costs._compute.value = 1.0
    num_used = 0
    for i in range(40):
        prompt = [rng.randint(1, 4)] * rng.choice([5, 9, 13, 26]) + rng.choice([[], [5], [6] * 4])
        requested = asking(i, prompt, rng.randint(1, 8), rng.choice([None, None, "a1"]))
        own = next_keys(KeyChain.of(requested, 1).first_link, prompt, 0, 4, (len(prompt) - 1) // 4)
        num_kv = next((depth for depth, key in enumerate(own) if not tiers_with(s, key)), len(own))
        states = [depth for depth in range(1, num_kv + 1) if tiers_with(s, state_key(own[depth - 1]))]
        assert s.add(requested, 0) is None
        start = None
        while s.has_work():
            plan = s.schedule()
            if plan.sequences and start is None:
                start = plan.sequences[0].start
            s.commit(plan, worker.execute(plan))
            s.check_integrity()
        worker.check_residence(s)
        assert start == 4 * max(states, default=0), "what is there is computed, or what is not is used"
        num_used += start > 0
    assert num_used, "no prompt began as one before"


def states_in(s: Scheduler, keys: list[PageKey], tier: str = "device") -> list[int]:
    """After how many of a sequence's pages a tier has its state."""
    return [depth for depth, key in enumerate(keys, 1) if tier in tiers_with(s, state_key(key))]


@pytest.mark.parametrize(("num_state_pages", "expected"), [(1, [2, 6, 10]), (3, [2, 10]), (5, [2, 10])])
def test_the_next_turn_goes_on_in_the_answer(num_state_pages: int, expected: list[int]) -> None:
    """A snapshot takes the place of the one before, unless KV has taken twice as many pages as a state since."""
    s, worker = state_rig(60, TierSizes(100), num_state_pages)
    answer = ask(s, worker, asking(0, PROMPT[:10], max_tokens=40))
    keys = keys_of([*PROMPT[:10], *answer])
    assert states_in(s, keys) == states_in(s, keys, "host") == expected
    before = worker.num_computed
    ask(s, worker, asking(1, [*PROMPT[:10], *answer, 7, 7, 7], max_tokens=1))
    assert worker.num_computed - before == 53 - 40
    worker.check_residence(s)


def test_a_snapshot_of_an_answer_that_another_has_found_stays() -> None:
    s, worker = state_rig(80, None)
    assert s.add(asking(0, PROMPT[:10], max_tokens=40), 0) is None
    sequence = None
    while sequence is None or len(sequence.token_ids) < 30:
        plan = s.schedule()
        s.commit(plan, worker.execute(plan))
        sequence = s._running.by_id[0]
    answer, before = sequence.token_ids[10:], worker.num_computed
    ask(s, worker, asking(1, [*PROMPT[:10], *answer], max_tokens=1))  # runs to the end of both
    assert worker.num_computed - before < 2 * len(answer) + 20
    assert states_in(s, keys_of([*PROMPT[:10], *range(40)])) == [2, 6, 7, 10]


def test_a_preempted_answer_goes_on_from_its_last_snapshot() -> None:
    s, worker = state_rig(60, None)
    assert s.add(asking(0, PROMPT[:10], max_tokens=40), 0) is None
    while worker.num_computed < 46:
        plan = s.schedule()
        s.commit(plan, worker.execute(plan))
    s._preempt(s._running.by_id[0])
    run(s, worker)
    assert worker.num_computed == 49 + 6  # from token 40 on


@pytest.mark.parametrize("num_spare", [0, 2, 3, 6])
def test_snapshots_of_answers_take_what_is_free_or_idle_and_preempt_none(num_spare: int) -> None:
    """Beside a sequence of 13 pages and a state of 3. The last pages of KV take the place of what has no room."""
    s, worker = state_rig(13 + 3 + num_spare, None)
    answer = ask(s, worker, asking(0, PROMPT[:10], max_tokens=40))
    assert s.load().counters.num_preemptions == 0
    depths = states_in(s, keys_of([*PROMPT[:10], *answer]))
    assert max(depths, default=0) == (10 if num_spare >= 3 else 0)


def test_a_step_keeps_the_states_of_few_answers() -> None:
    s, worker = state_rig(200, None)
    for i in range(9):
        assert s.add(asking(i, [20 + i] * 10, max_tokens=40), 0) is None
    num_copies = list[int]()
    while s.has_work():
        plan = s.schedule()
        num_copies.append(len(plan.copies))
        s.commit(plan, worker.execute(plan))
        s.check_integrity()
    assert max(num_copies) == 2 * 3, "of eight decodes two"
    assert sum(num_copies) >= 9 * 3, "the others' turn comes with their next pages"


def test_the_state_that_a_waiting_sequence_will_use_is_evicted_last() -> None:
    s, worker = state_rig(60, None)
    for i in range(3):
        ask(s, worker, asking(i, [10 + i] * 14, max_tokens=1))
    assert s.add(asking(5, [10] * 14, max_tokens=1), 0) is None  # the one that would go first
    s._ahead = s._waiting.first(8)
    keys = next_keys(KeyChain.of(asking(5, []), 1).first_link, [10] * 14, 0, 4, 3)
    assert s.memory.make_room(60 - 3 - 3, frozenset())
    assert states_in(s, keys) == [3]
    assert [tiers_with(s, key) for key in keys] == 3 * [{"device"}]


def test_what_host_memory_has_no_room_for_goes_on_to_disk_and_comes_back() -> None:
    s, worker = rig(num_pages=12, tiers=TierSizes(host=16, disk=100))
    ask(s, worker, asking(0, PROMPT, max_tokens=8))
    flood(s, worker, num_prompts=8)
    assert s.load().gauges.num_disk_pages > 9
    before = worker.num_computed
    ask(s, worker, asking(1, PROMPT, max_tokens=8))
    assert worker.num_computed - before == 9


@pytest.mark.parametrize("tiers", [TierSizes(host=8), TierSizes(host=16, disk=10)])
def test_a_tier_that_is_too_small_keeps_the_latest_and_the_rest_is_computed(tiers: TierSizes) -> None:
    s, worker = rig(num_pages=12, tiers=tiers)
    ask(s, worker, asking(0, PROMPT))
    flood(s, worker, num_prompts=10)
    before = worker.num_computed
    ask(s, worker, asking(1, PROMPT, max_tokens=1))
    assert worker.num_computed - before == 30


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_tier_that_fails_is_given_up_and_answers_stay_the_same(tier: str) -> None:
    s, worker = rig(num_pages=12, tiers=TierSizes(host=16, disk=100))
    worker.failing_tiers = {tier}
    first = ask(s, worker, asking(0, PROMPT))
    flood(s, worker, num_prompts=20)
    num_failures = s.load().counters.num_move_failures
    assert 3 <= num_failures <= 4  # two copies are under way at once
    flood(s, worker, num_prompts=10, first=80)
    assert s.load().counters.num_move_failures == num_failures
    assert ask(s, worker, asking(1, PROMPT)) == first


def test_pages_that_cannot_be_read_back_are_computed() -> None:
    s, worker = rig(num_pages=12, tiers=TierSizes(host=100))
    first = ask(s, worker, asking(0, PROMPT))
    flood(s, worker)
    worker.failing_tiers = {"host"}
    before = worker.num_computed
    assert ask(s, worker, asking(1, PROMPT)) == first
    assert worker.num_computed - before == 33
    assert s.load().counters.num_move_failures > 0
    assert s.load().counters.num_pages_in == 0


def test_a_copy_that_costs_more_than_computing_is_not_made() -> None:
    s, worker = rig(num_pages=12, tiers=TierSizes(host=100))
    ask(s, worker, asking(0, PROMPT))
    flood(s, worker)
    for _ in range(200):
        s._costs.observe_copy("host", 1, seconds=1.0)
    before = worker.num_computed
    ask(s, worker, asking(1, PROMPT, max_tokens=1))
    assert worker.num_computed - before == 30
    assert s.load().counters.num_pages_in == 0


@given(st.integers(1, 1000), *[st.floats(1e-6, 10.0)] * 3)
def test_bringing_back_is_chosen_when_it_is_cheaper(n: int, compute_s: float, copy_s: float, step_s: float) -> None:
    worth = is_worth_bringing(n, PageCosts(compute_s, copy_s, step_s))
    assert worth == (n * compute_s > n * copy_s + step_s)
    if worth:
        assert is_worth_bringing(n + 1, PageCosts(compute_s, copy_s, step_s)), "more of it is worth it all the more"


def test_who_gave_way_comes_back_by_copies() -> None:
    s, worker = rig(num_pages=12, tiers=TierSizes(host=100))
    fill_to_the_last_page(s)
    s.add(asking(0, PROMPT[:20], max_tokens=20), 0)
    s.add(asking(1, PROMPT[4:20], max_tokens=20), 0)
    run(s, worker)
    load = s.load()
    assert load.counters.num_preemptions > 0
    assert load.counters.num_pages_in > 0
    assert load.counters.num_computed_tokens < 20 + 16 + 2 * 19 + 8


def test_who_gave_way_comes_back_by_copies_with_its_state() -> None:
    num_again = []
    for tiers in (None, TierSizes(host=100)):
        s, worker = state_rig(24, tiers)
        fill_to_the_last_page(s)
        s.add(asking(0, PROMPT[:20], max_tokens=24), 0)
        s.add(asking(1, PROMPT[4:20], max_tokens=24), 0)
        run(s, worker)
        counters = s.load().counters
        assert counters.num_preemptions > 0
        num_again.append(counters.num_recomputed_tokens)
    assert counters.num_pages_in >= 3
    assert num_again[1] <= num_again[0] - 12, "its prompt was computed again"


def test_what_came_of_broken_weights_is_kept_in_no_tier() -> None:
    s, worker = rig(num_pages=30, budget=8, tiers=TierSizes(host=100))
    s.add(asking(0, PROMPT), 0)
    while s.has_work():
        plan: StepPlan = s.schedule()
        result = worker.execute(plan)
        result.tokens.update(dict.fromkeys(result.tokens))
        s.commit(plan, result)
        s.check_integrity()
    load = s.load()
    assert load.counters.num_pages_out > 0
    assert (load.gauges.num_prefix_pages, load.gauges.num_host_pages) == (0, 0)
    ask(s, worker, asking(1, PROMPT))
    assert s.load().counters.num_cached_tokens == 0


def test_of_broken_weights_no_state_is_kept_in_any_tier() -> None:
    s, worker = state_rig(40, TierSizes(host=100))
    first = asking(0, PROMPT, max_tokens=8)
    s.add(first, 0)
    num_steps = 0
    while s.has_work():
        plan: StepPlan = s.schedule()
        result = worker.execute(plan)
        num_steps += 1
        if num_steps == 6:  # by then the prompt's state has been copied out
            assert s.load().gauges.num_host_pages >= 7 + 3
            result.tokens.update(dict.fromkeys(result.tokens))
        s.commit(plan, result)
        s.check_integrity()
    load = s.load()
    assert (load.gauges.num_prefix_pages, load.gauges.num_host_pages) == (0, 0)


def test_a_full_disk_costs_no_page_that_host_memory_has() -> None:
    s, worker = rig(num_pages=12, tiers=TierSizes(host=40, disk=100))
    worker.failing_tiers = {"disk"}
    for i in range(6):
        ask(s, worker, asking(i, [i] * 30, max_tokens=1))
    load = s.load()
    assert load.counters.num_move_failures > 0
    assert load.gauges.num_host_pages == 40 or load.gauges.num_host_pages == load.counters.num_pages_out


def test_pages_that_are_in_the_pool_are_not_copied_into_it() -> None:
    s, worker = rig(num_pages=12, tiers=TierSizes(host=100))
    ask(s, worker, asking(0, PROMPT))
    flood(s, worker, num_prompts=1)
    num_missing = 7 - sum(s.memory.prefixes.page_of(key) is not None for key in keys_of(PROMPT))
    ask(s, worker, asking(1, PROMPT, max_tokens=1))
    assert s.load().counters.num_pages_in <= num_missing


def keys_of(prompt: list[int]) -> list[bytes]:
    return next_keys(KeyChain.of(asking(0, prompt), 1).first_link, prompt, 0, 4, len(prompt) // 4)


def test_one_slow_copy_does_not_switch_copies_off() -> None:
    costs = MeasuredCosts(block_size=4)
    for _ in range(10):
        costs.observe_copy("host", 8, seconds=8e-4)
        costs.observe_step(1, 100, seconds=0.1)
    costs.observe_copy("host", 8, seconds=15.0)
    assert is_worth_bringing(8, costs.costs("host"))
    for _ in range(200):
        costs.observe_copy("disk", 8, seconds=15.0)
    assert is_worth_bringing(8, costs.costs("host"))
    assert not is_worth_bringing(8, costs.costs("disk"))


@given(seed=st.integers(0, 2**32), most_given_back=st.integers(1, 4))
def test_what_is_left_of_prefixes_that_are_released_little_by_little_is_their_beginnings(
    seed: int, most_given_back: int
) -> None:
    """Though pages are evicted meanwhile."""
    rng = random.Random(seed)
    memory = PagedMemory(60, lambda: 1.0, lambda *_: 1.0)
    prefixes, chains = memory.prefixes, list[list[PageKey]]()
    with patch.object(prefix_cache, "MOST_GIVEN_BACK", most_given_back):
        for number in range(40):
            prefixes.begin_step()
            if rng.random() < 0.5:
                pages = memory.allocator.allocate(rng.randint(1, 20)) or ()
                chains.append([bytes([number, depth]) for depth in range(len(pages))])
                for depth, page in enumerate(pages):
                    assert prefixes.insert(page, chains[-1][depth], depth)
                prefixes.release_later(pages, None)
            memory.make_room(memory.allocator.num_free + rng.randint(0, 3), frozenset())
            memory.check_integrity([])
            for chain in chains:
                num_here = sum(prefixes.page_of(key) is not None for key in chain)
                assert len(prefixes.find(chain)) == num_here, "a page is kept that cannot be found"
