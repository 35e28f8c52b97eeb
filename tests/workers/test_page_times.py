"""For how long sequences hold pages: the integrals against sums over every moment, and what is reported of them."""

from __future__ import annotations

import random
from collections import defaultdict

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.router.fleet.open_sequence import OpenSequence
from motet.tests.rigs.full_pool import fill_to_the_last_page
from motet.tests.rigs.part_configs import leader_config
from motet.tests.rigs.scheduler_rig import EOS, Worker, asking, limits, request
from motet.workers.leader.sequence_journal import SequenceJournal
from motet.workers.scheduling.growing_sequence import GrowingSequence
from motet.workers.scheduling.scheduler import Scheduler
from motet.workers.scheduling.tier_traffic import TierSizes
from motet.workers.wire.messages import SequenceUpdate, SequenceUsage


class Gang:
    """A scheduler whose clock goes only here, and what its sequences hold summed up at each tick."""

    def __init__(self, num_pages: int = 40, tiers: TierSizes | None = None, rng: random.Random | None = None) -> None:
        self.now = 1000.0
        of = limits(num_pages, budget=16)
        self.scheduler = Scheduler(
            of, frozenset({EOS}), lambda ref: max(ref.module_ranks.values()), tiers=tiers, clock=lambda: self.now
        )
        self.worker = Worker(of, slow_loads=rng)
        self.kv_page_s: defaultdict[int, float] = defaultdict(float)  # page-seconds by sequence
        self.adapter_page_s: defaultdict[int, float] = defaultdict(float)
        self.used_adapters = 0.0  # page-seconds of adapters that sequences ran with
        self.reported: dict[int, SequenceUsage] = {}  # as of last
        self.ended: set[int] = set()
        self._seen: dict[int, GrowingSequence] = {}  # a plan may be about one that was cancelled meanwhile
        self.worker.sequence_of = self._seen.__getitem__

    def pass_time(self, seconds: float) -> None:
        running = [*self.scheduler._running.by_id.values()]
        digests = [sequence.adapter_digest for sequence in running]
        for sequence in running:
            self.kv_page_s[sequence.sequence_id] += len(sequence.pages) * seconds
            if (digest := sequence.adapter_digest) is not None:
                num_pages = len(self.scheduler._adapters.residence(digest).pages)
                self.adapter_page_s[sequence.sequence_id] += num_pages * seconds / digests.count(digest)
        for digest in {*digests} - {None}:
            assert digest is not None
            self.used_adapters += len(self.scheduler._adapters.residence(digest).pages) * seconds
        self.now += seconds

    def step(self, seconds: float = 1.0) -> list[SequenceUpdate]:
        plan = self.scheduler.schedule()
        self._seen |= self.scheduler._running.by_id
        self.pass_time(seconds)
        updates = self.scheduler.commit(plan, self.worker.execute(plan))
        self.scheduler.check_integrity()
        for update in updates:
            if (taken := update.usage) is not None:
                self.reported[update.sequence_id] = taken
                own = update.sequence_id
                expected = (self.kv_page_s[own], self.adapter_page_s[own])
                assert (taken.kv_page_s, taken.adapter_page_s) == pytest.approx(expected, rel=1e-9)
            if update.finish_reason is not None:
                assert update.usage is not None
                self.ended.add(update.sequence_id)
        return updates

    def finish(self) -> None:
        while self.scheduler.has_work():
            self.step()


@settings(deadline=None, max_examples=100)
@given(
    seed=st.integers(0, 2**32),
    num_pages=st.integers(8, 24),
    tiers=st.sampled_from([TierSizes(), TierSizes(6, 60)]),
)
def test_what_is_reported_is_what_every_moment_adds_up_to(seed: int, num_pages: int, tiers: TierSizes) -> None:
    rng = random.Random(seed)
    gang = Gang(num_pages, tiers, rng)
    before = SequenceUsage(7.5, 2.25)  # of one that comes from another gang
    for number in range(200):
        if number < 40 and rng.random() < 0.6:
            prompt = [rng.choice([0, 0, 0, 1])] * rng.randint(1, 20)  # many begin alike, and share pages
            one = asking(number, prompt, rng.randint(1, 20), rng.choice([None, "a1", "b2", "c3"]))
            if rng.random() < 0.3:
                one = msgspec.structs.replace(one, usage=before)
            if gang.scheduler.add(one, 0) is None and one.usage is not None:
                gang.kv_page_s[number], gang.adapter_page_s[number] = before.kv_page_s, before.adapter_page_s
                gang.used_adapters += before.adapter_page_s
        if rng.random() < 0.05:
            gang.scheduler.cancel(rng.randrange(40))
        if gang.scheduler.has_work():
            gang.step(rng.choice([0.0, 0.25, 1.0, 3.0]))
    while gang.scheduler.has_work():
        gang.step()
    assert sum(gang.adapter_page_s.values()) == pytest.approx(gang.used_adapters)
    assert gang.scheduler._times.users() == {}


