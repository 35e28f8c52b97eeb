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


def script() -> Any:
    spec = importlib.util.spec_from_file_location("run_tests", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # loading them takes a second each time
    return script().Runs(tmp_path, tmp_path)


def failed_of(
    runs: Any,
    first: Sequence[Sequence[str]],
    yielding: Sequence[Sequence[str]],
    either_lanes: Sequence[Sequence[str]] = (),
) -> list[str]:
    runs.run_lanes(first, yielding, either_lanes)
    failed: list[str] = runs.failed
    runs.failed = []
    return failed


def test_what_fails_in_either_lane_is_noted_and_what_passes_is_not(
    runs: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    passes, fails = python("print('one_that_passes')"), python("import_nothing()")
    assert failed_of(runs, [passes, fails], [passes]) == [" ".join(fails)]
    assert failed_of(runs, [passes], [fails, passes]) == [" ".join(fails)]
    assert "one_that_passes" in capfd.readouterr().out


def test_what_either_lane_may_take_runs_once_and_by_the_lane_that_is_through(runs: Any, tmp_path: Path) -> None:
    runs_of = tmp_path / "runs"

    def noted(name: str) -> list[str]:
        return python(f"import pathlib as p; p.Path({str(runs_of)!r}).open('a').write({name!r})")

    def after(name: str) -> list[str]:
        code = (
            f"import pathlib as p, time\nwhile {name!r} not in p.Path({str(runs_of)!r}).read_text(): time.sleep(0.01)"
        )
        return python(code)

    runs_of.touch()
    # The second lane waits until the first has taken both.
    assert failed_of(runs, [noted("a")], [after("c")], [noted("b"), noted("c")]) == []
    assert runs_of.read_text() == "abc"
    runs_of.write_text("")
    assert failed_of(runs, [after("c")], [noted("a")], [noted("b"), noted("c")]) == []
    assert runs_of.read_text() == "abc"
    fails = python("import_nothing()")
    assert failed_of(runs, [], [], [fails]) == [" ".join(fails)]


def test_the_files_that_either_lane_may_take_are_there() -> None:
    """A lane of pytest would not miss what its options ignore."""
    missing = [file for file in script().EITHER_LANES if not (ROOT / file).is_file()]
    assert missing == []


def test_odd_bytes_in_the_output_are_shown(runs: Any, capfd: pytest.CaptureFixture[str]) -> None:
    assert failed_of(runs, [], [python("import sys;sys.stdout.buffer.write(b'a\\xff_b\\n')")]) == []
    assert "a\ufffd_b" in capfd.readouterr().out


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_command_that_cannot_be_started_has_failed(runs: Any) -> None:
    assert failed_of(runs, [["/no-such-command"]], []) == ["/no-such-command"]


def test_a_terminated_run_ends_what_it_has_started(tmp_path: Path) -> None:
    begun, ended, second = (tmp_path / name for name in ("begun", "ended", "second"))
    waits = f"import time, pathlib as p\ntry:\n p.Path({str(begun)!r}).touch(); time.sleep({PATIENCE_S})\n"
    waits += f"finally:\n p.Path({str(ended)!r}).touch()"
    lane = [python(waits), python(f"import pathlib as p; p.Path({str(second)!r}).touch()")]
    code = f"import pathlib as p, sys; sys.path.insert(0, {str(SCRIPT.parent)!r}); import run_tests; "
    code += f"run_tests.Runs(p.Path({str(tmp_path)!r})).run_lanes([], {lane!r})"
    run = subprocess.Popen(python(code), stderr=subprocess.DEVNULL)
    eventually(begun.exists)
    run.terminate()
    assert run.wait(PATIENCE_S) != 0
    eventually(ended.exists)
    time.sleep(0.1)  # in which the next command would begin; seen too late it would only fail to be found
    assert not second.exists()


@pytest.mark.parametrize(("num_by_chance", "num_that_fail"), [(2, 0), (2, 1), (4, 0)])
def test_a_few_that_failed_run_again_alone_and_are_named(
    runs: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str], num_by_chance: int, num_that_fail: int
) -> None:
    """Those by chance fail the first time. More than a few are no chance."""
    file = tmp_path / "test_chance.py"
    seen = f"pathlib.Path({str(tmp_path)!r}, str(number))"
    file.write_text(
        f"""import pathlib, pytest
@pytest.mark.parametrize("number", range({num_by_chance}))
def test_chance(number):
    was_run = {seen}.exists()
    {seen}.touch()
    assert was_run
@pytest.mark.parametrize("number", range({num_that_fail}))
def test_fails(number):
    assert not "ever"
def test_passes():
    assert not pathlib.Path({str(tmp_path)!r}, "passed").exists(), "it runs once"
    pathlib.Path({str(tmp_path)!r}, "passed").touch()
"""
    )
    command = [*script().PYTEST, str(file)]
    assert failed_of(runs, [], [command]) == [" ".join(command)]
    runs.failed = [" ".join(command)]
    runs.run_failed_again()
    is_green = num_that_fail == 0 and num_by_chance <= script().MAX_RUN_AGAIN
    assert runs.failed == ([] if is_green else [" ".join(command)])
    named = [test.rpartition("::")[2] for test in runs.failed_beside_others]
    assert named == ([f"test_chance[{number}]" for number in range(num_by_chance)] if is_green else [])
    capfd.readouterr()
