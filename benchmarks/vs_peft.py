"""Output tokens per second of motet's engine against transformers + PEFT, both on this machine in this run.

64 requests over 64 adapters of ranks 8/16/32/64 on random weights of SmolLM2-135M's shape, bfloat16, greedy, lengths
log-normal (prompts of 60, outputs of 80 tokens on average). motet gets all 64 requests at once. The baseline is PEFT's
mixed-batch generation (`generate(adapter_names=[...])`) in static batches of 16, and runs the first batch only, because
it is slow; only the tokens that requests asked for count, on either side.

Made fair: all adapters are loaded on both sides before the clock starts; PEFT holds them in float32, its default, which
was also faster than bfloat16 (0.33 against 0.45 s a decode step of 16); motet computes with `--threads` (default 2),
PEFT with whichever of that and 2 is faster in a trial here, so never with fewer. Wall time is what the ratio is of;
CPU time is printed beside it, because other jobs on the machine disturb that less.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import random_model
from engine_side import EngineRun, EngineSide, fill_store
from peft_baseline import BaselineRun, PeftBaseline
from workload import Job, draw_jobs

BATCH_SIZE = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--adapters", type=int, default=64, help="and as many requests (default 64)")
    parser.add_argument("--threads", type=int, default=2, help="of motet (default 2)")
    parser.add_argument("--baseline-requests", type=int, default=BATCH_SIZE, help="that PEFT runs (default 16)")
    arguments = parser.parse_args()
    jobs = draw_jobs(arguments.adapters, range(arguments.adapters), random_model.VOCAB_SIZE)
    with tempfile.TemporaryDirectory(prefix="motet-bench-") as folder:
        model_path = random_model.write_model(Path(folder) / "model")
        adapters = random_model.write_adapters(Path(folder) / "adapters", arguments.adapters)
        baseline = _run_baseline(model_path, adapters, jobs[: arguments.baseline_requests], arguments.threads)
        engine = _run_engine(Path(folder) / "store", model_path, adapters, jobs, arguments.threads)
    _report(jobs, engine, baseline, arguments)


def _run_baseline(model_path: Path, adapters: Sequence[Path], jobs: Sequence[Job], num_threads: int) -> BaselineRun:
    baseline = PeftBaseline(model_path, adapters[: len(jobs)])
    best = baseline.best_num_threads(jobs[:4], sorted({num_threads, max(num_threads, 2)}))
    return baseline.run(jobs, BATCH_SIZE, best)


def _run_engine(
    store_path: Path, model_path: Path, adapters: Sequence[Path], jobs: Sequence[Job], num_threads: int
) -> EngineRun:
    engine = EngineSide(model_path, store_path, fill_store(store_path, model_path, adapters), num_threads)
    try:
        return engine.run(jobs)
    finally:
        engine.close()


def _report(jobs: Sequence[Job], engine: EngineRun, baseline: BaselineRun, arguments: argparse.Namespace) -> None:
    rows = (
        ("transformers + PEFT", baseline, arguments.baseline_requests, baseline.num_threads),
        ("motet", engine, len(jobs), arguments.threads),
    )
    print(f"{'':20} {'requests':>8} {'threads':>7} {'tokens':>6} {'wall s':>7} {'tokens/s':>8} {'tokens/CPU s':>12}")
    for name, run, num_requests, num_threads in rows:
        speed, cpu_speed = run.num_output_tokens / run.wall_s, run.num_output_tokens / run.cpu_s
        counts = f"{num_requests:8} {num_threads:7} {run.num_output_tokens:6}"
        print(f"{name:20} {counts} {run.wall_s:7.1f} {speed:8.1f} {cpu_speed:12.1f}")
    ratios = {
        "benchmark": "vs_peft",
        "adapters": arguments.adapters,
        "output_tokens_per_s_over_peft": round(_ratio(engine, baseline, "wall_s"), 2),
        "output_tokens_per_cpu_s_over_peft": round(_ratio(engine, baseline, "cpu_s"), 2),
    }
    print(json.dumps(ratios))


def _ratio(engine: EngineRun, baseline: BaselineRun, clock: str) -> float:
    speed = engine.num_output_tokens / getattr(engine, clock)
    return float(speed / (baseline.num_output_tokens / getattr(baseline, clock)))


if __name__ == "__main__":
    main()