def test_two_that_run_with_an_adapter_carry_half_of_it_each() -> None:
    gang = Gang()
    gang.scheduler.add(request(1, num_prompt=3, max_tokens=30, adapter="a3"), 0)
    for _ in range(5):  # it comes with the first step, and the sequence waits until then
        gang.step()
    alone = gang.adapter_page_s[1]
    gang.scheduler.add(request(2, num_prompt=3, max_tokens=4, adapter="a3"), 0)
    while 2 not in gang.ended:
        gang.step()
    assert gang.reported[2] == SequenceUsage(1 + 1 + 2 + 2, 4 * 3 / 2, 0, 0.0, 3, 0, 4, 0)
    assert gang.adapter_page_s[1] == alone + 4 * 3 / 2
    gang.finish()
    idle_at = gang.used_adapters
    gang.scheduler.schedule()
    gang.pass_time(50.0)
    assert gang.used_adapters == idle_at == sum(taken.adapter_page_s for taken in gang.reported.values())


def test_who_is_cancelled_leaves_the_adapter_to_others() -> None:
    gang = Gang()
    for number in (1, 2):
        gang.scheduler.add(request(number, num_prompt=3, max_tokens=12, adapter="a3"), 0)
    for _ in range(4):
        gang.step()
    half = gang.adapter_page_s[1]
    gang.scheduler.cancel(2)
    gang.finish()
    assert 2 not in gang.ended
    assert gang.reported[1].adapter_page_s == half + 3 * (12 - half / 1.5)


def test_who_gave_way_holds_nothing_until_it_runs_again() -> None:
    gang = Gang(num_pages=6)
    fill_to_the_last_page(gang.scheduler)
    gang.scheduler.add(request(1, num_prompt=4, max_tokens=16), 0)
    gang.scheduler.add(request(2, num_prompt=8, max_tokens=12), 0)
    while not gang.scheduler.load().counters.num_preemptions:
        gang.step()
    waited_at = gang.kv_page_s[2]
    gang.step(1000.0)
    assert gang.scheduler.load().gauges.num_waiting == 1
    assert gang.kv_page_s[2] == waited_at
    gang.finish()
    assert waited_at < gang.reported[2].kv_page_s < 1000.0 < gang.reported[1].kv_page_s


def test_it_is_reported_with_the_first_token_the_last_and_now_and_then_between() -> None:
    gang = Gang()
    gang.scheduler.add(request(1, num_prompt=3, max_tokens=40, adapter="a3"), 0)
    reported: list[SequenceUsage | None] = []
    while gang.scheduler.has_work():
        reported += [update.usage for update in gang.step()]
    assert [number for number, one in enumerate(reported) if one is not None] == [0, 32 - 3, 39]  # 32: eight pages of 4
    first, middle, last = (one for one in reported if one is not None)
    assert (first.num_kv_pages, first.num_adapter_pages, middle.num_kv_pages) == (1, 3.0, 8)
    assert (last.num_kv_pages, last.num_adapter_pages) == (0, 0.0)
    later = first.after(2.0)
    assert (later.kv_page_s, later.adapter_page_s) == (first.kv_page_s + 2.0, first.adapter_page_s + 6.0)


def test_a_prompt_that_is_computed_for_long_counts_from_its_first_step_on() -> None:
    gang = Gang()
    gang.scheduler.add(request(1, num_prompt=40, max_tokens=1), 0)
    gang.finish()
    assert gang.reported[1].kv_page_s == 10 * 3.0  # 10 pages, for the three steps that compute its 40 tokens


def test_an_end_with_an_error_is_reported_too() -> None:
    gang = Gang()
    gang.worker.broken.add(1)
    gang.scheduler.add(request(1, num_prompt=3, max_tokens=8, adapter="a3"), 0)
    (last,) = [update for _ in range(4) for update in gang.step()]
    assert last.error is not None
    assert last.usage == SequenceUsage(1.0, 3.0, num_computed_prompt_tokens=3)


def test_a_router_hands_on_what_it_received_when_a_gang_is_lost() -> None:
    sequence = OpenSequence(request(1))
    sequence.push(SequenceUpdate(1, [5], usage=SequenceUsage(2.0, 1.0)))
    sequence.push(SequenceUpdate(1, [6]))
    here = sequence.request_from_here(9)
    assert here.usage == SequenceUsage(2.0, 1.0)
    gang = Gang()
    gang.kv_page_s[9], gang.adapter_page_s[9] = 2.0, 1.0
    gang.scheduler.add(here, 0)
    gang.finish()
    assert gang.reported[9].kv_page_s > 2.0


def test_a_journal_has_all_for_a_client_that_resumes() -> None:
    journal = SequenceJournal(leader_config())
    requested = msgspec.structs.replace(request(3), key="k", usage=SequenceUsage(1.0, 0.5))
    journal.begin(1, requested, 10)
    found = journal.attach(requested, 11, 0.0)
    assert found is not None
    assert found.unread.take_all().usage == SequenceUsage(1.0, 0.5)
    journal.record(SequenceUpdate(1, [5], usage=SequenceUsage(4.0, 2.0)), 0.0)
    journal.record(SequenceUpdate(1, [6]), 0.0)
    found = journal.attach(requested, 12, 0.0)
    assert found is not None
    assert found.unread.take_all().usage == SequenceUsage(4.0, 2.0)


def test_it_survives_the_wire_and_older_ends() -> None:
    update = SequenceUpdate(3, [5], None, "length", usage=SequenceUsage(1.5, 0.25))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(update), type=SequenceUpdate) == update
    older = msgspec.msgpack.encode([3, [5], None, "length", None, 4, 0.5])
    assert msgspec.msgpack.decode(older, type=SequenceUpdate).usage is None
    whole = request(3)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(whole), type=type(whole)).usage is None
