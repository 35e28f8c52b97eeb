"""Runs the tests for `scripts/test`, in its environment. That file and CONTRIBUTING.md describe the usage.

Two lanes run at once. One runs the checks and the tests without Ray, distributed over the cores. The other runs tests
that start Ray, one after the other, and mostly waits. The first lane has a lower priority, because Ray gives up on a
node that is slow to start. Files that start a motet on one machine, and measure no times, are taken one by one by the
lane that has finished its own. Tests in `tests/interpreted` are a separate run: Triton's interpreter is chosen for a
whole process.

Failed tests run once more, alone, when both lanes have ended, because a few fail only beside others. They are listed at
the end with their errors, whether or not they pass then.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from motet.tests.rigs.passed_files import ROOT, covered_files, standing

# schemathesis' fixtures take half a second to load, and no test uses them.
PYTEST = [sys.executable, "-m", "pytest", "-p", "no:schemathesis"]
SHARED_OUT = ["-n", "auto", "--maxprocesses", "4", "--no-loadscope-reorder", "--dist", "loadfile"]
INTERPRETED = "tests/interpreted"
WITH_RAY = ["tests/hostile", "tests/whole"]  # where all tests that start Ray are
EITHER_LANES = [  # of these, those that may run beside one another, the longest first
    f"tests/whole/test_{name}.py"
    for name in (
        *("sums_under_kills", "rolling_update", "docs_commands", "end_to_end", "rl_loop", "scaling_for_real", "launch"),
        "tenants_day",
    )
]
OLDEST_REDIS = ROOT / ".venv" / "redis" / "redis-server"  # scripts/redis puts it there
ON_OLDEST_REDIS = [  # what differs between servers: full memory, numbers in scripts, replies
    "tests/router/test_full_redis.py",
    *(
        f"tests/adapters/test_{name}.py"
        for name in (
            "ledger",
            "registry",
            "stored_counts",
            "tenant_registry",
            "versions",
            "canary_counts",
            "lua_script",
            "record_store",
            "registry_layout",
        )
    ),
]
FLAGS = ("--all", "--stale", "--quick", "--busy", "--durations")
MAX_RUN_AGAIN = 3  # failed tests; more are not a coincidence


# The lowest priority. Linux may share the processor between sessions, where `nice` has an effect only within one.
YIELDING = ["sh", "-c", '{ echo 19 >/proc/self/autogroup; } 2>/dev/null; exec nice -n 19 "$@"', "sh"]


class Runs:
    """Runs commands in a folder and remembers which failed."""

    def __init__(self, caches: Path, root: Path = ROOT) -> None:
        self.failed: list[str] = []
        self.failed_beside_others: list[str] = []  # tests that passed alone
        self._caches = caches  # folders of pytest's caches
        self._root = root
        self._failed_tests: dict[str, list[str]] = {}  # by command, if only tests failed
        self._running: set[subprocess.Popen[str]] = set()
        self._either_lanes: deque[Sequence[str]] = deque()
        self._is_interrupted = False

    def run(self, *command: str) -> None:
        print("==", " ".join(command), flush=True)
        if subprocess.call(command, cwd=self._root):
            self.failed.append(" ".join(command))

    def run_lanes(
        self,
        first: Sequence[Sequence[str]],
        yielding: Sequence[Sequence[str]],
        either_lanes: Sequence[Sequence[str]] = (),
    ) -> None:
        """Runs both lists of commands at once, each in its order. The second has the lowest priority.

        `either_lanes`: commands that a lane takes one by one when it has run its own.
        """
        self._either_lanes = deque(either_lanes)
        # The commands have sessions of their own, and would outlive this process.
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        lanes = [
            threading.Thread(target=self._run_lane, args=("ray", first, [])),
            threading.Thread(target=self._run_lane, args=("   ", yielding, YIELDING)),
        ]
        for lane in lanes:
            lane.start()
        try:
            for lane in lanes:
                lane.join()
        except KeyboardInterrupt:
            self._is_interrupted = True
            for process in set(self._running):
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGINT)
            raise
        finally:
            signal.signal(signal.SIGTERM, before)

    def _run_lane(self, name: str, commands: Sequence[Sequence[str]], wrapper: Sequence[str]) -> None:
        for command in commands:
            self._run_in_lane(name, command, wrapper)
        while not self._is_interrupted:
            try:
                command = self._either_lanes.popleft()
            except IndexError:
                return
            self._run_in_lane(name, command, ())

    def _run_in_lane(self, name: str, command: Sequence[str], wrapper: Sequence[str]) -> None:
        if self._is_interrupted:
            return
        shown = " ".join(command)
        self.failed.append(shown)  # until it has passed, so that an error that ends this thread is noticed
        print(f"{name} | ==", shown, flush=True)
        cache = Path(tempfile.mkdtemp(dir=self._caches))
        cached = ["-o", f"cache_dir={cache}"] if command[: len(PYTEST)] == PYTEST else []
        process = subprocess.Popen(
            [*wrapper, *command, *cached],
            cwd=self._root,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        with process:
            self._running.add(process)
            assert process.stdout is not None
            for line in process.stdout:
                print(f"{name} | {line}", end="", flush=True)
            self._running.discard(process)
        if process.returncode == 0:
            self.failed.remove(shown)
        failed_tests = cache / "v/cache/lastfailed"
        if process.returncode == pytest.ExitCode.TESTS_FAILED and failed_tests.exists():
            self._failed_tests[shown] = list(json.loads(failed_tests.read_text()))

    def run_failed_again(self) -> None:
        """Runs tests that failed in a lane again, alone, if they are few."""
        if sum(map(len, self._failed_tests.values())) > MAX_RUN_AGAIN:
            return
        for shown, tests in self._failed_tests.items():
            print("== run again, alone:", *tests, flush=True)
            server = ["--redis-server", str(OLDEST_REDIS)] if str(OLDEST_REDIS) in shown else []
            if subprocess.call([*PYTEST, *server, *tests], cwd=self._root) == 0:
                self.failed.remove(shown)
                self.failed_beside_others += tests


def run_all(
    runs: Runs, options: Sequence[str], left_out: Sequence[str], stale: Sequence[str], *, is_thorough: bool
) -> None:
    """Runs all checks and all tests, except the files that are left out."""
    whole = ["--thorough"] if is_thorough else []
    ignored = [f"--ignore={file}" for file in left_out]
    interpreted = [file for file in stale if file.startswith(INTERPRETED)]
    on_oldest = ["--redis-server", str(OLDEST_REDIS), *ON_OLDEST_REDIS]
    with_ray = [*PYTEST, "-m", "cluster", *whole, *options]
    runs.run_lanes(
        [[*with_ray, *(f"--ignore={file}" for file in EITHER_LANES), *WITH_RAY]],
        [
            ["scripts/check"],
            # Before the long run: its few files leave cores free, which tests of Ray use only while there are any.
            *([[*PYTEST, *SHARED_OUT, "--note-passed", *options, *interpreted]] if interpreted else []),
            [*PYTEST, "-m", "not cluster", *SHARED_OUT, "--note-passed", *whole, *options, *ignored],
            *([[*PYTEST, *SHARED_OUT, *whole, *options, *on_oldest]] if OLDEST_REDIS.exists() else []),
        ],
        [[*with_ray, file] for file in EITHER_LANES],
    )


def run_interpreted(runs: Runs, options: Sequence[str], files: Sequence[str]) -> None:
    if files:
        runs.run(*PYTEST, *SHARED_OUT, "--note-passed", *options, *files)


def run_stale(runs: Runs, options: Sequence[str], files: Sequence[str]) -> None:
    """Runs the files that may be left out, but whose sources have changed."""
    run_interpreted(runs, options, [file for file in files if file.startswith(INTERPRETED)])
    if others := [file for file in files if not file.startswith(INTERPRETED)]:
        runs.run(*PYTEST, *SHARED_OUT, "--note-passed", *options, *others)


def print_left_out(whys: Mapping[str, str | None], left_out: Sequence[str]) -> None:
    if left_out:
        print("== left out, because their sources have not changed since they passed (--all runs them):")
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
    # Tests start hundreds of processes, which should not all compile the same modules.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    to_run = [file for file in whys if file not in left_out]
    with tempfile.TemporaryDirectory() as caches:
        runs = Runs(Path(caches))
        if "--stale" in flags:
            run_stale(runs, options, to_run)
        else:
            run_all(runs, options, left_out, to_run, is_thorough=is_thorough)
            runs.run_failed_again()
            print_left_out({}, left_out)
    if runs.failed_beside_others:
        print("== DEFECTS: these failed beside other tests (see above) and passed alone:", file=sys.stderr)
        print(*(f"   {test}" for test in runs.failed_beside_others), sep="\n", file=sys.stderr)
    for command in runs.failed:
        print("failed:", command, file=sys.stderr)
    return 1 if runs.failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
