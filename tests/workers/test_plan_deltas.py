"""Workers in processes of their own have the plans that the leader made, though they get only new pages of them."""

from __future__ import annotations

import random
from collections.abc import Iterable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.workers.execution.gang_executor import DeltaDecoder, DeltaEncoder, Execute, PlanMismatchError, ToWorker
from motet.workers.plan import INT32_BYTES, Int32s, SamplePlan, SequencePlan, StatePlan, StepPlan, packed, unpacked
from motet.workers.wire.messages import SamplingParams

BLOCK = 16
SAMPLE = SamplePlan(SamplingParams(max_tokens=500, temperature=0.0), 2**62, 250)


def part(sequence_id: int, pages: Iterable[int] | Int32s, start: int = 0) -> SequencePlan:
    table = pages if isinstance(pages, bytes) else packed(pages)
    return SequencePlan(sequence_id, (7,), start, table, None, SAMPLE)


class Gang:
    """A leader and two workers without a connection between them."""

    def __init__(self) -> None:
        self.leader, self.workers, self._step = DeltaEncoder(), (DeltaDecoder(), DeltaDecoder()), 0
        self.message, self.num_bytes = Execute(StepPlan(0, (), (), ()), b""), 0  # the last one

    def send(self, *parts: SequencePlan, ended_runs: Iterable[int] = ()) -> None:
        """A step. Checks that the workers have the leader's plan."""
        self._step += 1
        plan = StepPlan(self._step, parts, (), (), ended_runs=tuple(ended_runs))
        sent = msgspec.msgpack.encode(self.leader.encode(plan))
        self.num_bytes = len(sent)
        for worker in self.workers:
            message = msgspec.msgpack.decode(sent, type=ToWorker)
            assert isinstance(message, Execute)
            self.message = message
            assert worker.decode(message) == plan
            self.leader.check_integrity(worker)

    def new_pages(self) -> list[list[int]]:
        """The pages in the last message, by sequence."""
        return [unpacked(each.pages).tolist() for each in self.message.plan.sequences]


class RandomSequences:
    """Sequences whose pages change in all the ways that pages can change."""

    def __init__(self, rng: random.Random) -> None:
        self._rng, self._next_id = rng, 0
        self.tables: dict[int, list[int]] = {}  # of those that run
        self._resting: list[int] = []  # preempted: they may run again
        self.ended_runs: list[int] = []
        self.changed: set[int] = set()  # not only grown since a plan last had them

    def step(self) -> None:
        self.ended_runs = []
        rng = self._rng
        for sequence_id, table in [*self.tables.items()]:
            way = rng.random()
            if way < 0.4:
                table += self._pages(1, 3)
            elif way < 0.45:  # moved, or copied on write: as many as before
                table[rng.randrange(len(table))] = rng.randrange(1000)
                self.changed.add(sequence_id)
            elif way < 0.5:
                del table[rng.randrange(1, len(table) + 1) :]
                self.changed.add(sequence_id)
            elif way < 0.6:
                self._leave(sequence_id, rests=way < 0.55)
        for _ in range(rng.randrange(4)):
            self._start()

    def _start(self) -> None:
        """A new one, a fork of another, or one that was preempted, on its old pages in part or on others."""
        rng = self._rng
        if self._resting and rng.random() < 0.5:
            sequence_id = self._resting.pop(rng.randrange(len(self._resting)))
        else:
            self._next_id += 1
            sequence_id = self._next_id
        parents = [*self.tables.values()]
        shared = rng.choice(parents) if parents and rng.random() < 0.5 else []
        self.tables[sequence_id] = [*shared[: rng.randint(0, len(shared))], *self._pages(1, 8)]
        self.changed.add(sequence_id)
        if rng.random() < 0.05:
            self._leave(sequence_id, rests=True)  # before any plan has it

    def _leave(self, sequence_id: int, rests: bool) -> None:
        del self.tables[sequence_id]
        self.ended_runs.append(sequence_id)
        if rests:
            self._resting.append(sequence_id)

    def _pages(self, least: int, most: int) -> list[int]:
        return [self._rng.randrange(1000) for _ in range(self._rng.randint(least, most))]


