"""What leaves a test file out, and what makes it run again."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Literal

import pytest

from motet.tests.rigs.imports import ROOT
from motet.tests.rigs.passed_files import PassedFiles, Sources, covered_files, dependencies, sources, standing
from motet.tests.rigs.passing_runs import PassingRuns

ONE = "tests/kernels/test_native_linear.py"
TESTS = [f"{ONE}::{name}" for name in ("test_a", "test_b[x::y]")]


@cache
def all_sources() -> dict[str, Sources]:
    """Of each covered file."""
    return {file: sources(file, group) for file, group in covered_files().items()}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of all that is covered, in which everything has passed; a test leaves it as it found it."""
    return copied({file for one in all_sources().values() for file in one.files}, tmp_path_factory.mktemp("checkout"))


@pytest.fixture
def small_checkout(tmp_path: Path) -> Path:
    """Likewise, of one test file and its sources."""
    return copied(all_sources()[ONE].files, tmp_path)


def copied(files: Iterable[str], root: Path) -> Path:
    for file in files:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, root / file)
    found = standing(root)
    PassedFiles.read(root).add({file: (digest, used) for file, (digest, used, _) in found.items()})
    return root


def to_run(root: Path) -> dict[str, str]:
    """Why each file must run that must."""
    return {file: why for file, (_, _, why) in standing(root).items() if why is not None}


def test_what_passed_is_left_out_until_a_line_of_any_source_changes(checkout: Path) -> None:
    assert to_run(checkout) == {}
    users: dict[str, list[str]] = {}
    for test, own in all_sources().items():
        for file in own.files:
            users.setdefault(file, []).append(test)
    record = PassedFiles.read(checkout)
    for file, tests in users.items():
        path = checkout / file
        content = path.read_bytes()
        path.write_bytes(content + b"\n# a line\n")
        test = tests[len(file) % len(tests)]  # one of them
        digest = all_sources()[test].digest(checkout)
        assert record.why_to_run(test, digest, record.entries[test][1][0]) is not None, (file, test)
        path.write_bytes(content)
    assert to_run(checkout) == {}


def test_a_changed_kernel_makes_its_tests_run_and_no_others(checkout: Path) -> None:
    header = checkout / "kernels/cpp/attention.h"
    content = header.read_text()
    header.write_text(content.replace("namespace", "namespace ", 1))
    stale = to_run(checkout)
    header.write_text(content)
    assert set(stale.values()) == {"its sources have changed since it passed"}
    assert set(stale) == {file for file, own in all_sources().items() if "kernels/cpp/attention.h" in own.files}
    assert ONE in stale and "tests/kernels/test_sanitizers.py" in stale
    assert not any("triton" in file for file in stale)


@pytest.mark.parametrize(
    ("test", "source"),
    [
        ("tests/interpreted/test_triton_decodes.py", "kernels/gpu/attention_device.py"),
        ("tests/interpreted/test_triton_on_a_gpu.py", "workers/worker.py"),  # a process is started with its name
        ("tests/kernels/test_native.py", "kernels/cpp/floats.h"),
        ("tests/kernels/test_native.py", "tests/kernels/conftest.py"),
        ("tests/kernels/test_native.py", "tests/rigs/native_builds.py"),
        ("tests/kernels/test_sanitizers.py", "tests/kernels/test_native_lora.py"),
        ("tests/kernels/test_triton.py", "tests/kernels/compiled.md"),
        ("tests/kernels/test_first_run.py", "benchmarks/gpu/sweep.py"),
    ],
)
def test_sources_are_what_is_imported_read_or_started(test: str, source: str) -> None:
    assert test in all_sources()[test].files
    assert source in all_sources()[test].files


def test_a_new_import_makes_its_file_a_source(small_checkout: Path) -> None:
    (small_checkout / "kernels/new_one.py").write_text("import scipy\n")
    file = small_checkout / ONE
    file.write_text(file.read_text() + "\n\ndef late() -> None:\n    from motet.kernels import new_one\n")
    own = sources(ONE, covered_files(small_checkout)[ONE], small_checkout)
    assert "kernels/new_one.py" in own.files and "scipy" in own.foreign


