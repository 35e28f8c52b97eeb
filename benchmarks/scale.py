"""What size costs: sequences that run and wait, documents, contexts, adapters, penalties and log-probabilities.

Each figure is the least of several runs, in CPU time of the thread that does it, so that other programs disturb
little; each ratio is of figures of this one run. What is measured as the leader's step is schedule, settle, commit
and load, with a worker that takes no time.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from motet.benchmarks.rigs import leader_steps, size_of_inputs, size_of_penalties
from motet.benchmarks.rigs.resumed_frames import resumed_frame_bytes
from motet.benchmarks.rigs.size_of_memory import make_room_ms
from motet.cluster.replicas.replica_start import keep_pauses_short

DOCUMENT = 32 * 1024  # tokens
NUM_READERS = 127
NUM_RUNNING = (512, 1024, 2048, 4096)
NUM_WAITING = 10_000


class Table:
    """Figures as they come, each printed at once."""

    def __init__(self, num_runs: int) -> None:
        self._num_runs = num_runs
        self.figures: dict[str, float] = {}

    def measure(self, name: str, measure: Callable[[], float], num_runs: int | None = None, unit: str = "ms") -> float:
        """The least of several runs, under this name."""
        runs = []
        for _ in range(num_runs or self._num_runs):
            gc.collect()
            runs.append(measure())
        self.figures[name] = round(min(runs), 3)
        print(f"{name.replace('_', ' '):44} {min(runs):10.3f} {unit}", flush=True)
        return min(runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=3, help="of each figure (default 3)")
    parser.add_argument("--quick", action="store_true", help="without the penalties, which need a model (3 minutes)")
    arguments = parser.parse_args()
    table = Table(arguments.runs)
    keep_pauses_short()  # as a gang does
    ratios = measure_leader(table) | measure_memory(table) | measure_inputs(table)
    ratios["largest_frame_mib"] = table.measure("largest_frame_mib", _largest_frame_mib, 1, "MiB")
    if not arguments.quick:
        ratios |= measure_penalties(table)
    rounded = {name: round(ratio, 2) for name, ratio in ratios.items()}
    print(json.dumps({"benchmark": "scale", **rounded, **table.figures}))


def measure_leader(table: Table) -> dict[str, float]:
    steps = {}
    for count in NUM_RUNNING:
        steps[count] = table.measure(f"step_of_{count}_running_ms", partial(leader_steps.step_with, count))
    most = NUM_RUNNING[-1]
    waiting = table.measure(
        f"step_of_{most}_running_{NUM_WAITING}_waiting_ms", lambda: leader_steps.step_with(most, NUM_WAITING)
    )
    readers = f"step_of_{NUM_READERS}"
    plain = table.measure(f"{readers}_decoding_ms", lambda: leader_steps.decoding_step(NUM_READERS, 64))
    reading = table.measure(
        f"{readers}_decoding_on_one_document_ms", lambda: leader_steps.decoding_step(NUM_READERS, DOCUMENT)
    )
    coming = table.measure(
        f"{readers}_waiting_for_one_document_ms", lambda: leader_steps.coming_document_step(NUM_READERS, DOCUMENT)
    )
    return {
        "step_4096_over_512": steps[most] / steps[NUM_RUNNING[0]],
        "waiting_10000_over_0": waiting / steps[most],
        "shared_document_over_none": max(reading, coming) / plain,
    }


def measure_memory(table: Table) -> dict[str, float]:
    times = {n: table.measure(f"make_room_of_{n}_wanted_ms", partial(make_room_ms, n)) for n in (128, 1024)}
    return {"wanted_1024_over_128": times[1024] / times[128]}


def measure_inputs(table: Table) -> dict[str, float]:
    short = table.measure("inputs_of_128_short_ms", lambda: size_of_inputs.inputs_ms(128, 0))
    long = table.measure("inputs_of_127_short_one_131072_ms", lambda: size_of_inputs.inputs_ms(127, 1))
    return {"long_context_inputs_over_none": long / short}


def _largest_frame_mib() -> float:
    """Of 50 streams that are taken up again, each with 5,000 tokens and their 20 top log-probabilities."""
    return max(asyncio.run(resumed_frame_bytes(50, 5000, 20))) / 2**20


def measure_penalties(table: Table) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="motet-bench-") as folder:
        engine = size_of_penalties.DecodingEngine(Path(folder))
        try:
            for name, figure in engine.steps_ms().items():
                table.measure(f"step_of_128_at_8k_{name}_ms", partial(float, figure), 1)
        finally:
            engine.close()
    return {
        "penalty_step_over_none": table.figures["step_of_128_at_8k_penalised_ms"]
        / table.figures["step_of_128_at_8k_plain_ms"]
    }


if __name__ == "__main__":
    main()
