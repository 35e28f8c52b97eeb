"""A gang of one worker on a GPU, in this process: a step is launched while the one before it runs."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from ..copies.adapter_loader import AdapterLoader
from ..copies.page_mover import PageMover
from ..plan import StepPlan, StepResult
from .begun_step import BegunStep
from .executor import LocalExecutor
from .runner import Runner, StepOutput


class FeedingExecutor(LocalExecutor):
    """The device gets each step before it has finished the one before, so it never waits for the host."""

    feeds_tokens = True

    def __init__(
        self,
        runner: Runner,
        loader: AdapterLoader,
        mover: PageMover,
        kernels_name: str,
        num_threads: int,
        device: torch.device,
        thread: ThreadPoolExecutor | None = None,
    ) -> None:
        """See `LocalExecutor`. `runner`: one that keeps tables."""
        super().__init__(runner, loader, mover, kernels_name, num_threads, device, thread)
        self._begun: deque[tuple[StepPlan, Future[BegunStep]]] = deque()
        self._last = BegunStep()  # the compute thread's

    def begin(self, plan: StepPlan) -> None:
        self._begun.append((plan, self._thread.submit(self._launch, plan)))

    def finish(self) -> StepResult:
        """Raises what the launch or the computation raised."""
        plan, launched = self._begun.popleft()
        return self._thread.submit(self._await, plan, launched).result()

    def _launch(self, plan: StepPlan) -> BegunStep:
        self.begin_copies(plan)
        self._last = self.runner.begin(plan, self._last)
        return self._last

    @torch.inference_mode()  # as at the launch: tokens that are drawn again are written into its tensor
    def _await(self, plan: StepPlan, launched: Future[BegunStep]) -> StepResult:
        step = launched.result()
        return self._result_of(plan, StepOutput(step.tokens, step.scores, step.pooled))