def test_dependencies_have_versions_and_native_ones_the_machine() -> None:
    assert "torch 2." in dependencies({"torch", "os"}, is_native=False)
    native = dependencies({"torch"}, is_native=True)
    assert native.startswith(dependencies({"torch"}, is_native=False))
    assert len(native.split(", ")) == 4  # Python, torch, the compiler and the processor


def test_what_passed_elsewhere_must_run_here_and_stays_noted(tmp_path: Path) -> None:
    (tmp_path / ONE).parent.mkdir(parents=True)
    (tmp_path / ONE).touch()
    PassedFiles.read(tmp_path).add({ONE: ("a digest", "a processor with AVX2")})
    record = PassedFiles.read(tmp_path)
    why = record.why_to_run(ONE, "a digest", "a processor with AVX-512")
    assert why == "it has not passed with a processor with AVX-512"
    assert record.why_to_run("tests/kernels/test_native.py", "a digest", "any") == "it has not passed yet"
    record.add({ONE: ("a digest", "a processor with AVX-512")})
    assert PassedFiles.read(tmp_path).entries[ONE][1] == ["a processor with AVX-512", "a processor with AVX2"]
    record.add({ONE: ("another digest", "a processor with AVX2")})
    assert PassedFiles.read(tmp_path).entries == {ONE: ("another digest", ["a processor with AVX2"])}
    (tmp_path / ONE).unlink()
    record.add({})
    assert PassedFiles.read(tmp_path).entries == {}


Outcome = Literal["passed", "failed", "skipped"]


def reports(test: str, call: Outcome, teardown: Outcome = "passed") -> list[pytest.TestReport]:
    def report(when: Literal["setup", "call", "teardown"], outcome: Outcome) -> pytest.TestReport:
        return pytest.TestReport(test, ("", None, ""), {}, outcome, None, when)

    if call == "skipped":
        return [report("setup", "skipped"), report("teardown", "passed")]
    return [report("setup", "passed"), report("call", call), report("teardown", teardown)]


@pytest.mark.parametrize(
    ("ran", "is_noted"),
    [
        ([*reports(TESTS[0], "passed"), *reports(TESTS[1], "passed")], True),
        ([*reports(TESTS[0], "passed"), *reports(TESTS[1], "failed")], False),
        ([*reports(TESTS[0], "passed"), *reports(TESTS[1], "skipped")], True),  # native: see the test below
        ([*reports(TESTS[0], "passed"), *reports(TESTS[1], "passed", teardown="failed")], False),
        ([*reports(TESTS[0], "passed")], False),  # the run ended too soon
    ],
    ids=["passed", "failed", "skipped", "failed at its end", "was not run"],
)
def test_only_a_run_in_which_all_passed_is_noted(
    small_checkout: Path, ran: list[pytest.TestReport], is_noted: bool
) -> None:
    file = small_checkout / ONE
    file.write_text(file.read_text() + "\n# a change\n")
    assert ONE in to_run(small_checkout)
    run = PassingRuns(small_checkout)
    run.pytest_xdist_node_collection_finished(TESTS)
    for report in ran:
        run.pytest_runtest_logreport(report)
    run.pytest_sessionfinish()
    assert (ONE not in to_run(small_checkout)) is is_noted


def test_a_skipped_test_of_a_file_that_is_not_native_is_not_noted(tmp_path: Path) -> None:
    """The record names the processor of native ones alone."""
    file = "tests/kernels/test_triton_grids.py"
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).touch()
    run = PassingRuns(tmp_path)
    run.pytest_xdist_node_collection_finished([f"{file}::test_a"])
    for report in reports(f"{file}::test_a", "skipped"):
        run.pytest_runtest_logreport(report)
    run.pytest_sessionfinish()
    assert file in to_run(tmp_path)


def test_sources_that_change_during_the_run_are_not_noted(small_checkout: Path) -> None:
    file = small_checkout / ONE
    run = PassingRuns(small_checkout)
    run.pytest_xdist_node_collection_finished(TESTS)
    for report in [*reports(TESTS[0], "passed"), *reports(TESTS[1], "passed")]:
        run.pytest_runtest_logreport(report)
    file.write_text(file.read_text() + "\n# a change\n")
    run.pytest_sessionfinish()
    assert ONE in to_run(small_checkout)


def test_a_digest_has_the_names_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    (tmp_path / "b").write_text("x")
    assert Sources(("a",), frozenset()).digest(tmp_path) != Sources(("b",), frozenset()).digest(tmp_path)
