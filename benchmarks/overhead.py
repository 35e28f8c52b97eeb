"""What adapters cost: the same load on the base alone, on one adapter, and on 64 adapters, in one engine.

The load is that of vs_peft.py: the same prompts and lengths each time, all requests submitted at once. Each repetition
runs the three loads in turn, so that other programs on the machine disturb all alike; ratios are of the best
repetitions.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from motet.benchmarks.rigs import random_model
from motet.benchmarks.rigs.engine_side import EngineRun, EngineSide, fill_store
from motet.benchmarks.rigs.workload import draw_jobs

ONE_ADAPTER = 1  # of rank 16


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--adapters", type=int, default=64, help="of the load on many (default 64)")
    parser.add_argument("--requests", type=int, default=64, help="of each load (default 64)")
    parser.add_argument("--repetitions", type=int, default=2, help="of the three loads (default 2)")
    parser.add_argument("--threads", type=int, default=1, help="of the engine (default 1)")
    arguments = parser.parse_args()
    loads: dict[str, list[int | None]] = {
        "base": [None],
        "one adapter": [ONE_ADAPTER],
        f"{arguments.adapters} adapters": list(range(arguments.adapters)),
    }
    jobs = {name: draw_jobs(arguments.requests, using, random_model.VOCAB_SIZE) for name, using in loads.items()}
    runs: dict[str, list[EngineRun]] = {name: [] for name in loads}
    with tempfile.TemporaryDirectory(prefix="motet-bench-") as folder:
        model_path = random_model.write_model(Path(folder) / "model")
        adapters = random_model.write_adapters(Path(folder) / "adapters", arguments.adapters)
        store_path = Path(folder) / "store"
        engine = EngineSide(model_path, store_path, fill_store(store_path, model_path, adapters), arguments.threads)
        try:
            for _ in range(arguments.repetitions):
                for name in loads:
                    runs[name].append(engine.run(jobs[name]))
        finally:
            engine.close()
    _report(runs)


def _report(runs: dict[str, list[EngineRun]]) -> None:
    best_wall = {name: min(done, key=lambda run: run.wall_s) for name, done in runs.items()}
    best_cpu = {name: min(done, key=lambda run: run.cpu_s) for name, done in runs.items()}
    base, one, many = runs
    print(
        f"{'':12} {'tokens':>6} {'wall s':>7} {'tokens/s':>8} {'CPU s':>7} {'wall over base':>14} {'CPU over base':>13}"
    )
    for name, run in best_wall.items():
        wall, cpu = run.wall_s / best_wall[base].wall_s, best_cpu[name].cpu_s / best_cpu[base].cpu_s
        speed = run.num_output_tokens / run.wall_s
        times = f"{run.num_output_tokens:6} {run.wall_s:7.1f} {speed:8.1f} {best_cpu[name].cpu_s:7.1f}"
        print(f"{name:12} {times} {wall:14.2f} {cpu:13.2f}")
    ratios: dict[str, str | float] = {"benchmark": "overhead"}
    for key, name in (("one_adapter", one), ("many_adapters", many)):
        ratios[f"{key}_time_over_base"] = round(best_wall[name].wall_s / best_wall[base].wall_s, 2)
        ratios[f"{key}_cpu_time_over_base"] = round(best_cpu[name].cpu_s / best_cpu[base].cpu_s, 2)
    print(json.dumps(ratios))


if __name__ == "__main__":
    main()
