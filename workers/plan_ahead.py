"""The plan that follows the running one, so that workers need not wait for the leader between two steps."""

from __future__ import annotations

from .plan import StepPlan, StepResult
from .scheduling.scheduler import Scheduler


class PlanAhead:
    """One plan at most: made while the plan before it is executed, settled with that one's result, and taken.

    When it is made, the tokens of the plan before it are not known, nor which sequences they end. The idea is
    NanoFlow's (arXiv 2408.12757).
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._plan: StepPlan | None = None

    @property
    def has_plan(self) -> bool:
        return self._plan is not None

    def make(self) -> None:
        assert self._plan is None
        self._plan = self._scheduler.schedule()

    def settle(self, result: StepResult | None) -> StepPlan | None:
        """Completes the plan with the result of the one before it, which is committed afterwards.

        None: there is no result yet, and the device feeds its tokens to the plan. Returns the plan to execute now;
        None: none was made, or it is empty.
        """
        if self._plan is not None:
            plan = self._scheduler.settle(self._plan, result)
            has_anything = bool(plan.sequences or plan.loads or plan.moves or plan.copies or plan.full_copies)
            if not has_anything:
                self._scheduler.drop(plan)
            self._plan = plan if has_anything else None
        return self._plan

    def take(self) -> StepPlan | None:
        """The plan, which is settled and being executed; None: there is none."""
        plan, self._plan = self._plan, None
        return plan
