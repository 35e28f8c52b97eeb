"""What executes a gang's plans: one worker in the leader's process, or several in their own (`gang_executor.py`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from ..scheduling.plan import StepPlan, StepResult
from .adapter_loader import AdapterLoader
from .runner import Runner


class WorkerLostError(Exception):
    """A worker of the gang died, failed or gave no result in time; the message says which."""


class Executor(Protocol):
    """Carries a plan to every worker of the gang and brings the result back."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Raises WorkerLostError when a worker has died or hangs: nothing more can be executed."""

    def on_load_end(self, wake: Callable[[], None]) -> None:
        """`wake` is called, from another thread, whenever an adapter has come or failed, or a worker was lost."""

    def close(self) -> None: ...


class LocalExecutor:
    """A gang of one worker, in this process."""

    def __init__(self, runner: Runner, loader: AdapterLoader, kernels_name: str, device: torch.device) -> None:
        self.runner = runner
        self.loader = loader
        self.kernels_name = kernels_name
        self.device = device

    def execute(self, plan: StepPlan) -> StepResult:
        """Starts the plan's loads, computes its tokens, and tells which loads have ended."""
        for load in plan.loads:
            self.loader.begin(load)
        tokens = self.runner.run(plan)
        loaded, failed = self.loader.take_ended()
        return StepResult(plan.step, tokens, loaded, failed)

    def on_load_end(self, wake: Callable[[], None]) -> None:
        self.loader.on_end = wake

    def close(self) -> None:
        self.loader.close()
