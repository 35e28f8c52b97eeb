"""The engine's thread: nothing submitted is left without an answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.tests.rigs.engine_loads import engine_load
from motet.tests.rigs.patience import PATIENCE_S, eventually
from motet.workers import loop as loop_module
from motet.workers.engine_messages import EngineMessage, GiveUpWaiting, PinChanges, TokenInterval
from motet.workers.leader.served_engine import StepReport
from motet.workers.loop import EngineLoop, StepDeadline
from motet.workers.wire.engine_load import EngineLoad, ServedElsewhere, TenantShare
from motet.workers.wire.messages import (
    Cancel,
    Outdated,
    ResidencyChange,
    SamplingParams,
    SequenceError,
    SequenceRequest,
    SequenceUpdate,
    Submit,
)


class CountingEngine:
    """Gives each sequence one token in each of three steps; a test can make it wait for a load, or fail."""

    def __init__(self) -> None:
        self.left: dict[int, int] = {}
        self.others: list[EngineMessage] = []  # messages that neither submit nor cancel
        self.waits = False
        self.fails = False
        self.hangs_until: threading.Event | None = None
        self.num_steps = 0
        self.meanwhile: Callable[[], None] = lambda: None  # while the next plan can wait
        self.wake: Callable[[], None] = lambda: None
        self.stepped = threading.Event()

    def wake_on_copy_end(self, wake: Callable[[], None]) -> None:
        self.wake = wake

    def receive(self, message: EngineMessage) -> None:
        match message:
            case Submit(request):
                self.left[request.sequence_id] = 3
            case Cancel(sequence_id):
                self.left.pop(sequence_id, None)
            case _:
                self.others.append(message)
                self.stepped.set()

    def take_shares(self, most: int) -> list[TenantShare]:
        return [TenantShare("acme", 1.0, 1, 0, 0)][:most]

    def has_work(self) -> bool:
        return bool(self.left)

    def spare_s(self) -> float:
        self.meanwhile()
        return 0.001

    def load(self) -> EngineLoad:
        return engine_load(num_steps=self.num_steps)

    def take_residency_changes(self) -> ResidencyChange:
        return ResidencyChange([f"came at {self.num_steps}"])

    def step(self) -> list[SequenceUpdate]:
        self.num_steps += 1
        self.stepped.set()
        if self.hangs_until is not None:
            assert self.hangs_until.wait(PATIENCE_S)
        if self.fails:
            raise RuntimeError("boom")
        if self.waits:
            return []
        self.left = {i: n - 1 for i, n in self.left.items()}
        updates = [SequenceUpdate(i, [n], finish_reason=None if n else "length") for i, n in self.left.items()]
        self.left = {i: n for i, n in self.left.items() if n}
        return updates

    def close(self) -> None:
        pass


class Listener:
    def __init__(self) -> None:
        self.updates: list[SequenceUpdate] = []
        self.came: list[str] = []
        self.shares: list[TenantShare] = []
        self.busy_s = 0.0
        self.has_fallen = False  # a counter has, which never may
        self.outputs = threading.Condition()

    def __call__(self, report: StepReport) -> None:
        with self.outputs:
            self.updates += report.updates
            self.came += report.residency.came
            self.shares += report.shares
            self.has_fallen |= report.load.counters.busy_s < self.busy_s
            self.busy_s = report.load.counters.busy_s
            self.outputs.notify_all()

    def wait_for(self, sequence_id: int) -> SequenceUpdate:
        def ended() -> list[SequenceUpdate]:
            return [u for u in self.updates if u.sequence_id == sequence_id and (u.finish_reason or u.error)]

        with self.outputs:
            assert self.outputs.wait_for(ended, timeout=PATIENCE_S)
            return ended()[0]


def request(sequence_id: int) -> SequenceRequest:
    return SequenceRequest(sequence_id=sequence_id, prompt_token_ids=[1], sampling=SamplingParams(), tenant="t")


def started() -> tuple[CountingEngine, EngineLoop, Listener]:
    engine, listener = CountingEngine(), Listener()
    loop = EngineLoop(engine, PATIENCE_S)  # type: ignore[arg-type]
    loop.start(listener)
    return engine, loop, listener


def test_sequences_are_answered_and_an_idle_loop_sleeps() -> None:
    engine, loop, listener = started()
    loop.receive(Submit(request(1)))
    loop.receive(Submit(request(2)))
    assert listener.wait_for(1).finish_reason == "length"
    assert listener.wait_for(2).finish_reason == "length"
    assert listener.came == [f"came at {step + 1}" for step in range(engine.num_steps)]
    num_steps = engine.num_steps
    engine.stepped.clear()
    assert not engine.stepped.wait(0.2)
    assert engine.num_steps == num_steps
    assert loop.alive
    loop.stop()
    assert not loop.alive
    assert not listener.has_fallen


def test_who_comes_while_the_next_plan_can_wait_is_in_it() -> None:
    engine, loop, listener = started()
    late = [request(2)]
    engine.meanwhile = lambda: loop.receive(Submit(late.pop())) if late else None
    loop.receive(Submit(request(1)))
    listener.wait_for(1)
    listener.wait_for(2)
    assert engine.num_steps == 3  # each has a token in each of them
    loop.stop()


def test_a_waiting_engine_is_stepped_when_a_load_ends() -> None:
    engine, loop, listener = started()
    engine.waits = True
    loop.receive(Submit(request(1)))
    assert engine.stepped.wait(PATIENCE_S)
    engine.stepped.clear()
    assert not engine.stepped.wait(0.2)
    engine.waits = False
    engine.wake()
    assert listener.wait_for(1).finish_reason == "length"
    loop.stop()


def test_a_cancelled_sequence_is_forgotten() -> None:
    engine, loop, listener = started()
    engine.waits = True
    loop.receive(Submit(request(1)))
    assert engine.stepped.wait(PATIENCE_S)
    engine.waits = False
    loop.receive(Cancel(1))
    loop.receive(Submit(request(2)))
    listener.wait_for(2)
    assert {update.sequence_id for update in listener.updates} == {2}
    loop.stop()


def test_the_engine_gets_between_steps_which_have_waited_too_long() -> None:
    engine, loop, listener = started()
    message = GiveUpWaiting(7, SequenceError("overloaded", "waited"))
    loop.receive(message)
    loop.receive(Submit(request(2)))
    listener.wait_for(2)
    assert engine.others == [message]
    loop.stop()


def test_a_failing_engine_fails_its_sequences_and_counts_as_dead() -> None:
    engine, loop, listener = started()
    loop.receive(Submit(request(6)))
    listener.wait_for(6)
    engine.fails = True
    loop.receive(Submit(request(7)))
    error = listener.wait_for(7).error
    assert error is not None
    assert error.kind == "gang_lost"  # routers continue its sequences elsewhere
    assert "boom" in error.message
    assert not loop.alive
    loop.receive(Submit(request(8)))
    assert listener.wait_for(8).error == error
    loop.stop()
    assert listener.busy_s > 0
    assert not listener.has_fallen


def test_an_engine_that_hangs_counts_as_dead_long_before_the_longest_step_that_may_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loop_module, "LEAST_S", 0.5)
    monkeypatch.setattr(loop_module, "FACTOR", 0.0)  # steps of this busy machine may be long
    engine, loop, listener = started()
    loop.receive(Submit(request(1)))
    listener.wait_for(1)
    eventually(lambda: loop.alive)  # not while the end of its step waits for the machine
    engine.hangs_until = threading.Event()
    loop.receive(Submit(request(2)))
    eventually(lambda: not loop.alive)
    engine.hangs_until.set()
    listener.wait_for(2)
    loop.stop()


@given(st.lists(st.floats(0, 1000), min_size=1))
def test_a_deadline_is_above_what_steps_took(steps_s: list[float]) -> None:
    deadline = StepDeadline(120.0)
    assert deadline.seconds == 120.0
    for step_s in steps_s:
        deadline.observe(step_s)
        assert loop_module.LEAST_S <= deadline.seconds <= 120.0
    assert deadline.seconds == 120.0 or deadline.seconds >= loop_module.FACTOR * max(steps_s)


def test_shares_are_reported_a_few_times_a_second() -> None:
    began_at = time.monotonic()
    engine, loop, listener = started()
    for number in range(10):
        loop.receive(Submit(request(number)))
        listener.wait_for(number)
    assert engine.num_steps >= 30
    assert {*listener.shares} == {TenantShare("acme", 1.0, 1, 0, 0)}
    assert len(listener.shares) <= 1 + 4 * (time.monotonic() - began_at)
    loop.stop()


def test_other_messages_reach_the_engine_in_its_thread_in_order() -> None:
    engine, loop, _ = started()
    messages: list[EngineMessage] = [
        ServedElsewhere([("acme", 3.0)]),
        TokenInterval("auto"),
        PinChanges({"a": True}),
        Outdated("b"),
    ]
    for message in messages:
        loop.receive(message)
    eventually(lambda: engine.others == messages)
    loop.stop()
