"""The first ten minutes on a GPU: what finds most comes first, and a report says what to look at.

Each part runs in a process of its own with a time limit, writes what it finds at once, and may hang or die: the next
one begins all the same. `report.md` and `report.json` in the folder of `--out` are written anew after each part. Runs
from a checkout with torch, Triton and ml_dtypes; the demo's part needs what motet needs. `--dry` runs the same code on
a CPU, on the tests' stand-in GPU and in Triton's interpreter, with tiny shapes and without times.
"""

from __future__ import annotations

import argparse
import importlib
import math
import os
import sys
import tempfile
import time
from pathlib import Path

from run import make_importable  # type: ignore[import-not-found]  # it makes motet importable


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("first-run"), help="folder of the report and the logs")
    parser.add_argument(
        "--budget-s",
        type=float,
        default=None,
        help="parts that have not begun by then are left out; 600, and no end with --dry",
    )
    parser.add_argument("--only", nargs="+", metavar="PART", help="these parts only")
    parser.add_argument("--dry", action="store_true", help="on the CPU: stand-in and interpreter, without times")
    arguments = parser.parse_args()
    if arguments.dry:
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="motet-bench-") as folder:
        make_importable(Path(folder))
        sys.exit(_run(arguments))


def _run(arguments: argparse.Namespace) -> int:
    # All parts begin with what is imported here: torch once, which takes most of a minute from a cold disk.
    from motet.benchmarks.gpu.findings import findings
    from motet.benchmarks.gpu.first_parts import parts
    from motet.benchmarks.gpu.first_report import write_report
    from motet.benchmarks.gpu.part_process import PartResult, run_part

    if arguments.dry:  # on a GPU each part finds for itself whether its imports work
        for module in ("torch._dynamo", "motet.benchmarks.gpu.decode_rows", "motet.benchmarks.gpu.demo_rows"):
            importlib.import_module(module)
    wanted = parts(arguments.dry)
    if arguments.only is not None:
        unknown = set(arguments.only) - {part.name for part in wanted}
        if unknown:
            sys.exit(f"there is no part {', '.join(sorted(unknown))}: {', '.join(part.name for part in wanted)} are")
        wanted = tuple(part for part in wanted if part.name in arguments.only)
    budget_s = arguments.budget_s or (math.inf if arguments.dry else 600.0)
    started = time.monotonic()
    results: list[PartResult] = []
    left_out: list[str] = []
    for part in wanted:
        left_s = budget_s - (time.monotonic() - started)
        if left_s <= 0:
            left_out.append(part.name)
        else:
            print(f"{part.name} …", end=" ", flush=True)
            results.append(run_part(part, min(part.limit_s, left_s), arguments.out))
            print(f"{results[-1].problem or 'done'}, {results[-1].took_s:g} s", flush=True)
        write_report(results, left_out, arguments.out, arguments.dry)
    found = findings(results)
    for finding in found:
        print(f"- {finding.part}: {finding.what}")
    print(f"{arguments.out / 'report.md'} says what to look at")
    return 1 if left_out or any(finding.gravity <= 1 for finding in found) else 0


if __name__ == "__main__":
    main()
