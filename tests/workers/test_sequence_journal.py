"""What a leader keeps of sequences with keys: for which router, how long, and that all it computes has a reader."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from motet.tests.rigs.part_configs import leader_config
from motet.workers.leader import sequence_journal
from motet.workers.leader.sequence_journal import SequenceJournal
from motet.workers.wire.messages import (
    AdapterRef,
    SamplingParams,
    SequenceError,
    SequenceRequest,
    SequenceUpdate,
    TokenLogprobs,
)

CONFIG = leader_config(orphan_s=60, finished_s=10, max_finished=3, max_finished_values=60)


def request(key: str = "k", sequence_id: int = 7, tenant: str = "acme", **fields: Any) -> SequenceRequest:
    given: dict[str, Any] = {"prompt_token_ids": [1, 2], "sampling": SamplingParams(max_tokens=20, seed=1)} | fields
    return SequenceRequest(sequence_id=sequence_id, tenant=tenant, key=key, **given)


def begun(journal: SequenceJournal, engine_id: int = 1, num_tokens: int = 3, **fields: Any) -> SequenceRequest:
    """A sequence of the stream 10 with this number of tokens: 100, 101, …"""
    requested = request(**fields)
    assert journal.begin(engine_id, requested, 10) == []
    for n in range(num_tokens):
        logprobs = None if requested.sampling.num_logprobs is None else [TokenLogprobs(-float(n), [], [])]
        journal.record(SequenceUpdate(engine_id, [100 + n], logprobs), 0.0)
    return requested


def test_an_orphan_goes_on_with_the_router_that_requests_it() -> None:
    journal = SequenceJournal(CONFIG)
    begun(journal)
    assert journal.orphans == []
    assert journal.abandon(10, now=0.0) == {1}
    assert journal.take_changed() == {"k"}
    assert journal.orphans == ["k"]
    journal.record(SequenceUpdate(1, [103]), 1.0)
    found = journal.attach(request(sequence_id=3, generated_token_ids=[100, 101]), 11, now=2.0)
    assert found is not None
    assert (found.engine_id, found.unread.take_all(), found.is_finished) == (1, SequenceUpdate(3, [102, 103]), False)
    assert (journal.take_changed(), journal.orphans) == ({"k"}, [])
    assert journal.expire(1000.0) == []  # it has an owner again
    journal.check_integrity()


def test_one_that_another_router_reads_is_taken_over() -> None:
    journal = SequenceJournal(CONFIG)
    begun(journal)
    found = journal.attach(request(), 11, now=0.0)
    assert found is not None
    assert journal.abandon(10, now=0.0) == set()
    assert journal.abandon(11, now=0.0) == {1}


@pytest.mark.parametrize(
    "other",
    [
        {"prompt_token_ids": [1, 3]},
        {"sampling": SamplingParams(max_tokens=20, seed=2)},
        {"adapter": AdapterRef("another", {})},
        {"generated_token_ids": [100, 999]},
        {"generated_token_ids": [100, 101, 102, 103]},  # more than it has
        {"tenant": "globex"},
        {"key": "another"},
    ],
)
def test_another_request_does_not_get_it(other: dict[str, Any]) -> None:
    journal = SequenceJournal(CONFIG)
    begun(journal)
    journal.abandon(10, now=0.0)
    assert journal.attach(request(**other), 11, now=1.0) is None
    # A new one of the same name takes the name, and only then the old one cannot be requested any more.
    has_same_name = not other.keys() & {"tenant", "key"}
    assert journal.begin(2, request(**other), 11) == ([1] if has_same_name else [])
    journal.check_integrity()


def test_the_end_is_kept_for_a_while() -> None:
    journal = SequenceJournal(CONFIG)
    begun(journal)
    journal.record(SequenceUpdate(1, [103], None, "length"), 5.0)
    assert journal.expire(14.9) == []
    assert journal.abandon(10, now=14.9) == set()  # nothing goes on
    assert journal.expire(74.8) == []
    found = journal.attach(request(), 11, now=74.8)
    assert found is not None
    assert found.is_finished
    assert found.unread.take_all() == SequenceUpdate(7, [100, 101, 102, 103], None, "length")
    assert journal.expire(84.9) == []
    assert journal.attach(request(), 12, now=85.0) is None


def test_errors_are_reported_as_well() -> None:
    journal = SequenceJournal(CONFIG)
    begun(journal)
    journal.abandon(10, now=0.0)
    journal.record(SequenceUpdate(1, error=SequenceError("adapter_failed", "bad")), 1.0)
    found = journal.attach(request(), 11, now=2.0)
    assert found is not None
    assert found.is_finished
    assert found.unread.take_all().error == SequenceError("adapter_failed", "bad")


def test_a_store_that_could_not_be_read_is_not_remembered() -> None:
    """The router sends the sequence again, maybe to this very gang, under the same key."""
    journal = SequenceJournal(CONFIG)
    begun(journal)
    journal.record(SequenceUpdate(1, error=SequenceError("store_unavailable", "Stale file handle")), 1.0)
    assert journal.attach(request(), 11, now=2.0) is None
    journal.check_integrity()


def test_an_orphan_that_no_router_wants_is_cancelled() -> None:
    journal = SequenceJournal(CONFIG)
    begun(journal)
    journal.abandon(10, now=0.0)
    assert journal.expire(59.0) == []
    assert journal.expire(60.0) == [1]
    assert journal.attach(request(), 11, now=60.0) is None
    begun(journal, engine_id=2)
    journal.abandon(10, now=60.0)
    assert journal.clear() == [2]
    assert journal.orphans == []


def test_log_probabilities_from_elsewhere_are_not_there() -> None:
    """A sequence that another gang began is given only to a router that has the tokens of that gang."""
    journal = SequenceJournal(CONFIG)
    sampling = SamplingParams(max_tokens=20, seed=1, num_logprobs=0)
    begun(journal, num_tokens=2, sampling=sampling, generated_token_ids=[98, 99])
    assert journal.attach(request(sampling=sampling, generated_token_ids=[98]), 11, now=0.0) is None
    found = journal.attach(request(sampling=sampling, generated_token_ids=[98, 99, 100]), 11, now=0.0)
    assert found is not None
    assert found.unread.take_all() == SequenceUpdate(7, [101], [TokenLogprobs(-1.0, [], [])])


def test_log_probabilities_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has the most loses them; only a router that has the tokens without them can still ask for the sequence."""
    monkeypatch.setattr(sequence_journal, "MAX_LOGPROB_VALUES", 10)
    journal = SequenceJournal(CONFIG)
    sampling = SamplingParams(max_tokens=20, seed=1, num_logprobs=0)
    begun(journal, engine_id=1, num_tokens=3, key="short", sampling=sampling)
    begun(journal, engine_id=2, num_tokens=8, key="long", sampling=sampling)
    journal.check_integrity()
    assert journal.attach(request("short", sampling=sampling), 11, now=0.0) is not None
    assert journal.attach(request("long", sampling=sampling), 11, now=0.0) is None
    journal.record(SequenceUpdate(2, [108], [TokenLogprobs(-8.0, [], [])]), 0.0)
    had = [100 + n for n in range(8)]
    found = journal.attach(request("long", sampling=sampling, generated_token_ids=had), 11, now=0.0)
    assert found is not None
    assert found.unread.take_all() == SequenceUpdate(7, [108], [TokenLogprobs(-8.0, [], [])])
    journal.record(SequenceUpdate(2, [], [], "stop"), 0.0)
    for number in range(20):
        journal.record(SequenceUpdate(1, [103 + number], [TokenLogprobs(0.0, [], [])]), 0.0)
        journal.check_integrity()


