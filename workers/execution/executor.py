"""What executes a gang's plans: today one worker in the leader's process."""

from __future__ import annotations

from typing import Protocol

from ..scheduling.plan import StepPlan, StepResult
from .adapter_loader import AdapterLoader
from .runner import Runner


class Executor(Protocol):
    """Carries a plan to every worker of the gang and brings the result back."""

    def execute(self, plan: StepPlan) -> StepResult: ...

    def close(self) -> None: ...


class LocalExecutor:
    """A gang of one worker, in this process."""

    def __init__(self, runner: Runner, loader: AdapterLoader) -> None:
        self.runner = runner
        self.loader = loader

    def execute(self, plan: StepPlan) -> StepResult:
        """Starts the plan's loads, computes its tokens, and tells which loads have ended."""
        for load in plan.loads:
            self.loader.begin(load)
        tokens = self.runner.run(plan)
        loaded, failed = self.loader.take_ended()
        return StepResult(plan.step, tokens, loaded, failed)

    def close(self) -> None:
        self.loader.close()
