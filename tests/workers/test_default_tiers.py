"""Host memory for KV where no setting says how much."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from motet.tests.rigs.part_configs import engine_config
from motet.workers import worker_builder
from motet.workers.config import default_kv_host_bytes
from motet.workers.memory.page_arrays import PoolGeometry
from motet.workers.models.state_places import StatePlaces
from motet.workers.scheduling.tier_traffic import TierSizes
from motet.workers.worker_builder import tier_sizes

GIB = 1 << 30


@pytest.mark.parametrize(
    ("pool", "machine", "tensor_parallel", "expected"),
    [(1, 64, 1, 1), (60, 256, 1, 15), (60, 64, 1, 8), (60, 1024, 8, 15), (60, 512, 8, 8), (1, 4, 1, 0.5)],
)
def test_the_default_is_a_quarter_of_the_pool_within_bounds(
    pool: int, machine: int, tensor_parallel: int, expected: float
) -> None:
    assert default_kv_host_bytes(pool * GIB, machine * GIB, tensor_parallel) == expected * GIB


@given(st.integers(1, 1 << 40), st.integers(1, 1 << 42), st.integers(1, 16))
def test_a_gang_on_one_machine_takes_an_eighth_of_it_at_most(pool: int, machine: int, tensor_parallel: int) -> None:
    assert default_kv_host_bytes(pool, machine, tensor_parallel) * tensor_parallel <= machine / 8


def test_only_what_no_setting_says_follows_from_the_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_builder, "usable_memory_bytes", lambda: 256 * GIB)
    geometry = PoolGeometry(4096, 32, 32 * 1024, 16, 8, 64, torch.bfloat16)  # pages of 2 MiB
    config = engine_config(tmp_path, tmp_path, kv_host_bytes=None, kv_disk_bytes=8 << 20)
    assert tier_sizes(config, geometry) == TierSizes(1024, 4)
    assert tier_sizes(replace(config, kv_host_bytes=64 << 20), geometry) == TierSizes(32, 4)
    assert tier_sizes(replace(config, kv_host_bytes=0, kv_disk_bytes=0), geometry) == TierSizes()
    assert tier_sizes(replace(config, prefix_cache=False), geometry) == TierSizes()
    assert tier_sizes(config, replace(geometry, state=StatePlaces(20, ()))) == TierSizes(1024, 4)