def test_what_has_ended_is_bounded() -> None:
    journal = SequenceJournal(CONFIG)
    for number in range(5):
        begun(journal, number, key=str(number))
        journal.record(SequenceUpdate(number, [1], None, "stop"), 0.0)
        journal.check_integrity()
    assert [journal.attach(request(str(number)), 11, 1.0) is not None for number in range(5)] == [False] * 2 + [
        True
    ] * 3
    begun(journal, 9, num_tokens=60, key="large")
    journal.record(SequenceUpdate(9, [1], None, "stop"), 0.0)  # takes more than all may
    journal.check_integrity()
    assert journal.attach(request("large"), 11, 1.0) is None


def test_what_is_too_much_by_another_bound_goes_at_once() -> None:
    journal = SequenceJournal(CONFIG)
    for number in range(3):
        begun(journal, number, key=str(number))
        journal.record(SequenceUpdate(number, [1], None, "stop"), 0.0)
    journal.change(replace(CONFIG, max_finished=1))
    journal.check_integrity()
    assert [journal.attach(request(str(number)), 11, 1.0) is not None for number in range(3)] == [False, False, True]


@dataclass
class Sequence:
    """The state of a sequence in the engine and at its listener."""

    requested: SequenceRequest
    owner: int | None
    tokens: list[int] = field(default_factory=list)


