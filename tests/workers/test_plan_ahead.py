"""A plan is made while the one before it is executed, and completed with that one's tokens."""

from __future__ import annotations

import msgspec
import pytest

from motet.tests.rigs.scheduler_rig import Worker, limits, request, scheduler
from motet.workers.plan import PageCopy
from motet.workers.plan_ahead import PlanAhead


def test_its_tokens_are_those_that_the_plan_before_chooses() -> None:
    s, worker = scheduler(limits(8)), Worker(limits(8))
    ahead = PlanAhead(s)
    s.add(request(1, num_prompt=3, max_tokens=4), 0)
    plan = s.schedule()
    ahead.make()
    assert ahead.has_plan
    result = worker.execute(plan)
    token = result.tokens[1]
    assert token is not None
    settled = ahead.settle(result)
    assert settled is not None
    assert [(part.token_ids, part.start) for part in settled.sequences] == [((token.token_id,), 3)]
    s.commit(plan, result)
    assert ahead.take() is settled
    assert ahead.take() is None
    assert not ahead.has_plan
    s.commit(settled, worker.execute(settled))
    s.check_integrity()


def test_nothing_is_left_of_it_when_all_its_sequences_end() -> None:
    s, worker = scheduler(limits(8)), Worker(limits(8))
    ahead = PlanAhead(s)
    s.add(request(1, num_prompt=3, max_tokens=9, stop_token_ids=(0,)), 0)  # the worker's first token is 0
    plan = s.schedule()
    ahead.make()
    result = worker.execute(plan)
    assert ahead.settle(result) is None
    assert ahead.take() is None
    (update,) = s.commit(plan, result)
    assert update.finish_reason == "stop"
    s.check_integrity()
    assert not s.has_work()
    assert not s._uncommitted


def test_a_sequence_that_is_cancelled_meanwhile_drops_out_of_it() -> None:
    s, worker = scheduler(limits(8)), Worker(limits(8))
    ahead = PlanAhead(s)
    for sequence_id in (1, 2):
        s.add(request(sequence_id), 0)
    plan = s.schedule()
    ahead.make()
    s.cancel(1)
    result = worker.execute(plan)
    settled = ahead.settle(result)
    assert settled is not None
    assert [part.sequence_id for part in settled.sequences] == [2]
    assert {update.sequence_id for update in s.commit(plan, result)} == {2}
    s.check_integrity()


def test_nothing_is_settled_where_nothing_was_made() -> None:
    s, worker = scheduler(limits(8)), Worker(limits(8))
    ahead = PlanAhead(s)
    s.add(request(1), 0)
    plan = s.schedule()
    result = worker.execute(plan)
    assert ahead.settle(result) is None
    assert ahead.take() is None
    s.commit(plan, result)


def test_a_plan_with_copies_is_never_dropped() -> None:
    """The copies hold their pages until the plan is committed."""
    s = scheduler(limits(8))
    plan = msgspec.structs.replace(s.schedule(), copies=(PageCopy(1, 2),))
    with pytest.raises(AssertionError):
        s.drop(plan)
    s.drop(msgspec.structs.replace(plan, copies=()))
    assert not s._uncommitted
