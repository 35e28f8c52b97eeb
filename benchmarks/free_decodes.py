"""Whether answers without a form have become slower: an engine of this code beside one of another checkout, in turn.

64 sequences of 32 tokens, and one of 128, greedy, of a model with SmolLM2-135M's shape and random weights. Each engine
is in a process of its own, and waits while the other one computes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from motet.benchmarks.rigs import random_model
from motet.benchmarks.rigs.workload import draw_jobs
from motet.cluster.config import MotetConfig
from motet.workers.engine import Engine
from motet.workers.engine_builder import build_engine
from motet.workers.wire.messages import SamplingParams, SequenceRequest, Submit

LOADS = {"64": (64, 32), "1": (1, 128)}  # sequences, and tokens of each
HERE = Path(__file__).resolve().parents[1]


def serve(model: Path) -> None:
    """Computes a load for each line of standard input that names one, and prints seconds of the clock and of CPU."""
    with tempfile.TemporaryDirectory(prefix="motet-bench-") as folder:
        config = MotetConfig.of(
            model_path=model,
            data_dir=Path(folder),
            dtype="bfloat16",
            pool_bytes=1 << 30,
            num_threads=1,
            prefix_cache=False,
            token_interval_s=0.0,
        ).engine
        engine = build_engine(config)
        try:
            for line in sys.stdin:
                began_at, cpu_at = time.perf_counter(), time.process_time()
                _compute(engine, *LOADS[line.strip()])
                print(json.dumps([time.perf_counter() - began_at, time.process_time() - cpu_at]), flush=True)
        finally:
            engine.close()


def _compute(engine: Engine, num_sequences: int, num_tokens: int) -> None:
    jobs = draw_jobs(64, [None], random_model.VOCAB_SIZE)[:num_sequences]
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    for number, job in enumerate(jobs):
        request = SequenceRequest(
            sequence_id=number, prompt_token_ids=job.prompt_token_ids, sampling=sampling, tenant="benchmark"
        )
        engine.receive(Submit(request))
    num_left = num_sequences * num_tokens
    while engine.has_work():
        for update in engine.step():
            num_left -= len(update.token_ids)
    assert not num_left, "an answer ended before its length"


class Checkout:
    """A process with an engine of a checkout's code."""

    def __init__(self, root: Path, model: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(root.parent)}
        command = [sys.executable, str(Path(__file__).resolve()), "--serve", str(model)]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def compute(self, load: str) -> tuple[float, float]:
        """Seconds of the clock and of CPU."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(load, file=self._process.stdin, flush=True)
        clock_s, cpu_s = json.loads(self._process.stdout.readline())
        return clock_s, cpu_s

    def close(self) -> None:
        self._process.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--before", type=Path, help="a checkout of other code, in a folder named motet")
    parser.add_argument("--repetitions", type=int, default=5, help="of each load (default 5)")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve)
        return
    if arguments.before is None:
        parser.error("--before is needed")
    figures: dict[str, str | float] = {"benchmark": "free_decodes"}
    with tempfile.TemporaryDirectory(prefix="motet-bench-") as folder:
        model = random_model.write_model(Path(folder) / "model")
        checkouts = [Checkout(root.resolve(), model) for root in (HERE, arguments.before)]
        for load in LOADS:
            for checkout in checkouts:
                checkout.compute(load)  # kernels are compiled, and costs are learnt
            pairs = [[checkout.compute(load) for checkout in checkouts] for _ in range(arguments.repetitions)]
            for position, what in enumerate(("speed", "cpu")):
                ratios = [before[position] / now[position] for now, before in pairs]
                best = [min(pair[side][position] for pair in pairs) for side in (0, 1)]
                print(f"{load} sequences, {what}: {best[0]:.2f} s now, {best[1]:.2f} s before; ratios {ratios}")
                figures[f"{what}_ratio_{load}"] = round(statistics.median(ratios), 3)
        for checkout in checkouts:
            checkout.close()
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
