"""The engine of a gang: schedule → execute → commit, and the next plan is made while one is executed."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable

from .engine_messages import End, EngineMessage, GiveUpWaiting, PinChanges, TokenInterval
from .execution.executor import Executor
from .fairness.prompt_budget import token_interval_of
from .plan import StepPlan, StepResult
from .plan_ahead import PlanAhead
from .scheduling.scheduler import Scheduler
from .wire.engine_load import EngineLoad
from .wire.fair_shares import ServedElsewhere, TenantShare
from .wire.messages import (
    CANCELLED,
    Cancel,
    GangInfo,
    Outdated,
    ResidencyChange,
    SequenceError,
    SequenceRequest,
    SequenceUpdate,
    Submit,
)
from .wire.sequence_usage import SequenceUsage

_LATE = 0.1  # of what a step was expected to take: a plan after it should be made by so long before its end
_LEAST_SPARE, _MOST_SPARE, _MORE_SPARE = 0.05, 0.85, 0.01  # of what a step was expected to take


class Engine:
    """Grows sequences step by step. Used from one thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        info: GangInfo,
        overlaps: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`overlaps`: the next plan is made while a step runs."""
        self._scheduler, self.executor, self.info, self._clock = scheduler, executor, info, clock
        self._overlaps = overlaps
        self._ahead = PlanAhead(scheduler)
        self._began_at = 0.0  # the plan that is executed
        self._expected_s: deque[float] = deque()  # that it takes, and the one that was begun behind it
        self._spare = _LEAST_SPARE  # part of a step's time in which the next plan need not be made yet
        self._ended: list[SequenceUpdate] = []  # last updates of sequences that ended between two steps
        self._is_stalled = False

    def receive(self, message: EngineMessage) -> None:
        """Hands a message to its owner. Updates that follow from it come with the next step."""
        match message:
            case Submit(request):
                self._submit(request)
            case Cancel(sequence_id):
                self._end(sequence_id, self._scheduler.cancel(sequence_id), CANCELLED)
            case End(sequence_id, error):
                self._end(sequence_id, self._scheduler.cancel(sequence_id), error)
            case GiveUpWaiting(sequence_id, error):
                self._end(sequence_id, self._scheduler.cancel_waiting(sequence_id), error)
            case Outdated(digest):
                self._scheduler.memory.outdate(digest)
                self._scheduler.host_news.outdate(digest)
            case PinChanges(changes):
                self._scheduler.host_news.pin(changes)
            case ServedElsewhere(totals):
                self._scheduler.standings.charge_elsewhere(totals)
            case TokenInterval(setting):
                self._scheduler.token_interval_s = token_interval_of(setting, self.info.device)

    def _submit(self, request: SequenceRequest) -> None:
        """Queues a sequence. One that can never be served gets an update with an error at the next step."""
        seed = secrets.randbits(63) if request.sampling.seed is None else request.sampling.seed
        error = self._scheduler.add(request, seed)
        if error is not None:
            self._ended.append(SequenceUpdate(request.sequence_id, error=error, usage=request.usage))

    def _end(self, sequence_id: int, usage: SequenceUsage | None, error: SequenceError) -> None:
        """Reports the end of a sequence with the next step, unless it was unknown."""
        if usage is not None:
            self._ended.append(SequenceUpdate(sequence_id, error=error, usage=usage))

    def take_shares(self, most: int) -> list[TenantShare]:
        """Of at most so many tenants whose share has changed since it was last taken."""
        return self._scheduler.take_shares(most)

    def has_work(self) -> bool:
        return bool(self._ended) or self._ahead.has_plan or self._scheduler.has_work()

    def spare_s(self) -> float:
        """For how long the next plan can still wait: who comes meanwhile is in it, and else comes a whole step later.

        What is executed is busy for longer than this, as far as steps go on to take what such steps took. Nothing waits
        unless somebody came lately who is clearly behind others: a busy CPU wakes a thread late, which costs a little.
        """
        if not self._ahead.has_plan or not self._scheduler.pressure.is_on:
            return 0.0
        return max(0.0, self._began_at + self._spare * self._expected_s[0] - self._clock())

    def step(self) -> list[SequenceUpdate]:
        """One iteration: schedule → execute → commit. Returns what each sequence's owner should hear of it.

        The plan that follows is made while this step's plan is executed, and its execution begins before this step is
        committed. So what the last step made ahead is executed already, and there is nothing to schedule. Where tokens
        are fed on the device, execution begins before they are known, so that the device need not wait for anybody.
        """
        ended, self._ended = self._ended, []
        plan_made_ahead = self._ahead.take()
        plan = plan_made_ahead or self._begin(self._scheduler.schedule())
        if self._overlaps and plan.sequences:
            self._ahead.make()
        feeds = self.executor.feeds_tokens
        if feeds and (following := self._ahead.settle(None)) is not None:
            self._begin(following)
        result = self._finish(plan)
        if not feeds and (following := self._ahead.settle(result)) is not None:
            self._begin(following)
        # A plan made ahead knew nothing of what the step before it left behind: another one may find more to do.
        has_news = bool(plan.sequences or result.loaded or result.failed or result.moved)
        self._is_stalled = plan_made_ahead is None and not has_news
        return ended + self._scheduler.commit(plan, result)

    def _begin(self, plan: StepPlan) -> StepPlan:
        if not self._expected_s:  # else it waits for the one that is executed
            self._began_at = self._clock()
        self._expected_s.append(self._scheduler.expected_s(plan))
        self.executor.begin(plan)
        return plan

    def _finish(self, plan: StepPlan) -> StepResult:
        planned_at, expected_s = self._clock(), self._expected_s.popleft()
        result = self.executor.finish()
        now = self._clock()
        left_s = now - planned_at
        if left_s < _LATE * expected_s:  # the device had to wait for the plan that follows, or nearly so
            self._spare = max(_LEAST_SPARE, self._spare * (0.9 if left_s > 0.1 * _LATE * expected_s else 0.5))
        else:
            self._spare = min(_MOST_SPARE, self._spare + _MORE_SPARE)
        self._scheduler.observe(plan, now - self._began_at)
        self._began_at = now  # of the plan that was begun meanwhile
        return result

    @property
    def waits(self) -> bool:
        """The last step found nothing to compute: its sequences wait for adapters or pages that are still coming."""
        return self._is_stalled

    def wake_on_copy_end(self, wake: Callable[[], None]) -> None:
        """From now on `wake` is called, from another thread, whenever a copy has ended or failed."""
        self.executor.wake_on_copy_end(wake)

    def load(self) -> EngineLoad:
        return self._scheduler.load()

    def take_residency_changes(self) -> ResidencyChange:
        """Adapters that came into the pool, or began to, and those that went since the last call."""
        return self._scheduler.take_residency_changes()

    def check_integrity(self) -> None:
        """Raises AssertionError if a page leaked or its holders are miscounted."""
        self._scheduler.check_integrity()

    def close(self) -> None:
        self.executor.close()
