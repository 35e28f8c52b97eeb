"""The problems that a node finds with itself before motet starts there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from redis import Redis

from motet import __version__
from motet.cluster.application.base_fingerprint import identify_base
from motet.cluster.launch.node_check import NodeExpectations, problems_of_this_node

BASE = Path(__file__).resolve().parents[2] / "examples" / "demo" / "base"


@pytest.fixture
def expected(tmp_path: Path, redis_url: str) -> Iterator[NodeExpectations]:
    expected = NodeExpectations(
        version=__version__,
        model_path=BASE,
        fingerprint=identify_base(BASE, "").fingerprint,
        marker_path=tmp_path / "marker",
        marker="1234",
        redis_url=redis_url,
        redis_key="node check",
        memory_bytes=1 << 20,
    )
    with expected.prepared(60):
        yield expected
    assert not expected.marker_path.exists()
    with Redis.from_url(redis_url) as client:
        assert not client.exists(expected.redis_key)


def test_a_fit_node_has_nothing_to_say(expected: NodeExpectations) -> None:
    assert problems_of_this_node(expected) == []


def test_everything_that_is_wrong_is_told(expected: NodeExpectations, tmp_path: Path) -> None:
    wrong = replace(
        expected,
        version="0.0.1",
        model_path=tmp_path / "no model",
        marker_path=tmp_path / "not shared" / "marker",
        redis_url="redis://127.0.0.1:1",
        memory_bytes=1 << 60,
    )
    version, model, folder, redis, memory = problems_of_this_node(wrong)
    assert version == f"motet {__version__} is installed, and 0.0.1 is needed"
    assert model.startswith(f"the model cannot be read from {tmp_path / 'no model'}")
    assert folder.startswith(f"{tmp_path / 'not shared'} is not the data folder, which all nodes must share")
    assert redis.startswith("the Redis server cannot be reached")
    assert "less than the pool" in memory


def test_another_folder_model_and_redis_of_the_same_name_are_noticed(expected: NodeExpectations) -> None:
    other = replace(expected, fingerprint="another", marker="another")
    model, folder, redis = problems_of_this_node(other)
    assert model == f"the model in {BASE} is another one"
    assert folder == f"{expected.marker_path.parent} is another folder: all nodes must share the data folder"
    assert redis.startswith("what answers at the address of the Redis server is another one")
