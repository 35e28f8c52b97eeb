"""An executor that computes nothing: what a step costs with it, a step costs the leader."""

from __future__ import annotations

import time
from collections.abc import Callable

from motet.workers.plan import MoveEnd, SampledToken, StepPlan, StepResult

TOKEN = 1  # that every sequence gets in every step


class InstantExecutor:
    """An `Executor` that answers each plan at once. `cpu_s` is what it took itself, to be subtracted."""

    feeds_tokens = False

    def __init__(self, loads_end: bool = True) -> None:
        """`loads_end`: adapters are there with the step that requested them; else they never come."""
        self._loads_end = loads_end
        self.moves_end = True  # copies of KV between tiers are made in their step; else they go on and on
        self._plan: StepPlan | None = None
        self.cpu_s = 0.0

    def begin(self, plan: StepPlan) -> None:
        self._plan = plan

    def finish(self) -> StepResult:
        began_s = time.thread_time()
        assert self._plan is not None
        plan, self._plan = self._plan, None
        tokens: dict[int, SampledToken | None] = {
            s.sequence_id: SampledToken(TOKEN, None) for s in plan.sequences if s.sample is not None
        }
        loaded = tuple(load.residence.digest for load in plan.loads) if self._loads_end else ()
        moved = tuple(MoveEnd(move.number, 0.0, None) for move in plan.moves) if self.moves_end else ()
        result = StepResult(plan.step, tokens, loaded, (), moved)
        self.cpu_s += time.thread_time() - began_s
        return result

    def wake_on_copy_end(self, wake: Callable[[], None]) -> None: ...

    def close(self) -> None: ...
