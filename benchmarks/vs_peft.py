"""Output tokens per second of motet's engine against transformers + PEFT, both on this machine in this run.

64 requests over 64 adapters of ranks 8/16/32/64 on random weights of SmolLM2-135M's shape, bfloat16, greedy, lengths
log-normal (prompts of 60, outputs of 80 tokens on average). motet gets all 64 requests at once. There are two
baselines, which get the first requests only, because they are slow. On both sides only tokens that were requested
count.

- tuned: PEFT's mixed-batch generation (`generate(adapter_names=[...])`) in static batches of 16, the fastest size here,
  with `--threads` or 2 threads, whichever is faster in a trial.
- plain: `set_adapter` and `generate`, one request after the other, as in PEFT's own documentation.

All adapters are loaded on both sides before the clock starts; PEFT holds them in float32, its default, which was also
faster than bfloat16 (0.33 against 0.45 s for a decode step of 16). Ratios are of wall time; CPU time is printed beside
it, because other programs on the machine disturb that less.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from motet.benchmarks.rigs import random_model
from motet.benchmarks.rigs.engine_side import EngineRun, EngineSide, fill_store
from motet.benchmarks.rigs.peft_baseline import BaselineRun, PeftBaseline
from motet.benchmarks.rigs.workload import Job, draw_jobs
from motet.workers.wire.messages import AdapterRef

BATCH_SIZE = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--adapters", type=int, default=64, help="and as many requests (default 64)")
    parser.add_argument("--threads", type=int, default=2, help="of motet (default 2)")
    parser.add_argument("--baseline-requests", type=int, default=BATCH_SIZE, help="of tuned PEFT (default 16)")
    parser.add_argument("--plain-requests", type=int, default=4, help="of plain PEFT (default 4)")
    arguments = parser.parse_args()
    jobs = draw_jobs(arguments.adapters, range(arguments.adapters), random_model.VOCAB_SIZE)
    with tempfile.TemporaryDirectory(prefix="motet-bench-") as folder:
        model_path = random_model.write_model(Path(folder) / "model")
        adapters = random_model.write_adapters(Path(folder) / "adapters", arguments.adapters)
        baselines = _run_baselines(model_path, adapters, jobs, arguments)
        engine = _run_engine(Path(folder) / "store", model_path, adapters, jobs, arguments.threads)
    _report(engine, baselines, arguments)


def _run_baselines(
    model_path: Path, adapters: Sequence[Path], jobs: Sequence[Job], arguments: argparse.Namespace
) -> dict[str, BaselineRun]:
    baseline, threads = PeftBaseline(model_path, adapters), max(arguments.threads, 2)
    best = baseline.best_num_threads(jobs[:4], sorted({arguments.threads, threads}))
    return {
        "tuned_peft": baseline.run(jobs[: arguments.baseline_requests], BATCH_SIZE, best),
        "plain_peft": baseline.run_one_by_one(jobs[: arguments.plain_requests], best),
    }


def _run_engine(
    store_path: Path, model_path: Path, adapters: Sequence[Path], jobs: Sequence[Job], num_threads: int
) -> EngineRun:
    """Runs the engine in a process of its own, as a worker does, because PEFT's idle OpenMP threads would slow it."""
    refs = fill_store(store_path, model_path, adapters)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(_step_engine, model_path, store_path, refs, jobs, num_threads).result()


def _step_engine(
    model_path: Path, store_path: Path, refs: Sequence[AdapterRef], jobs: Sequence[Job], num_threads: int
) -> EngineRun:
    engine = EngineSide(model_path, store_path, list(refs), num_threads)
    try:
        return engine.run(jobs)
    finally:
        engine.close()


def _report(engine: EngineRun, baselines: dict[str, BaselineRun], arguments: argparse.Namespace) -> None:
    print(f"{'':12} {'threads':>7} {'tokens':>6} {'wall s':>7} {'tokens/s':>8} {'tokens/CPU s':>12}")
    rows: list[tuple[str, EngineRun | BaselineRun, int]] = [(n, run, run.num_threads) for n, run in baselines.items()]
    rows.append(("motet", engine, arguments.threads))
    for name, each, num_threads in rows:
        speed, cpu_speed = each.num_output_tokens / each.wall_s, each.num_output_tokens / each.cpu_s
        print(f"{name:12} {num_threads:7} {each.num_output_tokens:6} {each.wall_s:7.1f} {speed:8.1f} {cpu_speed:12.1f}")
    ratios: dict[str, str | float] = {"benchmark": "vs_peft", "adapters": arguments.adapters}
    for name, run in baselines.items():
        ratios[f"output_tokens_per_s_over_{name}"] = round(_ratio(engine, run, "wall_s"), 2)
        ratios[f"output_tokens_per_cpu_s_over_{name}"] = round(_ratio(engine, run, "cpu_s"), 2)
    print(json.dumps(ratios))


def _ratio(engine: EngineRun, baseline: BaselineRun, clock: str) -> float:
    speed = engine.num_output_tokens / getattr(engine, clock)
    return float(speed / (baseline.num_output_tokens / getattr(baseline, clock)))


if __name__ == "__main__":
    main()
