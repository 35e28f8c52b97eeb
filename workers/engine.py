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
from .scheduling.scheduler import Scheduler
from .wire.engine_load import EngineLoad, ServedElsewhere, TenantShare
from .wire.messages import (
    CANCELLED,
    Cancel,
    GangInfo,
    Outdated,
    ResidencyChange,
    SequenceError,
    SequenceUpdate,
    SequenceUsage,
    Submit,
)

# How late in a step the next plan can be made, learnt from how steps went.

_LATE = 0.1  # a plan should be ready this part of the expected time before the running step ends
_LEAST_SPARE, _MOST_SPARE, _MORE_SPARE = 0.05, 0.85, 0.01  # parts of the expected time


class StepPacing:
    """Times steps, of which the next one may begin while one runs."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began_at = self._planned_at = 0.0  # the running step; the plan after it
        self._expected_s: deque[float] = deque()  # of the running step, and of the one begun after it
        self._spare = _LEAST_SPARE  # part of a step's expected time for which the next plan can wait

    def begin(self, expected_s: float) -> None:
        """A step begins; its execution waits for the running one, if there is one."""
        if not self._expected_s:
            self._began_at = self._clock()
        self._expected_s.append(expected_s)

    @property
    def spare_s(self) -> float:
        """For how long the next plan can still wait, as far as the running step takes what such steps took."""
        return max(0.0, self._began_at + self._spare * self._expected_s[0] - self._clock())

    def planned(self) -> None:
        """The plan after the running step is made: nothing is left to do but to wait for the step."""
        self._planned_at = self._clock()

    def end(self) -> float:
        """The running step has ended: the seconds that it took. The step begun after it now runs."""
        now, expected_s = self._clock(), self._expected_s.popleft()
        left_s = now - self._planned_at
        if left_s < _LATE * expected_s:  # the device had to wait for the next plan, or nearly so
            self._spare = max(_LEAST_SPARE, self._spare * (0.9 if left_s > 0.1 * _LATE * expected_s else 0.5))
        else:
            self._spare = min(_MOST_SPARE, self._spare + _MORE_SPARE)
        took_s, self._began_at = now - self._began_at, now
        return took_s


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
        # The plan that follows the running one, so that workers need not wait for the leader between two steps. It is
        # made while that one is executed (NanoFlow's idea, arXiv 2408.12757), when neither its tokens are known,
        # nor which sequences they end.
        self._ahead: StepPlan | None = None
        self._pacing = StepPacing(clock)
        self._ended: list[SequenceUpdate] = []  # last updates of sequences that ended between two steps
        self.waits = False  # the last step found nothing to compute: its sequences wait for copies under way

    def receive(self, message: EngineMessage) -> None:
        """Passes a message to its owner. The next step returns the updates that follow from it."""
        match message:
            case Submit(request):  # one that can never be served gets an update with an error at the next step
                seed = secrets.randbits(63) if request.sampling.seed is None else request.sampling.seed
                error = self._scheduler.add(request, seed)
                if error is not None:
                    self._ended.append(SequenceUpdate(request.sequence_id, error=error, usage=request.usage))
            case Cancel(sequence_id):
                self._end(sequence_id, self._scheduler.cancel(sequence_id), CANCELLED)
            case End(sequence_id, error):
                self._end(sequence_id, self._scheduler.cancel(sequence_id), error)
            case GiveUpWaiting(sequence_id, error):
                self._end(sequence_id, self._scheduler.cancel_waiting(sequence_id), error)
            case Outdated(digest):
                self._scheduler.memory.outdate(digest)
            case PinChanges(changes):
                self._scheduler.memory.pin(changes)
            case ServedElsewhere(totals):
                self._scheduler.counters.charge_elsewhere(totals)
            case TokenInterval(setting):
                self._scheduler.token_interval_s = token_interval_of(setting, self.info.device)

    def _end(self, sequence_id: int, usage: SequenceUsage | None, error: SequenceError) -> None:
        """Reports the end of a sequence with the next step, unless it was unknown."""
        if usage is not None:
            self._ended.append(SequenceUpdate(sequence_id, error=error, usage=usage))

    def take_shares(self, max_tenants: int) -> list[TenantShare]:
        """Shares of at most `max_tenants` tenants that have changed since they were last taken."""
        return self._scheduler.take_shares(max_tenants)

    def has_work(self) -> bool:
        return bool(self._ended or self._ahead) or self._scheduler.has_work()

    def spare_s(self) -> float:
        """For how long the next plan can still wait, so that requests that arrive meanwhile are in it.

        0 unless the scheduler is in latency mode: a busy CPU wakes a thread late, which costs a little.
        """
        return self._pacing.spare_s if self._ahead and self._scheduler.latency_mode.is_on else 0.0

    def step(self) -> list[SequenceUpdate]:
        """One iteration: schedule → execute → commit. Returns the updates for the sequences' owners.

        The next plan is made while this step's plan is executed, and begins before this step is committed. So a plan
        made ahead is being executed already, and there is nothing to schedule. If the device feeds tokens to the next
        step, that begins before the tokens are known, so the device never waits for the host.
        """
        ended, self._ended = self._ended, []
        if self._scheduler.num_constrained:
            ended += self._scheduler.take_grammars()
        plan_made_ahead, self._ahead = self._ahead, None
        plan = plan_made_ahead or self._begin(self._scheduler.schedule())
        if self._overlaps and plan.sequences:
            self._ahead = self._scheduler.schedule()
        feeds = self.executor.feeds_tokens
        if feeds and self._ahead is not None:
            self._settle(self._ahead, None)
        result = self._finish(plan)
        if not feeds and self._ahead is not None:
            self._settle(self._ahead, result)
        # A plan made ahead could not use what the step before it freed: another plan may find more to do.
        found_something = bool(plan.sequences or result.loaded or result.failed or result.moved)
        self.waits = plan_made_ahead is None and not found_something and not self._scheduler.is_clearing
        return ended + self._scheduler.commit(plan, result)

    def _settle(self, plan: StepPlan, result: StepResult | None) -> None:
        """Completes and begins the plan that was made ahead, or drops it if it is empty.

        `result`: of the plan before it, which is committed afterwards. None: there is none yet, and the device feeds
        the tokens to this one.
        """
        plan = self._scheduler.settle(plan, result)
        if plan.sequences or plan.loads or plan.moves or plan.copies or plan.full_copies:
            self._ahead = self._begin(plan)
        else:
            self._scheduler.drop(plan)
            self._ahead = None

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
