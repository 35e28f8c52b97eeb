"""The lanes of `scripts/run_tests.py`: what fails in one is seen, however it fails."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from motet.tests.rigs.imports import ROOT
from motet.tests.rigs.patience import PATIENCE_S, eventually

SCRIPT = ROOT / "scripts" / "run_tests.py"


def python(text: str) -> list[str]:
    return [sys.executable, "-c", text]


def failed_of(first: Sequence[Sequence[str]], yielding: Sequence[Sequence[str]]) -> list[str]:
    spec = importlib.util.spec_from_file_location("run_tests", SCRIPT)
    assert spec is not None and spec.loader is not None
    script: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    runs = script.Runs()
    runs.run_lanes(first, yielding)
    failed: list[str] = runs.failed
    return failed


def test_what_fails_in_either_lane_is_noted_and_what_passes_is_not(capfd: pytest.CaptureFixture[str]) -> None:
    passes, fails = python("print('one_that_passes')"), python("import_nothing()")
    assert failed_of([passes, fails], [passes]) == [" ".join(fails)]
    assert failed_of([passes], [fails, passes]) == [" ".join(fails)]
    assert "one_that_passes" in capfd.readouterr().out


def test_odd_bytes_in_the_output_are_shown(capfd: pytest.CaptureFixture[str]) -> None:
    assert failed_of([], [python("import sys;sys.stdout.buffer.write(b'a\\xff_b\\n')")]) == []
    assert "a\ufffd_b" in capfd.readouterr().out


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_command_that_cannot_be_started_has_failed() -> None:
    assert failed_of([["/no-such-command"]], []) == ["/no-such-command"]


def test_a_terminated_run_ends_what_it_has_started(tmp_path: Path) -> None:
    begun, ended, second = (tmp_path / name for name in ("begun", "ended", "second"))
    waits = f"import time, pathlib as p\ntry:\n p.Path({str(begun)!r}).touch(); time.sleep({PATIENCE_S})\n"
    waits += f"finally:\n p.Path({str(ended)!r}).touch()"
    lane = [python(waits), python(f"import pathlib as p; p.Path({str(second)!r}).touch()")]
    code = f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r}); import run_tests; "
    run = subprocess.Popen(python(code + f"run_tests.Runs().run_lanes([], {lane!r})"), stderr=subprocess.DEVNULL)
    eventually(begun.exists)
    run.terminate()
    assert run.wait(PATIENCE_S) != 0
    eventually(ended.exists)
    time.sleep(0.1)  # in which the next command would begin; seen too late it would only fail to be found
    assert not second.exists()
