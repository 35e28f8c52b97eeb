"""The free bytes of the data folder's disk: measured, or not known, and a warning when few are left."""

from __future__ import annotations

import errno
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from motet.cluster.launch import launch
from motet.cluster.launch.launch import Deployment
from motet.cluster.replicas import disk_watch
from motet.cluster.replicas.disk_watch import DiskWatch, full_disk_warning
from motet.tests.rigs.patience import PATIENCE_S


class Disk:
    def __init__(self) -> None:
        self.free_bytes: int | OSError = 5
        self.num_measured = 0
        self.answers = threading.Event()
        self.answers.set()
        self.shown: list[int | None] = []
        self.watch = DiskWatch(Path("/data"), self.shown.append, self.measure)

    def measure(self, _path: Path) -> int:
        self.num_measured += 1
        self.answers.wait(PATIENCE_S)
        if isinstance(self.free_bytes, OSError):
            raise self.free_bytes
        return self.free_bytes


async def test_each_look_measures_and_a_disk_that_fails_has_no_number(caplog: pytest.LogCaptureFixture) -> None:
    disk = Disk()
    for free_bytes in (7, 0, OSError(errno.ESTALE, "stale"), OSError(errno.ESTALE, "stale"), 3):
        disk.free_bytes = free_bytes
        await disk.watch.look()
    assert disk.shown == [7, 0, None, None, 3]
    assert len(caplog.records) == 1 and "/data cannot be read" in caplog.text


async def test_a_disk_that_hangs_has_no_number_and_holds_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk()
    await disk.watch.look()
    monkeypatch.setattr(disk_watch, "ANSWER_S", 0.01)
    disk.answers.clear()
    for _ in range(3):
        await disk.watch.look()
    assert disk.shown == [5, None, None, None] and disk.num_measured == 2
    disk.answers.set()
    monkeypatch.setattr(disk_watch, "ANSWER_S", PATIENCE_S)
    await disk.watch.look()
    assert disk.shown[-1] == 5 and disk.num_measured == 2


def test_a_disk_with_few_free_bytes_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 20))
    assert full_disk_warning(tmp_path, 1 << 20) is None
    warning = full_disk_warning(tmp_path, 256 << 20)
    assert warning is not None and "1 MiB free, less than --min-free-bytes 256 MiB" in warning


def test_the_console_warns_each_time_that_the_disk_gets_full(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    deployment: Any = Deployment()
    deployment._config = SimpleNamespace(
        serving=SimpleNamespace(data_dir=Path("/data")), requests=SimpleNamespace(min_free_bytes=1)
    )
    looks = iter(["full 1", "full 2", None, "full 3"])

    def look(_path: Path, _min_free_bytes: int) -> str | None:
        if (warning := next(looks)) == "full 3":
            deployment._config = None  # as `stop` does
        return warning

    monkeypatch.setattr(launch, "DISK_POLL_S", 0.0)
    monkeypatch.setattr(launch, "full_disk_warning", look)
    deployment._watch_disk()
    assert [record.message for record in caplog.records] == ["full 1", "full 3"]
