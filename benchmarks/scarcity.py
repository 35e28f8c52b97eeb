"""What a gang does when memory is short, in virtual time: answers, work done twice, long calls and goodput.

`--before CHECKOUT` runs the same on another checkout and prints its figures beside these: `steps_over_today` is over
its steps, and without it over those of a pool that is filled to the last page. Each part in `scarce/` also runs alone
and prints more. What needs a real engine is in `scarce/page_reserve_engine.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from motet.benchmarks.scarce import (
    calls,
    fair_adapters,
    long_prompts,
    mixed_week,
    page_reserve,
    shared_documents,
    windows,
)
from motet.tests.rigs.full_pool import fill_to_the_last_page
from motet.workers.scheduling.scheduler import Scheduler

Figures = dict[str, float]


def adapters_that_do_not_fit() -> Figures:
    mixes = fair_adapters.fair_adapters()
    loads = max(each.num_loads / max(each.num_loads_fifo, 1) for each in mixes)
    return {"livelock_over_fifo": fair_adapters.livelock_over_fifo(mixes), "loads_over_fifo": loads}


def full_pool(prepare: Callable[[Scheduler], None] = lambda scheduler: None) -> Figures:
    outcomes = [page_reserve.run(lengths, prepare=prepare) for lengths in page_reserve.LENGTHS.values()]
    return {
        "computed_over_needed": max(one.computed_over_needed for one in outcomes),
        "preempted_share": max(one.preempted_share for one in outcomes),
        "steps_per_1000_tokens": sum(one.steps_per_1000_tokens for one in outcomes) / len(outcomes),
    }


def prompts_of_a_third_of_the_pool() -> Figures:
    found = long_prompts.long_prompts()
    return {
        "prompts_over_fifo": found.over_fifo,
        "prompts_computed_over_needed": found.computed_over_needed,
        "shares_2_places": long_prompts.shares_of_long_and_short(2),
        "shares_64_places": long_prompts.shares_of_long_and_short(64),
    }


def documents() -> Figures:
    of_one, of_four = (shared_documents.shared_documents(num_tenants=number) for number in (1, 4))
    return {
        "documents_found_1_tenant": of_one.found_part,
        "documents_p99_s_1_tenant": of_one.p99_s,
        "documents_found": of_four.found_part,
        "documents_p99_s": of_four.p99_s,
        "documents_shares": of_four.shares,
    }


def week() -> Figures:
    by_load = {one.load: one for one in mixed_week.mixed_week()}
    over, below = by_load[2.0], by_load[0.9]
    return {
        "goodput_2_over_09": over.goodput / below.goodput,
        "week_computed_over_needed": over.computed_over_needed,
        "week_loads_per_answer": over.loads_per_answer,
    }


PARTS: tuple[Callable[[], Figures], ...] = (
    adapters_that_do_not_fit,
    full_pool,
    prompts_of_a_third_of_the_pool,
    documents,
    windows.measure,
    calls.measure,
    week,
)
SUMMARY = (
    "livelock_over_fifo",
    "computed_over_needed",
    "steps_over_today",
    "prompts_over_fifo",
    "longest_call_ms",
    "goodput_2_over_09",
)
_NEEDED = Path("workers/costs/replay.py")  # of another checkout


def measure() -> Figures:
    figures: Figures = {}
    for part in PARTS:
        print(f"{part.__module__.rpartition('.')[2]}: {part.__name__}", file=sys.stderr)
        figures |= part()
    return figures


def measure_before(checkout: Path) -> Figures:
    """The figures of another checkout, by these benchmarks."""
    here = Path(__file__).resolve().parents[1]
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "motet"
        package.mkdir()
        for path in checkout.resolve().iterdir():
            (package / path.name).symlink_to(here / path.name if path.name == "benchmarks" else path)
        command = [sys.executable, "-m", "motet.benchmarks.scarcity", "--only-json"]
        done = subprocess.run(
            command, env={**os.environ, "PYTHONPATH": folder}, cwd=folder, stdout=subprocess.PIPE, check=True, text=True
        )
    figures: Figures = json.loads(done.stdout.splitlines()[-1])
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--before", type=Path, help="a checkout of other code to compare with")
    parser.add_argument("--only-json", action="store_true", help="print all figures as JSON and no table")
    arguments = parser.parse_args()
    if arguments.before is not None and not (arguments.before / _NEEDED).is_file():
        parser.error(f"{arguments.before} has no {_NEEDED}, in which these benchmarks run: give newer code")
    figures = measure()
    if arguments.only_json:
        print(json.dumps(figures))
        return
    before = {} if arguments.before is None else measure_before(arguments.before)
    print(f"{'':40} {'now':>10} {'before' if before else '':>10}")
    for name, figure in figures.items():
        print(f"{name:40} {figure:10.3f} " + (f"{before[name]:10.3f}" if name in before else ""))
    steps = "steps_per_1000_tokens"
    figures["steps_over_today"] = figures[steps] / (before or full_pool(fill_to_the_last_page))[steps]
    print(json.dumps({name: round(figures[name], 3) for name in SUMMARY}))


if __name__ == "__main__":
    main()
