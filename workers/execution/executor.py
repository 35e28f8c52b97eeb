"""What executes a gang's plans: one worker in the leader's process, or several in their own (`gang_executor.py`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch

from ..memory.adapter_loader import AdapterLoader
from ..memory.page_mover import PageMover
from ..plan import StepPlan, StepResult
from .begun_step import BegunStep
from .runner import Runner, StepOutput


class WorkerLostError(Exception):
    """A worker of the gang died, failed or gave no result in time; the message says which."""


class Executor(Protocol):
    """Carries a plan to every worker of the gang and brings the result back."""

    feeds_tokens: bool  # a plan may begin while the one before it runs, whose tokens the device feeds to it

    def begin(self, plan: StepPlan) -> None:
        """Starts a plan. The one before it must be finished; where tokens are fed, the one before that.

        Raises WorkerLostError as `finish` does.
        """

    def finish(self) -> StepResult:
        """Waits for the oldest plan that was begun, and returns its result.

        Raises WorkerLostError if a worker died or hangs.
        """

    def wake_on_copy_end(self, wake: Callable[[], None]) -> None:
        """Sets `wake`, which is called from another thread when a copy has ended or failed, or a worker was lost."""

    def close(self) -> None: ...


def compute_thread() -> ThreadPoolExecutor:
    """The one thread in which a worker is built and computes.

    OpenMP, which torch uses, keeps helper threads for each thread that ever used it. Once there are more helpers than
    cores, all of them sleep between parallel regions instead of spinning.
    """
    return ThreadPoolExecutor(1, thread_name_prefix="worker")


class LocalExecutor:
    """A gang of one worker, in this process."""

    feeds_tokens = False

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
        """`thread`: the `compute_thread` in which this worker is being built; None: a new one."""
        self.runner = runner
        self.loader = loader
        self.mover = mover
        self.kernels_name, self.num_threads = kernels_name, num_threads
        self.device = device
        self._thread = thread or compute_thread()
        self._result: Future[StepResult] | None = None

    def begin(self, plan: StepPlan) -> None:
        assert self._result is None
        self._result = self._thread.submit(self._execute, plan)

    def finish(self) -> StepResult:
        """Raises what the computation raised."""
        assert self._result is not None
        result, self._result = self._result, None
        return result.result()

    def _execute(self, plan: StepPlan) -> StepResult:
        """Starts the plan's copies, computes its tokens, and collects the copies that have ended."""
        self.begin_copies(plan)
        return self._result_of(plan, self.runner.run(plan))

    def _result_of(self, plan: StepPlan, output: StepOutput) -> StepResult:
        loaded, failed = self.loader.take_ended()
        moved = self.mover.take_ended()
        stats = self.loader.host_adapter_stats()
        return StepResult(plan.step, output.tokens, loaded, failed, moved, stats, output.scores, output.pooled)

    def begin_copies(self, plan: StepPlan) -> None:
        """Starts the plan's copies of adapters into the pool, and of KV between the tiers."""
        for digest in plan.outdated:
            self.loader.forget(digest)
        if plan.pins:
            self.loader.pin(plan.pins)
        for move in plan.moves:
            self.mover.begin(move)
        for load in plan.loads:
            self.loader.begin(load)

    def wake_on_copy_end(self, wake: Callable[[], None]) -> None:
        self.loader.on_end = self.mover.on_end = wake

    def close(self) -> None:
        self._thread.shutdown()
        self.loader.close()
        self.mover.close()


# A gang of one worker on a GPU, in this process: a step is launched while the one before it runs.


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
        self._launches: deque[tuple[StepPlan, Future[BegunStep]]] = deque()
        self._last = BegunStep()  # the compute thread's

    def begin(self, plan: StepPlan) -> None:
        self._launches.append((plan, self._thread.submit(self._launch, plan)))

    def finish(self) -> StepResult:
        """Raises what the launch or the computation raised."""
        plan, launched = self._launches.popleft()
        return self._thread.submit(self._await, plan, launched).result()

    def _launch(self, plan: StepPlan) -> BegunStep:
        self.begin_copies(plan)
        self._last = self.runner.begin(plan, self._last)
        return self._last

    @torch.inference_mode()  # as at the launch: tokens that are drawn again are written into its tensor
    def _await(self, plan: StepPlan, launched: Future[BegunStep]) -> StepResult:
        step = launched.result()
        return self._result_of(plan, StepOutput(step.tokens, step.scores, step.pooled))
