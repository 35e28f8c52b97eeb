"""The engine of a gang: schedule → execute → commit, and the next plan is made while one is executed."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

from .engine_messages import End, EngineMessage, GiveUpWaiting, PinChanges, TokenInterval
from .execution.executor import Executor
from .fairness.prompt_budget import token_interval_of
from .plan import StepPlan, StepResult
from .plan_ahead import PlanAhead
from .scheduling.scheduler import Scheduler
from .step_pacing import StepPacing
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
        self._scheduler, self.executor, self.info = scheduler, executor, info
        self._overlaps = overlaps
        self._ahead = PlanAhead(scheduler)
        self._pacing = StepPacing(clock)
        self._ended: list[SequenceUpdate] = []  # last updates of sequences that ended between two steps
        self.waits = False  # the last step found nothing to compute: its sequences wait for copies under way

    def receive(self, message: EngineMessage) -> None:
        """Passes a message to its owner. The next step returns the updates that follow from it."""
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
                self._scheduler.host_updates.outdate(digest)
            case PinChanges(changes):
                self._scheduler.host_updates.pin(changes)
            case ServedElsewhere(totals):
                self._scheduler.counters.charge_elsewhere(totals)
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
        """Shares of at most `most` tenants that have changed since they were last taken."""
        return self._scheduler.take_shares(most)

    def has_work(self) -> bool:
        return bool(self._ended) or self._ahead.has_plan or self._scheduler.has_work()

    def spare_s(self) -> float:
        """For how long the next plan can still wait, so that requests that arrive meanwhile are in it.

        0 unless the scheduler is in latency mode: a busy CPU wakes a thread late, which costs a little.
        """
        return self._pacing.spare_s if self._ahead.has_plan and self._scheduler.latency_mode.is_on else 0.0

    def step(self) -> list[SequenceUpdate]:
        """One iteration: schedule → execute → commit. Returns the updates for the sequences' owners.

        The next plan is made while this step's plan is executed, and begins before this step is committed. So a plan
        made ahead is being executed already, and there is nothing to schedule. If the device feeds tokens to the next
        step, that begins before the tokens are known, so the device never waits for the host.
        """
        ended, self._ended = [*self._ended, *self._scheduler.take_grammars()], []
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
        # A plan made ahead could not use what the step before it freed: another plan may find more to do.
        found_something = bool(plan.sequences or result.loaded or result.failed or result.moved)
        self.waits = plan_made_ahead is None and not found_something and not self._scheduler.is_clearing
        return ended + self._scheduler.commit(plan, result)

    def _begin(self, plan: StepPlan) -> StepPlan:
        self._pacing.begin(self._scheduler.expected_s(plan))
        self.executor.begin(plan)
        return plan

    def _finish(self, plan: StepPlan) -> StepResult:
        self._pacing.planned()
        result = self.executor.finish()
        self._scheduler.observe(plan, self._pacing.end())
        return result

    def wake_on_copy_end(self, wake: Callable[[], None]) -> None:
        """Sets `wake`, called from another thread when a copy has ended or failed, or a grammar or mask is there."""
        self.executor.wake_on_copy_end(wake)
        self._scheduler.wake_on_grammars(wake)

    def load(self) -> EngineLoad:
        return self._scheduler.load()

    def take_residency_changes(self) -> ResidencyChange:
        """Adapters and pages that entered or left the pool since the last call."""
        return self._scheduler.take_residency_changes()

    def check_integrity(self) -> None:
        """Raises AssertionError if a page leaked or its holders are miscounted."""
        self._scheduler.check_integrity()

    def close(self) -> None:
        self._scheduler.close()
        self.executor.close()