@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 2**32))
def test_workers_get_the_plan_whatever_has_happened_to_its_pages(seed: int) -> None:
    rng = random.Random(seed)
    gang, sequences = Gang(), RandomSequences(rng)
    kept: dict[int, list[int]] = {}  # what a plan last had of each sequence
    for _ in range(40):
        sequences.step()
        chosen = [each for each in sequences.tables if rng.random() < 0.8]  # a step need not have all that run
        rng.shuffle(chosen)
        gang.send(*[part(each, sequences.tables[each]) for each in chosen], ended_runs=sequences.ended_runs)
        for sequence_id, new in zip(chosen, gang.new_pages(), strict=True):
            table, before = sequences.tables[sequence_id], kept.get(sequence_id, [])
            if sequence_id not in sequences.changed:
                assert new == table[len(before) :], "pages are sent again, or one that is new is not"
            kept[sequence_id] = [*table]
        sequences.changed -= set(chosen)
        for worker in gang.workers:
            assert worker.tables.keys() <= sequences.tables.keys(), "a table is kept of a sequence that does not run"
    gang.send(ended_runs=sequences.tables)
    assert all(not worker.tables for worker in gang.workers)


def test_only_new_pages_are_sent() -> None:
    gang = Gang()
    gang.send(part(7, [5]), part(8, [9, 4]))
    assert gang.new_pages() == [[5], [9, 4]]
    gang.send(part(8, [9, 4, 6]), part(7, [5]))
    assert gang.new_pages() == [[6], []]
    gang.send(part(8, [9, 4, 6, 1, 2]))
    gang.send(part(7, [5, 3]), part(8, [9, 4, 6, 1, 2]))
    assert gang.new_pages() == [[3], []]


def test_a_sequence_that_runs_again_gets_a_whole_table() -> None:
    gang = Gang()
    gang.send(part(7, [5, 6]))
    gang.send(part(7, [5, 6, 8]), ended_runs=[7])  # preempted, and planned again at once
    assert gang.new_pages() == [[5, 6, 8]]
    gang.send(part(7, [6, 5, 8]))  # as long as before
    assert gang.new_pages() == [[6, 5, 8]]


def test_a_message_is_no_longer_for_long_contexts() -> None:
    """256 sequences of 32k tokens, whose tables take 2 MB, of which 16 get a page in the step."""
    num_bytes = {}
    for num_pages in (4, 2048):
        tables = [packed(range(num_pages * i, num_pages * (i + 1))) for i in range(256)]
        gang = Gang()
        gang.send(*[part(i, table, 20_000) for i, table in enumerate(tables)])
        tables[::16] = [table + packed([600_000]) for table in tables[::16]]
        gang.send(*[part(i, table, 20_000) for i, table in enumerate(tables)])
        num_bytes[num_pages] = gang.num_bytes
    assert num_bytes[4] == num_bytes[2048] < 32 << 10


def test_where_a_state_is_is_sent_if_it_is_elsewhere_than_before() -> None:
    gang, run = Gang(), SequencePlan(7, (7,), 3, packed([5]), None, SAMPLE)
    first, last = (StatePlan(packed(pages), packed(pages)) for pages in (range(100, 200), range(300, 400)))
    kept = StatePlan(first.source, first.target, (2,), packed(range(500, 600)))
    states = [first, first, kept, first, first, last, last, last, last]
    sent = list[bool]()
    for step, state in enumerate(states):
        ended_runs = [7] if step == 7 else []  # preempted, and planned again at once
        gang.send(msgspec.structs.replace(run, state=state), part(8, [6]), ended_runs=ended_runs)
        sent.append(gang.message.plan.sequences[0].state is not None)
        assert (gang.num_bytes > 800) == sent[-1]
    assert sent == [True, False, True, True, False, True, False, True, False]
    gang.send(ended_runs=(7, 8))
    assert not gang.leader.states


@pytest.mark.parametrize("missed", ["its first plan", "a page", "that it is gone"])
def test_a_worker_that_missed_a_message_computes_nothing(missed: str) -> None:
    leader, worker = DeltaEncoder(), DeltaDecoder()
    steps = [
        ("its first plan", part(1, [3, 4]), ()),
        ("a page", part(1, [3, 4, 5]), ()),
        ("that it is gone", part(1, [6, 7]), (1,)),
    ]
    for name, sequence, ended_runs in steps:
        message = leader.encode(StepPlan(1, (sequence,), (), (), ended_runs=ended_runs))
        if name == missed:
            break
        worker.decode(message)
    last = leader.encode(StepPlan(2, (part(1, [*unpacked(sequence.pages), 9]),), (), ()))
    num_kept = len(worker.tables.get(1, b"")) // INT32_BYTES
    with pytest.raises(PlanMismatchError, match=f"of sequence 1, and it keeps {num_kept}"):
        worker.decode(last)