class Machine(RuleBasedStateMachine):
    """Calls of a frame server in random order, and an engine that counts: no token is lost, and all have a reader."""

    def __init__(self) -> None:
        super().__init__()
        self.journal = SequenceJournal(CONFIG)
        self.running: dict[int, Sequence] = {}
        self.num_begun = 0
        self.now = 0.0

    @rule(
        key=st.sampled_from("abc"), prompt=st.sampled_from([1, 2]), owner=st.integers(1, 3), num_had=st.integers(0, 4)
    )
    def submit(self, key: str, prompt: int, owner: int, num_had: int) -> None:
        had = [1000 * prompt + n for n in range(num_had)]
        sampling = SamplingParams(num_logprobs=0)
        requested = request(key, prompt_token_ids=[prompt], generated_token_ids=had, sampling=sampling)
        found = self.journal.attach(requested, owner, self.now)
        if found is not None:
            rest = found.unread.take_all()
            assert rest.token_ids == [1000 * prompt + num_had + n for n in range(len(rest.token_ids))]
            assert rest.logprobs is not None
            assert [-one.chosen for one in rest.logprobs] == rest.token_ids
            if not found.is_finished:
                one = self.running[found.engine_id]
                assert rest.token_ids == one.tokens[num_had:]
                one.owner = owner
            return
        self.num_begun += 1
        for engine_id in self.journal.begin(self.num_begun, requested, owner):
            assert self.running.pop(engine_id).owner is None
        self.running[self.num_begun] = Sequence(requested, owner, [*had])

    @precondition(lambda self: self.running)
    @rule(data=st.data(), is_last=st.booleans())
    def step(self, data: st.DataObject, is_last: bool) -> None:
        engine_id = data.draw(st.sampled_from(sorted(self.running)))
        one = self.running[engine_id]
        token = 1000 * one.requested.prompt_token_ids[0] + len(one.tokens)
        one.tokens.append(token)
        logprobs = [TokenLogprobs(-float(token), [], [])]
        self.journal.record(SequenceUpdate(engine_id, [token], logprobs, "stop" if is_last else None), self.now)
        if is_last:
            del self.running[engine_id]

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        engine_id = data.draw(st.sampled_from(sorted(self.running)))
        if self.running[engine_id].owner is not None:
            self.journal.forget(engine_id)
            del self.running[engine_id]

    @rule(owner=st.integers(1, 3))
    def end_stream(self, owner: int) -> None:
        kept = self.journal.abandon(owner, self.now)
        for engine_id, one in list(self.running.items()):
            if one.owner == owner:
                one.owner = None
                if engine_id not in kept:
                    del self.running[engine_id]

    @rule(seconds=st.sampled_from([1.0, 9.0, 30.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        for engine_id in self.journal.expire(self.now):
            assert self.running.pop(engine_id).owner is None

    @rule()
    def drain(self) -> None:
        for engine_id in self.journal.clear():
            assert self.running.pop(engine_id).owner is None

    @invariant()
    def holds_together(self) -> None:
        self.journal.check_integrity()

    @invariant()
    def nothing_runs_without_a_reader(self) -> None:
        orphans = {one.requested.key for one in self.running.values() if one.owner is None}
        assert orphans <= set(self.journal.orphans)


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
