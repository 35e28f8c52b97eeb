"""The share of wall time in which a worker computes, with and without making the next plan while a step runs.

A gang of one worker on random weights of SmolLM2-135M's shape decodes 16 and 64 sequences at once, on 16 adapters.
Between steps the leader also encodes the frame of each step, as the data plane does. Busy is the time inside the
worker's steps, by the worker's clock. Both ways take turns in one process, and the best round of each counts.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from motet.benchmarks.rigs import random_model
from motet.benchmarks.rigs.engine_side import BLOCK_SIZE, POOL_BYTES, fill_store
from motet.cluster.config import MotetConfig
from motet.workers.engine import Engine
from motet.workers.engine_builder import build_engine
from motet.workers.execution.executor import LocalExecutor
from motet.workers.plan import StepPlan, StepResult
from motet.workers.wire.messages import AdapterRef, Frame, SamplingParams, SequenceRequest, Submit

NUM_PROMPT, NUM_OUTPUT = 32, 48  # tokens of each sequence


@dataclass
class Busy:
    """Seconds inside the worker's steps."""

    seconds: float = 0.0

    def watch(self, executor: LocalExecutor) -> None:
        execute = executor._execute

        def timed(plan: StepPlan) -> StepResult:
            began_at = time.perf_counter()
            try:
                return execute(plan)
            finally:
                self.seconds += time.perf_counter() - began_at

        executor._execute = timed  # type: ignore[method-assign]


def decode(
    engine: Engine, busy: Busy, num_sequences: int, refs: Sequence[AdapterRef], seed: int
) -> tuple[float, float]:
    """Wall seconds and busy seconds of this many sequences, from their submission to their end."""
    rng = random.Random(seed)
    sampling = SamplingParams(max_tokens=NUM_OUTPUT, temperature=0.0, ignore_eos=True)
    for index in range(num_sequences):
        prompt = [rng.randrange(1, 4000) for _ in range(NUM_PROMPT)]
        engine.receive(
            Submit(
                SequenceRequest(
                    sequence_id=index,
                    prompt_token_ids=prompt,
                    sampling=sampling,
                    tenant="benchmark",
                    adapter=refs[index % len(refs)],
                )
            )
        )
    encoder = msgspec.msgpack.Encoder()
    busy.seconds, started = 0.0, time.perf_counter()
    while engine.has_work():
        updates = engine.step()
        encoder.encode(Frame(updates, engine.load(), engine.take_residency_changes()))
        if engine.waits:
            time.sleep(0.0005)
    return time.perf_counter() - started, busy.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="of each way (default 3)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="motet-bench-") as folder:
        model_path = random_model.write_model(Path(folder) / "model")
        adapters = random_model.write_adapters(Path(folder) / "adapters", 16)
        refs = fill_store(Path(folder) / "store", model_path, adapters)
        engine = build_engine(
            MotetConfig.of(
                model_path=model_path,
                data_dir=Path(folder),
                dtype="bfloat16",
                pool_bytes=POOL_BYTES,
                block_size=BLOCK_SIZE,
                num_threads=1,
                prefix_cache=False,  # rounds are to compute what they ask for
            ).engine
        )
        busy = Busy()
        assert isinstance(engine.executor, LocalExecutor)
        busy.watch(engine.executor)
        decode(engine, busy, 16, refs, seed=0)
        best: dict[tuple[int, bool], tuple[float, float]] = {}
        for round_number in range(arguments.rounds):
            for num_sequences in (16, 64):
                for overlaps in (False, True):
                    engine._overlaps = overlaps
                    timed = decode(engine, busy, num_sequences, refs, seed=round_number)
                    best[num_sequences, overlaps] = min(best.get((num_sequences, overlaps), timed), timed)
        engine.close()
    print(f"{'sequences':>9} {'overlap':>7} {'wall s':>7} {'worker computes':>15}")
    result: dict[str, str | float] = {"benchmark": "overlap"}
    for (num_sequences, overlaps), (wall_s, busy_s) in best.items():
        print(f"{num_sequences:9} {'yes' if overlaps else 'no':>7} {wall_s:7.2f} {busy_s / wall_s:15.3f}")
        result[f"busy_share_{num_sequences}_{'with' if overlaps else 'without'}"] = round(busy_s / wall_s, 3)
    for num_sequences in (16, 64):
        speed = best[num_sequences, False][0] / best[num_sequences, True][0]
        result[f"speed_{num_sequences}_with_over_without"] = round(speed, 3)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
