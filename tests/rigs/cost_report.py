"""What tests cost, by file: `pytest --by-file` prints seconds on the clock and of CPU at the end."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path

import pytest

FILES_SHOWN = 40
_KEY = "cpu_s"  # of a report's properties, which xdist carries from its workers


def _cpu_s() -> float:
    """CPU time of this process and of those that it started and that have ended."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


class CostReport:
    """A plugin that sums up each test's time and prints one line for each file, the most expensive first.

    Imports of a test file are not counted, nor is what a process spends that outlives its test.
    """

    def __init__(self) -> None:
        self._began_s = 0.0
        self._wall_s: defaultdict[str, float] = defaultdict(float)
        self._cpu_s: defaultdict[str, float] = defaultdict(float)
        self._session_began = (time.monotonic(), _cpu_s())

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self) -> None:
        self._began_s = _cpu_s()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        if call.when == "teardown":
            item.user_properties.append((_KEY, _cpu_s() - self._began_s))
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = report.nodeid.partition("::")[0]
        self._wall_s[file] += report.duration
        if report.when == "teardown":
            self._cpu_s[file] += sum(float(str(value)) for key, value in report.user_properties if key == _KEY)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("what tests cost, by file")
        terminalreporter.write_line(f"{'wall s':>8} {'CPU s':>8}")
        for file in sorted(self._wall_s, key=lambda file: -max(self._wall_s[file], self._cpu_s[file]))[:FILES_SHOWN]:
            terminalreporter.write_line(f"{self._wall_s[file]:8.1f} {self._cpu_s[file]:8.1f}  {Path(file)}")
        total = sum(self._wall_s.values()), sum(self._cpu_s.values())
        terminalreporter.write_line(f"{total[0]:8.1f} {total[1]:8.1f}  all {len(self._wall_s)} files")
