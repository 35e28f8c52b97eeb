"""What `scripts/test` does, once its environment is there. Its usage is in that file and in CONTRIBUTING.md.

Tests that need no Ray share the cores. After them run those that start Ray, one after the other: a Ray node that starts
beside busy tests gives up. Tests in `tests/interpreted` are a run of their own: Triton is interpreted in a whole
process or not at all.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

from motet.tests.rigs.passed_files import ROOT, covered_files, standing

PYTEST = [sys.executable, "-m", "pytest"]
SHARED_OUT = ["-n", "auto", "--maxprocesses", "4", "--no-loadscope-reorder", "--dist", "loadfile"]
INTERPRETED = "tests/interpreted"
FLAGS = ("--all", "--stale", "--quick", "--busy", "--durations")


class Runs:
    """Runs commands in the checkout and remembers which failed."""

    def __init__(self) -> None:
        self.failed: list[str] = []

    def run(self, *command: str) -> None:
        print("==", " ".join(command), flush=True)
        if subprocess.call(command, cwd=ROOT):
            self.failed.append(" ".join(command))


def run_all(
    runs: Runs, options: Sequence[str], left_out: Sequence[str], stale: Sequence[str], *, is_thorough: bool
) -> None:
    """All checks and all tests but the files that are left out."""
    whole = ["--thorough"] if is_thorough else []
    runs.run("scripts/check")
    run_interpreted(runs, options, [file for file in stale if file.startswith(INTERPRETED)])
    ignored = [f"--ignore={file}" for file in left_out]
    runs.run(*PYTEST, "-m", "not cluster", *SHARED_OUT, "--note-passed", *whole, *options, *ignored)
    runs.run(*PYTEST, "-m", "cluster", *whole, *options)


def run_interpreted(runs: Runs, options: Sequence[str], files: Sequence[str]) -> None:
    if files:
        runs.run(*PYTEST, *SHARED_OUT, "--note-passed", *options, *files)


def run_stale(runs: Runs, options: Sequence[str], files: Sequence[str]) -> None:
    """The files that may be left out and must run now."""
    run_interpreted(runs, options, [file for file in files if file.startswith(INTERPRETED)])
    if others := [file for file in files if not file.startswith(INTERPRETED)]:
        runs.run(*PYTEST, *SHARED_OUT, "--note-passed", *options, *others)


def print_left_out(whys: Mapping[str, str | None], left_out: Sequence[str]) -> None:
    if left_out:
        print("== left out, as nothing that they depend on has changed since they passed (--all runs them):")
        print(*(f"   {file}" for file in left_out), sep="\n")
    for file, why in whys.items():
        if why is not None:
            print(f"== {file} must run: {why}")
    sys.stdout.flush()


def main(arguments: list[str]) -> int:
    flags = []
    while arguments and arguments[0] in FLAGS:
        flags.append(arguments.pop(0))
    options = ["--by-file"] if "--durations" in flags else []
    if "--busy" in flags:
        subprocess.Popen([sys.executable, "scripts/busy_loops.py", str(os.getpid())], cwd=ROOT)
    if "--quick" in flags:
        quick = ["-m", "not cluster and not slow", *(f"--ignore={file}" for file in covered_files())]
        return subprocess.call([*PYTEST, *quick, *SHARED_OUT, *options, *arguments], cwd=ROOT)
    if arguments:
        return subprocess.call([*PYTEST, *options, *arguments], cwd=ROOT)
    whys = {file: why for file, (_, _, why) in standing().items()}
    is_thorough = "--all" in flags
    left_out = [file for file, why in whys.items() if why is None and not is_thorough]
    print_left_out(whys, left_out)
    runs, to_run = Runs(), [file for file in whys if file not in left_out]
    if "--stale" in flags:
        run_stale(runs, options, to_run)
    else:
        run_all(runs, options, left_out, to_run, is_thorough=is_thorough)
        print_left_out({}, left_out)
    for command in runs.failed:
        print("failed:", command, file=sys.stderr)
    return 1 if runs.failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
