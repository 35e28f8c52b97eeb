"""Beams fork in the scheduler: the same rounds however the pool fills, and no page is written that another beam has."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.tests.rigs.beam_gang import beam_updates, beams_after
from motet.tests.rigs.scheduler_rig import (
    FeedingExecutor,
    Worker,
    WorkerExecutor,
    asking,
    limits,
    next_of,
    scheduler,
)
from motet.tests.rigs.stand_in_engine import INFO
from motet.workers.engine import Engine
from motet.workers.scheduling.growing_sequence import GrowingSequence
from motet.workers.scheduling.scheduler import Scheduler
from motet.workers.scheduling.tier_traffic import TierSizes
from motet.workers.window_pages import FullLayers, GangLimits, pages_for
from motet.workers.wire.beams import BeamRound, BeamRules, BeamsSoFar
from motet.workers.wire.messages import Cancel, SequenceRequest, SequenceUsage

WAYS = ["one by one", "overlapping", "feeding"]


def searching(
    sequence_id: int,
    prompt: list[int],
    width: int,
    max_tokens: int,
    ends: frozenset[int] = frozenset(),
    tenant: str = "t",
) -> SequenceRequest:
    requested = asking(sequence_id, prompt, max_tokens, tenant=tenant)
    return msgspec.structs.replace(requested, beams=BeamRules(width, max_tokens, ends))


def rounds_of(request: SequenceRequest) -> list[BeamRound]:
    """Those that a gang without any other sequence finds."""
    return [one for update in beam_updates(request, next_of) for one in update.beam_rounds or ()]


class Bench:
    """An engine over a worker that knows what every page holds. Its integrity is checked after every step."""

    def __init__(
        self, of: GangLimits, way: str = "one by one", tiers: TierSizes | None = None, prefix_cache: bool = True
    ):
        self.scheduler = scheduler(of, tiers)
        if not prefix_cache:
            self.scheduler = Scheduler(of, frozenset({99}), lambda ref: max(ref.module_ranks.values()), False, tiers)
        self.worker = Worker(of, slow_loads=random.Random(1))
        self.seen: dict[int, GrowingSequence] = {}
        self.worker.sequence_of, self.worker.copies_early = self._sequence_of, True
        executor = FeedingExecutor(self.worker) if way == "feeding" else WorkerExecutor(self.worker)
        self.engine = Engine(self.scheduler, executor, INFO, overlaps=way != "one by one")
        self.rounds: dict[int, list[BeamRound]] = {}
        self.tokens: dict[int, list[int]] = {}
        self.usage: dict[int, SequenceUsage] = {}
        self.ended: dict[int, str] = {}

    def add(self, request: SequenceRequest) -> None:
        assert self.scheduler.add(request, seed=1) is None
        self.rounds[request.sequence_id], self.tokens[request.sequence_id] = [], []
        self.scheduler.check_integrity()

    def step(self) -> None:
        self._look()
        for update in self.engine.step():
            assert update.sequence_id not in self.ended, "a sequence spoke after its end"
            self.rounds[update.sequence_id] += update.beam_rounds or ()
            self.tokens[update.sequence_id] += update.token_ids
            if update.usage is not None:
                self.usage[update.sequence_id] = update.usage
            if update.finish_reason is not None or update.error is not None:
                self.ended[update.sequence_id] = update.error.kind if update.error else str(update.finish_reason)
        self._look()
        self.scheduler.check_integrity()

    def finish(self) -> None:
        for _ in range(3000):
            if not self.engine.has_work():
                break
            self.step()
        assert not self.engine.has_work() and not self.scheduler._uncommitted
        self.engine.step()
        assert not self.worker.deltas.tables, "workers keep tables of beams that have ended"
        gauges, num_pages = self.scheduler.load().gauges, self.scheduler._limits.num_pages
        assert gauges.num_free_pages + gauges.num_adapter_pages + gauges.num_prefix_pages == num_pages
        assert gauges.num_idle_prefix_pages == gauges.num_prefix_pages
        assert not self.scheduler._beams._groups and not self.scheduler._beams.joining

    def _look(self) -> None:
        self.seen |= self.scheduler._running.by_id | {each.sequence_id: each for each in self.scheduler._waiting}
        for group in self.scheduler._beams._groups.values():
            self.seen |= {place.sequence_id: place for place in group.places}

    def _sequence_of(self, sequence_id: int) -> GrowingSequence:
        if sequence_id not in self.seen:
            self._look()
        return self.seen[sequence_id]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("num_prompt", [1, 3, 4, 9])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_a_search_computes_what_forks_need(way: str, num_prompt: int, width: int) -> None:
    bench, length = Bench(limits(60), way), 14
    request = searching(1, [5] * num_prompt, width, length)
    bench.add(request)
    bench.finish()
    assert bench.rounds[1] == rounds_of(request) and bench.ended == {1: "length"}
    assert bench.worker.num_computed == num_prompt + width * (length - 1)
    assert bench.scheduler.load().counters.num_steps <= length + (num_prompt + 15) // 16
    usage = bench.usage[1]
    assert usage.num_computed_prompt_tokens == num_prompt
    assert usage.num_generated_tokens == 1 + width * (length - 1)
    assert usage.num_recomputed_tokens == 0
    assert bench.worker.num_copies <= (width - 1) * (length - 1)


def test_beams_take_no_step_more_beside_others_that_decode() -> None:
    bench, length = Bench(limits(60), "overlapping"), 14
    bench.add(asking(1, [6] * 3, 60))
    for _ in range(3):
        bench.step()
    request = searching(2, [5] * 6, 3, length)
    bench.add(request)
    num_before = bench.scheduler.load().counters.num_steps
    while 2 not in bench.ended:
        bench.step()
    assert bench.rounds[2] == rounds_of(request)
    assert bench.scheduler.load().counters.num_steps - num_before <= length + 4
    bench.finish()


def test_a_search_takes_as_many_places_as_it_has_beams() -> None:
    bench = Bench(limits(60, num_sequences=4))
    requests = [searching(number, [number] * 6, 3, 6) for number in (1, 2)]
    for request in requests:
        bench.add(request)
    bench.step()
    assert 2 not in bench.scheduler._running.by_id
    bench.add(asking(3, [7] * 3, 4))
    bench.step()
    assert 3 not in bench.scheduler._running.by_id, "it came later than the search that waits for places"
    bench.finish()
    assert all(bench.rounds[each.sequence_id] == rounds_of(each) for each in requests)


def test_a_search_wider_than_the_gang_is_computed_in_several_steps() -> None:
    bench = Bench(limits(60, num_sequences=4))
    request = searching(1, [5] * 6, 7, 6)
    bench.add(request)
    bench.finish()
    assert bench.rounds[1] == rounds_of(request)


@pytest.mark.parametrize("way", WAYS)
def test_a_search_goes_on_from_its_rounds(way: str) -> None:
    whole = searching(1, [5] * 9, 3, 12)
    rounds = rounds_of(whole)
    for num in range(1, len(rounds)):
        bench = Bench(limits(60), way)
        before = SequenceUsage(num_computed_prompt_tokens=9, num_generated_tokens=1 + 3 * (num - 1))
        bench.add(msgspec.structs.replace(whole, beams_so_far=beams_after(rounds[:num], whole.beams), usage=before))
        bench.finish()
        assert bench.rounds[1] == rounds[num:]
        usage = bench.usage[1]
        assert (usage.num_computed_prompt_tokens, usage.num_cached_prompt_tokens) == (9, 0)
        assert usage.num_generated_tokens == 1 + 3 * 11
        assert usage.num_recomputed_tokens + 3 * (12 - num) == bench.worker.num_computed
        assert usage.num_recomputed_tokens >= 9


def test_searches_that_cannot_be_are_refused() -> None:
    whole = searching(1, [5] * 9, 2, 3)
    s = scheduler(limits(60))
    for wrong in (
        BeamsSoFar([-1.0], [], [], [[]]),  # no token yet
        BeamsSoFar([-1.0], [], [1, 2, 3], [[]]),  # all of its tokens
        BeamsSoFar([-1.0] * 3, [], [1], [[2], [3], [4]]),  # wider than the search
        BeamsSoFar([-1.0], [-1.0] * 3, [1], [[]]),
        BeamsSoFar([-1.0], [], [1], [[2], [3]]),
        BeamsSoFar([-1.0, -2.0], [], [1], [[2], []]),
        BeamsSoFar([], [], [], []),
        BeamsSoFar([-1.0, -2.0], [], [1], [[2], [1 << 40]]),
    ):
        error = s.add(msgspec.structs.replace(whole, beams_so_far=wrong), 1)
        assert error is not None and error.kind == "invalid_request"
    for request in (
        msgspec.structs.replace(whole, beams=BeamRules(0, 3, frozenset())),
        searching(1, [5] * 9, 40, 40),
        msgspec.structs.replace(whole, sampling=msgspec.structs.replace(whole.sampling, presence_penalty=1.0)),
    ):
        error = s.add(request, 1)
        assert error is not None and error.kind == "invalid_request"
    s.check_integrity()
    assert not s.has_work()


def test_a_beam_without_finite_numbers_fails_its_search() -> None:
    bench = Bench(limits(60))
    bench.worker.broken.add(1)
    bench.add(searching(1, [5] * 9, 3, 6))
    bench.finish()
    assert bench.ended == {1: "internal"}


@pytest.mark.parametrize("num_before", [0, 8])
@pytest.mark.parametrize("num_prompt", [6, 14])
def test_searches_of_two_tenants_that_find_no_room_together_do_not_undo_each_other(
    num_prompt: int, num_before: int
) -> None:
    """One that is preempted for another tenant loses what all of its beams have computed, and that tenant pays."""
    requests = list[SequenceRequest]()
    for number, tenant in enumerate("tu", 1):
        request = searching(number, [5] * num_prompt, 5, 14, tenant=tenant)
        so_far = beams_after(rounds_of(request)[:num_before], request.beams)
        requests.append(msgspec.structs.replace(request, beams_so_far=so_far))
    num_pages = pages_for(num_prompt + 13, 4)
    num_pages += 4 * (num_pages - num_prompt // 4)  # as many as one search can need
    bench = Bench(limits(num_pages, 4), prefix_cache=False)
    for request in requests:
        bench.add(request)
    bench.finish()
    assert bench.ended == {1: "length", 2: "length"}
    assert bench.scheduler.load().counters.num_preemptions <= 6


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("num_more", [0, 1, 2])
def test_a_prompt_copies_no_page_that_is_a_copy_of_the_same_step(way: str, num_more: int) -> None:
    bench = Bench(limits(60), way)
    bench.add(searching(1, [5] * 7, 3, 12))
    for _ in range(1 if way == "one by one" else 2):  # until the beams have forked, and share their last page
        bench.step()
    bench.add(asking(2, [5] * (7 + num_more), 4))
    bench.finish()
    assert bench.ended == {1: "length", 2: "length"}


@pytest.mark.parametrize("width", [2, 3])
def test_a_prompt_does_not_take_the_keys_of_a_beam_that_has_forked(width: int) -> None:
    bench = Bench(limits(60))
    whole = searching(1, [5], width, 12)
    begun = rounds_of(whole)[:3]
    request = msgspec.structs.replace(whole, beams_so_far=beams_after(begun, whole.beams))
    bench.add(request)
    root = bench.scheduler._waiting.get(1)
    assert root is not None
    first = root.token_ids[:4]
    bench.step()
    bench.step()
    assert root.token_ids[:4] != first, "the root's place has another beam now"
    bench.add(asking(2, [*first, 7], 4))
    while bench.engine.has_work():
        bench.step()
        bench.worker.check_residence(bench.scheduler)
    assert bench.ended == {1: "length", 2: "length"}
    assert [*begun, *bench.rounds[1]] == rounds_of(whole)


def test_long_beams_begin_over_several_steps() -> None:
    """Each has hundreds of pages of its own, whose keys would make a single step long."""
    width, length = 8, 1500
    bench = Bench(GangLimits(4096, 100, 4, 8000, 2048, 16))
    rules = BeamRules(width, length + 4, frozenset())
    request = msgspec.structs.replace(searching(1, [5] * 6, width, rules.max_tokens), beams=rules)
    ends = [[10 + number] * length for number in range(width)]
    so_far = BeamsSoFar([-1.0 - number for number in range(width)], [], [], ends)
    request = msgspec.structs.replace(request, beams_so_far=so_far)
    bench.add(request)
    num_running = list[int]()
    while len(bench.scheduler._running.by_id) < width:
        bench.step()
        num_running.append(len(bench.scheduler._running.by_id))
    assert 1 < num_running[1] <= 1 + 1024 // (length // 4) + 1 and len(num_running) > 3
    bench.finish()
    assert bench.rounds[1] == rounds_of(request)


@settings(deadline=None, max_examples=50)
@given(
    seed=st.integers(0, 2**32),
    num_pages=st.integers(14, 40),
    budget=st.integers(3, 20),
    tiers=st.sampled_from([TierSizes(), TierSizes(), TierSizes(60), TierSizes(6, 60)]),
    way=st.sampled_from(WAYS),
    window=st.sampled_from([None, None, 4, 9]),
    layers=st.sampled_from([None, FullLayers(3, 6)]),
    prefix_cache=st.booleans(),
    num_state_pages=st.sampled_from([0, 0, 0, 2, 5]),
)
def test_rounds_are_the_same_however_the_pool_fills(
    seed: int,
    num_pages: int,
    budget: int,
    tiers: TierSizes,
    way: str,
    window: int | None,
    layers: FullLayers | None,
    prefix_cache: bool,
    num_state_pages: int,
) -> None:
    rng = random.Random(seed)
    if num_state_pages:
        tiers, window = TierSizes(), None
    of = limits(num_pages, budget, window=window, num_state_pages=num_state_pages)
    if window is not None and layers is not None:
        of = GangLimits(64, 100, 4, num_pages, budget, 8, window, layers)
    bench = Bench(of, way, tiers if prefix_cache else None, prefix_cache)
    requests, begun = dict[int, SequenceRequest](), dict[int, list[BeamRound]]()
    for number in range(60):
        if rng.random() < 0.25:
            prompt = [rng.choice([0, 0, 0, 1])] * rng.randint(1, 14)
            tenant, max_tokens = rng.choice("tu"), rng.randint(1, 14)
            adapter = rng.choice([None, "z1", "a1"])
            request = asking(number + 1, prompt, max_tokens, adapter, tenant)
            if rng.random() < 0.6:
                rules = BeamRules(rng.randint(1, 5), max_tokens, frozenset(rng.sample(range(1, 13), rng.randint(0, 3))))
                request = msgspec.structs.replace(request, beams=rules)
                rounds = rounds_of(request)
                if rng.random() < 0.3 and len(rounds) > 1:
                    begun[number + 1] = rounds[: rng.randrange(1, len(rounds))]
                    request = msgspec.structs.replace(request, beams_so_far=beams_after(begun[number + 1], rules))
            if bench.scheduler.add(request, seed=1) is None:
                requests[request.sequence_id] = request
                bench.rounds[request.sequence_id], bench.tokens[request.sequence_id] = [], []
            bench.scheduler.check_integrity()
        open_ids = [*(requests.keys() - bench.ended.keys())]
        if open_ids and rng.random() < 0.04:
            gone = rng.choice(sorted(open_ids))
            bench.engine.receive(Cancel(gone))
            bench.scheduler.check_integrity()
        running = [*bench.scheduler._running.by_id.values()]
        if running and rng.random() < 0.05 and way == "one by one":
            bench.scheduler._preempt(rng.choice(running))
            bench.scheduler.check_integrity()
        bench.step()
        if rng.random() < 0.3:
            bench.worker.check_residence(bench.scheduler)
    bench.finish()
    assert bench.ended.keys() == requests.keys()
    for sequence_id, request in requests.items():
        if bench.ended[sequence_id] == "cancelled":
            continue
        assert bench.ended[sequence_id] in ("stop", "length")
        if request.beams is None:
            assert len(bench.tokens[sequence_id]) == request.sampling.max_tokens
        else:
            whole = msgspec.structs.replace(request, beams_so_far=None)
            assert [*begun.get(sequence_id, ()), *bench.rounds[sequence_id]] == rounds_of(whole)
