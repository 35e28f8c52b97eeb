"""A plan is made while the one before it is executed, and completed with that one's tokens."""

from __future__ import annotations

import msgspec
import pytest

from motet.tests.rigs.scheduler_rig import FeedingExecutor, Worker, WorkerExecutor, limits, request, scheduler
from motet.tests.rigs.stand_in_engine import INFO
from motet.workers.engine import Engine
from motet.workers.plan import PageCopy, StepPlan, StepResult


class Ahead:
    """An engine whose plans the test makes and executes."""

    def __init__(self) -> None:
        self.s, self.worker = scheduler(limits(8)), Worker(limits(8))
        self.engine = Engine(self.s, FeedingExecutor(self.worker), INFO)

    def settle(self, plan: StepPlan, result: StepResult) -> StepPlan | None:
        """The plan as it begins; None: it was dropped."""
        self.engine._settle(plan, result)
        return self.engine._ahead


def test_its_tokens_are_those_that_the_plan_before_chooses() -> None:
    ahead = Ahead()
    s, worker = ahead.s, ahead.worker
    s.add(request(1, num_prompt=3, max_tokens=4), 0)
    plan, following = s.schedule(), s.schedule()
    result = worker.execute(plan)
    token = result.tokens[1]
    assert token is not None
    settled = ahead.settle(following, result)
    assert settled is not None
    assert [(part.token_ids, part.start) for part in settled.sequences] == [((token.token_id,), 3)]
    s.commit(plan, result)
    assert ahead.engine.has_work()
    s.commit(settled, worker.execute(settled))
    s.check_integrity()


def test_nothing_is_left_of_it_when_all_its_sequences_end() -> None:
    ahead = Ahead()
    s = ahead.s
    s.add(request(1, num_prompt=3, max_tokens=9, stop_token_ids=(0,)), 0)  # the worker's first token is 0
    plan, following = s.schedule(), s.schedule()
    result = ahead.worker.execute(plan)
    assert ahead.settle(following, result) is None
    (update,) = s.commit(plan, result)
    assert update.finish_reason == "stop"
    s.check_integrity()
    assert not ahead.engine.has_work()
    assert not s._uncommitted


def test_what_ended_before_a_dropped_plan_is_in_the_one_that_follows() -> None:
    ahead = Ahead()
    s = ahead.s
    for sequence_id in (1, 2):
        s.add(request(sequence_id, stop_token_ids=(0,)), 0)
    plan = s.schedule()
    s.cancel(2)
    following = s.schedule()
    result = ahead.worker.execute(plan)
    assert ahead.settle(following, result) is None
    s.commit(plan, result)
    assert s.schedule().ended_runs == (2, 1)


def test_a_sequence_that_is_cancelled_meanwhile_drops_out_of_it() -> None:
    ahead = Ahead()
    s = ahead.s
    for sequence_id in (1, 2):
        s.add(request(sequence_id), 0)
    plan, following = s.schedule(), s.schedule()
    s.cancel(1)
    result = ahead.worker.execute(plan)
    settled = ahead.settle(following, result)
    assert settled is not None
    assert [part.sequence_id for part in settled.sequences] == [2]
    assert {update.sequence_id for update in s.commit(plan, result)} == {2}
    s.check_integrity()


def test_none_is_made_where_plans_do_not_overlap() -> None:
    s, worker = scheduler(limits(8)), Worker(limits(8))
    engine = Engine(s, WorkerExecutor(worker), INFO, overlaps=False)
    s.add(request(1), 0)
    engine.step()
    assert engine._ahead is None and not s._uncommitted


def test_a_plan_with_copies_is_never_dropped() -> None:
    """The copies hold their pages until the plan is committed."""
    s = scheduler(limits(8))
    plan = msgspec.structs.replace(s.schedule(), copies=(PageCopy(1, 2),))
    with pytest.raises(AssertionError):
        s.drop(plan)
    s.drop(msgspec.structs.replace(plan, copies=()))
    assert not s._uncommitted


class TimedExecutor(WorkerExecutor):
    """A step ends so long after it began, or at the next call, if that is later."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self.now = self.began_at = 0.0
        self.step_s = 1.0

    def finish(self) -> StepResult:
        self.now = max(self.now, self.began_at + self.step_s)
        self.began_at = self.now  # the plan that was made ahead begins at once
        return super().finish()


def test_it_is_made_as_late_as_it_can_be() -> None:
    """Who comes while it can still wait is in it. Where steps become shorter, it is made sooner."""
    s = scheduler(limits(200))
    executor = TimedExecutor(Worker(limits(200)))
    engine = Engine(s, executor, INFO, clock=lambda: executor.now)
    assert engine.spare_s() == 0  # nothing is executed
    s.add(request(1, num_prompt=3, max_tokens=60), 0)
    engine.step()
    assert engine.spare_s() == 0  # no tenant behind others has come
    s.latency_mode._since_step = 0

    def step() -> float:
        """How long the device had nothing to do."""
        executor.now += engine.spare_s()
        idle_s = max(0.0, executor.now - executor.began_at - executor.step_s)
        engine.step()
        return idle_s

    for _ in range(30):
        assert step() == 0
    early = engine.spare_s()
    for _ in range(10):
        assert step() == 0
    assert 0.2 < early < engine.spare_s() < 0.9
    executor.step_s = 0.1
    idle_s = [step() for _ in range(10)]
    assert sum(idle_s) < 1
    assert idle_s[-1] == 0
    assert engine.spare_s() < 0.1


class TimedFeeding(FeedingExecutor):
    """Each step takes a second, and begins when the one before it has ended."""

    now = 0.0

    def finish(self) -> StepResult:
        self.now += 1.0
        return super().finish()


def test_a_step_that_was_begun_behind_another_takes_only_its_own_time() -> None:
    """And it is begun before the one that it is fed by has ended."""
    s, worker = scheduler(limits(200)), Worker(limits(200))
    executor, seen = TimedFeeding(worker), list[float]()
    engine = Engine(s, executor, INFO, clock=lambda: executor.now)
    s.observe = lambda plan, seconds: seen.append(seconds)  # type: ignore[method-assign]
    s.add(request(1, num_prompt=3, max_tokens=6), 0)
    reported: list[int] = []
    while engine.has_work():
        reported += [token for update in engine.step() for token in update.token_ids]
        assert len(executor._begun) == (0 < len(reported) < 6)
    assert reported == [*range(6)]
    assert seen == [1.0] * 6
    assert worker.num_fed == 5
