"""The engine of a gang: schedule → execute → commit, and the next plan is made while one is executed."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

from .execution.executor import Executor
from .plan import StepPlan
from .scheduling.scheduler import Scheduler
from .wire.engine_load import EngineLoad
from .wire.messages import GangInfo, ResidencyChange, SequenceError, SequenceRequest, SequenceUpdate


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
        self._under_way: StepPlan | None = None  # begun, and not yet finished
        self._began_at = 0.0
        self._refused: list[SequenceUpdate] = []
        self._got_on = True

    def submit(self, request: SequenceRequest) -> None:
        """Queues a sequence. One that can never be served gets an update with an error at the next step."""
        seed = secrets.randbits(63) if request.sampling.seed is None else request.sampling.seed
        error = self._scheduler.add(request, seed)
        if error is not None:
            self._refused.append(SequenceUpdate(request.sequence_id, error=error))

    def cancel(self, sequence_id: int) -> None:
        """Forgets a sequence; no update follows. Unknown ids are ignored."""
        self._scheduler.cancel(sequence_id)
        self._refused = [update for update in self._refused if update.sequence_id != sequence_id]

    def give_up_waiting(self, sequence_id: int, error: SequenceError) -> None:
        """Forgets a sequence if it waits; its owner hears of the error at the next step. One that runs goes on."""
        if self._scheduler.forget_waiting(sequence_id):
            self._refused.append(SequenceUpdate(sequence_id, error=error))

    def has_work(self) -> bool:
        return bool(self._refused) or self._under_way is not None or self._scheduler.has_work()

    def step(self) -> list[SequenceUpdate]:
        """One iteration; what each sequence's owner should hear of it.

        The plan that follows is made while this one runs, so it is not known yet which tokens come and whether they end
        their sequences: it is settled when they are there, and begins before anything else is done with them.
        """
        refused, self._refused = self._refused, []
        plan, self._under_way = self._under_way, None
        is_early = plan is not None  # made while the one before it ran: what that one left behind may do more
        if plan is None:
            plan = self._begin(self._scheduler.schedule())
        following = self._scheduler.schedule() if self._overlaps and plan.sequences else None  # while the plan runs
        result = self.executor.finish()
        self._scheduler.observe(plan, self._clock() - self._began_at)
        if following is not None:
            following = self._scheduler.settle(following, result)
            if following.sequences or following.loads or following.moves:
                self._under_way = self._begin(following)
            else:
                self._scheduler.drop(following)
        self._got_on = is_early or bool(plan.sequences or result.loaded or result.failed or result.moved)
        return refused + self._scheduler.commit(plan, result)

    def _begin(self, plan: StepPlan) -> StepPlan:
        self._began_at = self._clock()
        self.executor.begin(plan)
        return plan

    @property
    def waits(self) -> bool:
        """The last step found nothing to compute: its sequences wait for adapters or pages that are still coming."""
        return not self._got_on and self._under_way is None

    def on_load_end(self, wake: Callable[[], None]) -> None:
        """`wake` is called, from another thread, whenever a copy that a step may wait for has ended or failed."""
        self.executor.on_load_end(wake)

    def load(self) -> EngineLoad:
        return self._scheduler.load()

    def take_residency_changes(self) -> ResidencyChange:
        """Adapters that came into the pool, or began to, and those that went since the last call."""
        return self._scheduler.take_residency_changes()

    def check_integrity(self) -> None:
        """Raises AssertionError if a page leaked or is in two hands."""
        self._scheduler.check_integrity()

    def close(self) -> None:
        self.executor.close()
