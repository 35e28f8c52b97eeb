"""`motet plan --trace` beside the engine: tokens a second and first tokens of loads that its costs were not fitted on.

Random weights of SmolLM2-135M's shape, bfloat16, one thread. Steps are measured and fitted, and the base, 8 and 64
adapters in 3 batches of 2 lengths are run on motet's engine, in turns, so that both see the same machine. Then each
load is replayed on the same scheduler in virtual time. Both are driven by one function (`workers/costs/replay.py`).

The machine's speed drifts by a tenth within a minute: all steps are fitted together, and the costs of a turn are scaled
by the median of its own measured steps, none of which is of a load that is compared.

Times of the engine are CPU seconds of the thread that computes its steps: on a machine that does nothing else they are
what a clock shows, and other programs disturb them less. Published (arXiv 2602.24044): a digital twin within 5 %.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median

import msgspec

from motet.adapters.store.store import AdapterStore
from motet.benchmarks.rigs import random_model
from motet.cluster.planning.measured_machine import NUM_ADAPTERS, engine_config
from motet.workers.config import EngineConfig
from motet.workers.costs.measured_steps import (
    RecordingExecutor,
    computing_s,
    costs_of,
    load_each,
    random_adapters,
    record_loads,
    wait_a_little,
)
from motet.workers.costs.replay import Replayed, VirtualExecutor, replay
from motet.workers.costs.step_costs import StepCosts
from motet.workers.costs.trace import TracedRequest
from motet.workers.engine_builder import build_engine, build_virtual_engine
from motet.workers.models.config import ModelConfig
from motet.workers.models.sharding import ModelSharding
from motet.workers.wire.messages import AdapterRef

ADAPTERS, BATCHES, LENGTHS = (0, 8, 64), (4, 14, 32), ((26, 22), (110, 14))  # lengths: of prompts and answers
POOL_BYTES = 3 << 30  # all adapters and all sequences
VIRTUAL_ID = 10**7


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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--turns", type=int, default=5, help="of measuring and running (default 5)")
    arguments = parser.parse_args()
    loads = [Load(number, batch, *lengths) for number in ADAPTERS for batch in BATCHES for lengths in LENGTHS]
    with tempfile.TemporaryDirectory(prefix="motet-bench-") as folder:
        model_path = random_model.write_model(Path(folder) / "model")
        config = replace(engine_config(model_path, Path(folder)), pool_bytes=POOL_BYTES, num_threads=1)
        layout = ModelSharding(ModelConfig.from_folder(model_path)).layout(config.block_size, config.dtype)
        stored = random_adapters(AdapterStore(config.store_path), layout, max(ADAPTERS))
        refs = {str(number): ref for number, ref in enumerate(stored)}
        costs, scales, real, real_s = _run(config, model_path, refs, loads, arguments.turns)
        began_s = time.process_time()
        virtual = {load: _replayed(config, _scaled(costs, scales[load]), refs, load) for load in loads}
        virtual_s = time.process_time() - began_s
    _report(costs, real, virtual, real_s / virtual_s)


def _run(
    config: EngineConfig, model_path: Path, refs: Mapping[str, AdapterRef], loads: list[Load], turns: int
) -> tuple[StepCosts, dict[Load, float], dict[Load, Replayed], float]:
    """A fit of all measured steps, by load the factor on it, what the engine did, and its seconds."""
    engine = build_engine(config, clock=computing_s)
    engine.executor = recording = RecordingExecutor(engine.executor, computing_s)
    adapters, measured = list(refs.values()), recording.steps
    real, real_s, first_steps = dict[Load, Replayed](), 0.0, list[int]()
    try:
        free_id = load_each(engine, recording, adapters, 0)
        measured.clear()
        for turn in range(turns):
            recording.steps = measured
            first_steps.append(len(measured))
            free_id = record_loads(engine, recording, adapters[:NUM_ADAPTERS], free_id)
            recording.steps = []  # of the loads that the fit must not see
            for load in loads[turn::turns]:
                recording.pause()
                began_s = computing_s()
                real[load] = replay(engine, load.requests, refs, computing_s, wait_a_little, free_id)
                real_s += computing_s() - began_s
                free_id += load.batch
        recording.steps = measured
        costs, scales = costs_of(recording, engine.info, model_path), dict[Load, float]()
        for turn, (first, last) in enumerate(pairwise([*first_steps, len(measured)])):
            ratios = [seconds / costs.shape_s(shape) for shape, seconds in measured[first:last]]
            scales |= dict.fromkeys(loads[turn::turns], median(ratios))
        return costs, scales, real, real_s
    finally:
        engine.close()


def _scaled(costs: StepCosts, factor: float) -> StepCosts:
    return msgspec.structs.replace(costs, coefficients=tuple([factor * each for each in costs.coefficients]))


def _replayed(config: EngineConfig, costs: StepCosts, refs: Mapping[str, AdapterRef], load: Load) -> Replayed:
    """With the adapters of the load in the pool, as they are there in the engine's."""
    executor = VirtualExecutor(costs)
    engine = build_virtual_engine(config, executor, executor.clock)
    warm = [TracedRequest(0.0, 2, 1, str(number)) for number in range(load.num_adapters)]
    replay(engine, warm, refs, executor.clock, executor.wait, VIRTUAL_ID)
    return replay(engine, load.requests, refs, executor.clock, executor.wait)


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
