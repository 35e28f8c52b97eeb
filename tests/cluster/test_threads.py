"""A worker's number of threads where no setting gives it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from motet.cluster import config as config_module
from motet.cluster.config import MotetConfig
from motet.cluster.resources import cpu_quota, threads_of_a_worker, usable_cores

BASE = Path(__file__).resolve().parents[2] / "examples" / "demo" / "base"


@pytest.mark.parametrize(
    ("num_cores", "num_gangs", "workers_per_gang", "num_threads"),
    [
        (1, 1, 1, 1),
        (2, 1, 1, 2),
        (2, 2, 1, 1),
        (3, 1, 1, 2),
        (4, 1, 1, 3),
        (8, 1, 1, 7),
        (8, 2, 1, 3),
        (8, 1, 2, 3),
        (8, 9, 1, 1),
    ],
)
def test_a_worker_has_its_share_of_what_is_left(
    num_cores: int, num_gangs: int, workers_per_gang: int, num_threads: int
) -> None:
    assert threads_of_a_worker(num_cores, num_gangs, workers_per_gang) == num_threads


def test_all_workers_together_leave_what_is_kept() -> None:
    for num_cores in range(3, 65):
        for num_gangs in range(1, 9):
            for workers in range(1, 5):
                taken = threads_of_a_worker(num_cores, num_gangs, workers, cores_kept=1) * num_gangs * workers
                assert taken <= max(num_cores - 1, num_gangs * workers)


V2 = {"membership": "0::/pod/box\n"}
V1 = {"membership": "3:cpuset:/other\n2:cpu,cpuacct:/pod/box\n0::/\n"}
HALF = "50000 100000\n"


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.max": HALF}, 0.5),
        (V2 | {"cpu.max": HALF}, 0.5),
        (V2 | {"pod/box/cpu.max": HALF, "pod/cpu.max": "max 100000\n"}, 0.5),
        (V2 | {"pod/box/cpu.max": "400000 100000\n", "pod/cpu.max": "300000 100000\n", "else/cpu.max": HALF}, 3.0),
        (V1 | {"cpu/pod/box/cpu.cfs_quota_us": "-1\n", "cpu/pod/box/cpu.cfs_period_us": "100000\n"}, None),
        (V1 | {"cpu/pod/box/cpu.cfs_quota_us": "200000\n", "cpu/pod/box/cpu.cfs_period_us": "100000\n"}, 2.0),
        (V1 | {"cpu/pod/cpu.cfs_quota_us": "200000\n", "cpu/pod/cpu.cfs_period_us": "100000\n"}, 2.0),
        (V1 | {"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2.0),
        (V1 | {"cpu/other/cpu.cfs_quota_us": "200000\n", "cpu/other/cpu.cfs_period_us": "100000\n"}, None),
    ],
)
def test_the_least_quota_of_a_process_and_what_is_above_it_holds(
    tmp_path: Path, files: dict[str, str], quota: float | None
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cpu_quota(tmp_path / "membership", tmp_path) == quota


def test_a_container_has_as_many_cores_as_its_quota(tmp_path: Path) -> None:
    given = usable_cores(tmp_path / "none", tmp_path)
    assert 1 <= given <= (os.cpu_count() or 1)
    for text, cores in (("max 100000", given), ("100000 100000", 1), ("50000 100000", 1), ("99900000 100000", given)):
        (tmp_path / "cpu.max").write_text(text)
        assert usable_cores(tmp_path / "none", tmp_path) == cores


def test_auto_is_resolved_by_where_the_gang_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_module, "usable_cores", lambda: 8)

    def threads(**given: object) -> int:
        return MotetConfig.of(model_path=BASE, data_dir=tmp_path, device="cpu", **given).engine.num_threads

    assert threads() == 7
    assert threads(max_gangs=2) == 3
    assert threads(tensor_parallel=2) == 3
    assert threads(num_threads=5, max_gangs=2) == 5  # what is said holds
    assert threads(address="auto") == 1
    assert threads(address="auto", gang_num_cpus=6.0) == 6
    assert threads(address="auto", gang_num_cpus=6.0, gang_num_gpus=1.0) == 1
