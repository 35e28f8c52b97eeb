"""`motet plan --trace` beside the engine: tokens a second and first tokens of loads that its costs were not fitted on.

Random weights of SmolLM2-135M's shape, bfloat16, one thread. Steps are measured and fitted, and the base, 8 and 64
adapters in 3 batches of 2 lengths are run on motet's engine, in turns, so that both see the same machine. Then all that
the engine was given, measured loads included, is replayed in the same order on one engine in virtual time, so that both
schedulers have the same history. Both are driven by one function (`workers/costs/replay.py`).

The machine's speed drifts by a tenth within a minute: all steps are fitted together, and the costs of a turn are scaled
by the medians of the steps that were measured before and after it, none of which is of a load that is compared.

Times of the engine are CPU seconds of the thread that computes its steps: on a machine that does nothing else they are
what a clock shows, and other programs disturb them less. Published (arXiv 2602.24044): a digital twin within 5 %.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median

from motet.adapters.store.store import AdapterStore
from motet.benchmarks.rigs import random_model
from motet.cluster.tools.serving_planner import NUM_ADAPTERS, engine_config
from motet.workers.config import EngineConfig
from motet.workers.costs.measured_steps import (
    RecordingExecutor,
    computing_s,
    costs_of,
    fitted_loads,
    random_adapters,
    wait_a_little,
)
from motet.workers.costs.replay import Replayed, TracedRequest, VirtualExecutor, replay
from motet.workers.costs.step_costs import StepCosts, StepShape
from motet.workers.engine import Engine
from motet.workers.engine_builder import build_engine, build_virtual_engine
from motet.workers.models.config import ModelConfig
from motet.workers.models.sharding import ModelSharding
from motet.workers.plan import StepPlan
from motet.workers.wire.messages import AdapterRef

ADAPTERS, BATCHES, LENGTHS = (0, 8, 64), (4, 14, 32), ((26, 22), (110, 14))  # lengths: of prompts and answers
POOL_BYTES = 3 << 30  # all adapters and all sequences


@dataclass(frozen=True)
class Load:
    num_adapters: int
    batch: int
    prompt: int
    answer: int

    @property
    def requests(self) -> list[TracedRequest]:
        """Lengths differ a little, so that sequences do not end at once."""
        return [
            TracedRequest(
                0.0,
                self.prompt + index % 5,
                self.answer + index % 7,
                str(index % self.num_adapters) if self.num_adapters else None,
            )
            for index in range(self.batch)
        ]


@dataclass(frozen=True)
class Run:
    """Requests that the engine gets at once, when it is idle."""

    requests: list[TracedRequest]
    turn: int
    load: Load | None = None
    is_measured: bool = False  # for the fit


@dataclass
class TurnCosts:
    """A fit, as fast as the machine was in the turn that runs."""

    costs: StepCosts
    factor: float = 1.0

    def step_s(self, plan: StepPlan) -> float:
        return self.factor * self.costs.step_s(plan)

    def load_s(self, num_pages: int, *, from_store: bool) -> float:
        return self.costs.load_s(num_pages, from_store=from_store)

    def move_s(self, num_pages: int) -> float:
        return self.costs.move_s(num_pages)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--turns", type=int, default=5, help="of measuring and running (default 5)")
    turns = parser.parse_args().turns
    with tempfile.TemporaryDirectory(prefix="motet-bench-") as folder:
        model_path = random_model.write_model(Path(folder) / "model")
        config = replace(engine_config(model_path, Path(folder)), pool_bytes=POOL_BYTES, num_threads=1)
        model = ModelConfig.from_folder(model_path)
        layout = ModelSharding(model).layout(config.block_size, config.dtype)
        stored = random_adapters(AdapterStore(config.store_path), layout, max(ADAPTERS))
        refs = {str(number): ref for number, ref in enumerate(stored)}
        runs = history(turns, model.max_model_len)
        costs, factors, real, real_s = _measured(config, model_path, refs, runs, turns)
        virtual, virtual_s = _replayed(config, TurnCosts(costs), factors, refs, runs)
    _report(costs, real, virtual, real_s / virtual_s)


def history(turns: int, max_model_len: int) -> list[Run]:
    """Each adapter once, alone, and the loads that are measured before each turn and after the last."""
    loads = [Load(number, batch, *lengths) for number in ADAPTERS for batch in BATCHES for lengths in LENGTHS]
    found = [Run([TracedRequest(0.0, 2, 1, str(number))], 0) for number in range(max(ADAPTERS))]
    for turn in range(turns + 1):
        found += [Run(requests, turn, is_measured=True) for requests in fitted_loads(NUM_ADAPTERS, max_model_len)]
        found += [Run(load.requests, turn, load) for load in loads[turn::turns] if turn < turns]
    return found


def _run_all(
    engine: Engine,
    runs: Sequence[Run],
    refs: Mapping[str, AdapterRef],
    clock: Callable[[], float],
    wait: Callable[[float], None],
    before: Callable[[Run], None],
    spent_s: Callable[[], float],
) -> tuple[dict[Load, Replayed], float]:
    """What each load gave, and what all of them took of the machine's time. `before`: called with each run."""
    found, first_id, took_s = dict[Load, Replayed](), 0, 0.0
    for run in runs:
        before(run)
        began_s = spent_s()
        replayed = replay(engine, run.requests, refs, clock, wait, first_id)
        if replayed.refused:
            raise ValueError(f"the engine refuses a request: {next(iter(replayed.refused))}")
        if run.load is not None:
            found[run.load] = replayed
            took_s += spent_s() - began_s
        first_id += len(run.requests)
    return found, took_s


