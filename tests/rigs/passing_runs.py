"""The plugin that notes in `tests/passed.json` which of the covered test files passed: `pytest --note-passed`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from pathlib import Path

import pytest

from motet.tests.rigs.imports import ROOT
from motet.tests.rigs.passed_files import PassedFiles, covered_files, standing


class PassingRuns:
    """Notes a file if each test of it was run and passed, and its sources are still those that it began with.

    A skipped test has not passed, but for one of native code that this processor lacks the features for: the record
    names the features. A run of some tests of a file must not use this plugin.
    """

    def __init__(self, root: Path = ROOT) -> None:
        self._root = root
        self._native = {file for file, group in covered_files(root).items() if group.is_native}
        self._began = self._now()
        self._wanted: defaultdict[str, set[str]] = defaultdict(set)
        self._passed: set[str] = set()
        self._failed: set[str] = set()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._want([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Collection[str]) -> None:
        self._want(ids)

    def _want(self, ids: Collection[str]) -> None:
        for test in ids:
            self._wanted[test.partition("::")[0]].add(test)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = report.nodeid.partition("::")[0]
        if report.skipped and file in self._native:
            self._passed.add(report.nodeid)
        elif not report.passed:
            self._failed.add(report.nodeid)
        elif report.when == "call":
            self._passed.add(report.nodeid)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        passed = self._passed - self._failed
        now = self._now()
        noted = {
            file: began
            for file, began in self._began.items()
            if self._wanted[file] and self._wanted[file] <= passed and now.get(file) == began
        }
        if noted:
            PassedFiles.read(self._root).add(noted)

    def _now(self) -> dict[str, tuple[str, str]]:
        return {file: (digest, used) for file, (digest, used, _) in standing(self._root).items()}
