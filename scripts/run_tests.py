"""What `scripts/test` does, once its environment is there. Its usage is in that file and in CONTRIBUTING.md.

Tests that need no Ray share the cores. Beside them run those that start Ray, one after the other: they wait most of the
time. Tests in `tests/interpreted` are a run of their own: Triton is interpreted in a whole process or not at all.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import IO

from motet.tests.rigs.passed_files import ROOT, covered_files, standing

PYTEST = [sys.executable, "-m", "pytest"]
SHARED_OUT = ["-n", "auto", "--maxprocesses", "4", "--no-loadscope-reorder", "--dist", "loadfile"]
INTERPRETED = "tests/interpreted"
NICENESS = 5  # of what computes beside Ray's tests, which have deadlines
FLAGS = ("--all", "--stale", "--quick", "--busy", "--durations")


class Runs:
    """Runs commands in the checkout and remembers which failed."""

    def __init__(self) -> None:
        self.failed: list[str] = []

    def run(self, *command: str) -> None:
        print("==", " ".join(command), flush=True)
        self._note(command, subprocess.call(command, cwd=ROOT, preexec_fn=lambda: os.nice(NICENESS)))

    def start_beside(self, *command: str) -> tuple[subprocess.Popen[bytes], IO[bytes]]:
        """The started command, and its output, which is for `wait_for`."""
        output = tempfile.TemporaryFile()  # noqa: SIM115  # wait_for closes it
        print("== beside the others, with its output after theirs:", " ".join(command), flush=True)
        return subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT), output

    def wait_for(self, process: subprocess.Popen[bytes], output: IO[bytes]) -> None:
        """Prints its output until it has ended."""
        command = [str(part) for part in process.args]  # type: ignore[union-attr]
        print("==", " ".join(command), flush=True)
        shown, has_ended = 0, False
        with output:
            while not has_ended:
                has_ended = process.poll() is not None  # before its last lines are read
                content = os.pread(output.fileno(), 1 << 24, shown)
                sys.stdout.buffer.write(content)
                sys.stdout.flush()
                shown += len(content)
                time.sleep(0.2)
        self._note(command, process.returncode)

    def _note(self, command: Sequence[str], status: int) -> None:
        if status:
            self.failed.append(" ".join(command))


def run_all(
    runs: Runs, options: Sequence[str], left_out: Sequence[str], stale: Sequence[str], *, is_thorough: bool
) -> None:
    """All checks and all tests but the files that are left out."""
    whole = ["--thorough"] if is_thorough else []
    beside = runs.start_beside(*PYTEST, "-m", "cluster", *whole, *options)
    try:
        runs.run("scripts/check")
        run_interpreted(runs, options, [file for file in stale if file.startswith(INTERPRETED)])
        ignored = [f"--ignore={file}" for file in left_out]
        runs.run(*PYTEST, "-m", "not cluster", *SHARED_OUT, "--note-passed", *whole, *options, *ignored)
    finally:
        runs.wait_for(*beside)


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