def _measured(
    config: EngineConfig, model_path: Path, refs: Mapping[str, AdapterRef], runs: Sequence[Run], turns: int
) -> tuple[StepCosts, list[float], dict[Load, Replayed], float]:
    """A fit of all measured steps, by turn the factor on it, what the engine did, and its seconds."""
    engine = build_engine(config, clock=computing_s)
    engine.executor = recording = RecordingExecutor(engine.executor, computing_s)
    steps: list[list[tuple[StepShape, float]]] = [[] for _ in range(turns + 1)]

    def before(run: Run) -> None:
        recording.pause()
        recording.steps = steps[run.turn] if run.is_measured else []

    try:
        real, real_s = _run_all(engine, runs, refs, computing_s, wait_a_little, before, computing_s)
        recording.steps = [step for each in steps for step in each]
        costs = costs_of(recording, engine.info, model_path)
    finally:
        engine.close()
    speeds = [median(seconds / costs.shape_s(shape) for shape, seconds in each) for each in steps]
    return costs, [fmean(pair) for pair in pairwise(speeds)], real, real_s


def _replayed(
    config: EngineConfig,
    costs: TurnCosts,
    factors: Sequence[float],
    refs: Mapping[str, AdapterRef],
    runs: Sequence[Run],
) -> tuple[dict[Load, Replayed], float]:
    executor = VirtualExecutor(costs)
    engine = build_virtual_engine(config, executor, executor.clock)

    def before(run: Run) -> None:
        costs.factor = factors[min(run.turn, len(factors) - 1)]

    return _run_all(engine, runs, refs, executor.clock, executor.wait, before, time.process_time)


def _report(costs: StepCosts, real: Mapping[Load, Replayed], virtual: Mapping[Load, Replayed], speed: float) -> None:
    print(f"{costs.num_steps} steps measured, half of them within {costs.residual:.1%} of the fit\n")
    print(f"{'adapters':>8} {'batch':>5} {'prompt':>6} {'tokens/s':>9} {'planned':>8} {'first s':>8} {'planned':>8}")
    throughput_errors, first_token_errors = [], []
    for load, ran in real.items():
        found = virtual[load]
        throughput_errors.append(abs(found.tokens_per_s / ran.tokens_per_s - 1))
        first_token_errors.append(abs(found.median_first_token_s / ran.median_first_token_s - 1))
        print(
            f"{load.num_adapters:8} {load.batch:5} {load.prompt:6} {ran.tokens_per_s:9.1f} {found.tokens_per_s:8.1f} "
            f"{ran.median_first_token_s:8.3f} {found.median_first_token_s:8.3f}"
        )
    summary = {
        "benchmark": "plan",
        "loads": len(real),
        "throughput_error": round(max(throughput_errors), 4),
        "mean_throughput_error": round(sum(throughput_errors) / len(real), 4),
        "first_token_error": round(max(first_token_errors), 4),
        "mean_first_token_error": round(sum(first_token_errors) / len(real), 4),
        "times_faster": round(speed, 1),
        "fit_residual": round(costs.residual, 4),
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
