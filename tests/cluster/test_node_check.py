"""The problems that a node finds with itself before motet starts there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from redis import Redis

from motet import __version__
from motet.cluster.application.registration import identify_base
from motet.cluster.launch import cluster_nodes
from motet.cluster.launch.cluster_nodes import NodeExpectations, problems_of_this_node
from motet.cluster.worker_device import WorkerDevice
from motet.workers.device_probe import DeviceFacts

BASE = Path(__file__).resolve().parents[2] / "examples" / "demo" / "base"
WORKER = WorkerDevice(
    device="auto",
    dtype="bfloat16",
    weights_dtype="dtype",
    kv_dtype="dtype",
    pool_bytes=None,
    gang_num_gpus=0.0,
    tensor_parallel=1,
)


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
        worker=WORKER,
    )
    with expected.prepared(60):
        yield expected
    assert not expected.marker_path.exists()
    with Redis.from_url(redis_url) as client:
        assert not client.exists(expected.redis_key)


def test_a_fit_node_has_nothing_to_say(expected: NodeExpectations) -> None:
    assert problems_of_this_node(expected) == []


def test_a_full_redis_keeps_no_launch_from_its_nodes(expected: NodeExpectations) -> None:
    with Redis.from_url(expected.redis_url) as client:
        client.config_set("maxmemory", 1)
        try:
            with replace(expected, redis_key="check of a full one").prepared(60):
                expected.marker_path.write_text(expected.marker)
                assert problems_of_this_node(replace(expected, redis_key="check of a full one")) == []
        finally:
            client.config_set("maxmemory", 0)


def test_everything_that_is_wrong_is_reported(expected: NodeExpectations, tmp_path: Path) -> None:
    wrong = replace(
        expected,
        version="0.0.1",
        model_path=tmp_path / "no model",
        marker_path=tmp_path / "not shared" / "marker",
        redis_url="redis://127.0.0.1:1",
        worker=replace(WORKER, pool_bytes=1 << 60),
    )
    version, model, folder, redis, memory = problems_of_this_node(wrong)
    assert version == f"motet {__version__} is installed, and 0.0.1 is needed"
    assert model.startswith(f"the model cannot be read from {tmp_path / 'no model'}")
    assert folder.startswith(f"{tmp_path / 'not shared'} is not the data folder, which all nodes must share")
    assert redis.startswith("the Redis server cannot be reached")
    assert memory.startswith("it has ") and memory.endswith(" of memory, less than the pool of one worker")


def test_a_node_for_routers_alone_is_not_checked_for_a_device(expected: NodeExpectations) -> None:
    wanted = replace(WORKER, device="cuda")
    assert problems_of_this_node(replace(expected, worker=wanted))
    assert problems_of_this_node(replace(expected, worker=None)) == []


def gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] = (9, 0)) -> None:
    """This node has one, of 80 GB, which Ray may hide from processes that did not request it."""
    facts = DeviceFacts("cuda", 80 << 30, capability)
    monkeypatch.setattr(cluster_nodes, "probe_device", lambda name: DeviceFacts("cpu") if name == "cpu" else facts)
    monkeypatch.setattr(cluster_nodes, "probe_counted_device", lambda name: facts)


def refusal(expected: NodeExpectations, num_workers: int = 1, **settings: Any) -> str:
    """What the node says of a gang with these settings; empty: nothing."""
    wanted = replace(expected, worker=replace(WORKER, **settings), num_workers=num_workers)
    return " and ".join(problems_of_this_node(wanted))


def test_a_node_without_a_gpu_refuses_what_needs_one(expected: NodeExpectations) -> None:
    assert refusal(expected, weights_dtype="float8") == (
        "a gang could not start there: --weights-dtype = 'float8': weights in float8 are for GPUs of compute "
        "capability 9.0 or more: CPUs serve those of dtype and int8"
    )
    assert refusal(expected, device="cuda").startswith("a gang could not start there: device = 'cuda': torch sees no")
    assert refusal(expected, dtype="float32", num_workers=2) == ""


def test_a_node_with_a_gpu_refuses_what_it_cannot_serve(
    expected: NodeExpectations, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu(monkeypatch)
    assert refusal(expected, dtype="float32").startswith(
        "a gang could not start there: --dtype = 'float32': float32 is not served on a GPU"
    )
    assert refusal(expected, weights_dtype="float8") == ""
    assert refusal(expected, pool_bytes=1 << 50) == "a GPU of it has 80 GiB of memory, less than the pool of one worker"
    gpu(monkeypatch, (8, 6))
    assert refusal(expected, weights_dtype="float8").endswith(
        "this GPU has the compute capability 8.6, and 9.0 or more is needed: weights of dtype are served"
    )


def test_a_pool_in_a_gpus_memory_takes_none_of_the_nodes(
    expected: NodeExpectations, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu(monkeypatch)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=16 << 30))
    assert refusal(expected, pool_bytes=60 << 30) == ""
    assert refusal(expected, pool_bytes=60 << 30, device="cpu") != ""


def test_workers_do_not_come_to_one_gpu_that_ray_does_not_count(
    expected: NodeExpectations, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu(monkeypatch)
    said = refusal(expected, num_workers=2)
    assert "--gang-num-gpus = 0.0: gangs that share a GPU would each take what the others have left of it" in said
    assert refusal(expected, num_workers=2, pool_bytes=1 << 30) == ""
    assert refusal(expected, num_workers=2, pool_bytes=50 << 30) == (
        "a GPU of it has 80 GiB of memory, less than the pools of the 2 workers that share it"
    )
    assert refusal(expected, num_workers=9, pool_bytes=30 << 30, gang_num_gpus=0.5) == ""
    assert "the pools of the 4 workers" in refusal(expected, num_workers=9, pool_bytes=30 << 30, gang_num_gpus=0.25)
    assert refusal(expected, num_workers=1) == refusal(expected, num_workers=8, gang_num_gpus=1.0) == ""
    said = refusal(expected, num_workers=2, tensor_parallel=2, pool_bytes=1 << 30)
    assert "--gang-num-gpus = 0.0: the workers of a gang need a GPU each" in said


def test_another_folder_model_and_redis_of_the_same_name_are_noticed(expected: NodeExpectations) -> None:
    other = replace(expected, fingerprint="another", marker="another")
    model, folder, redis = problems_of_this_node(other)
    assert model == f"the model in {BASE} is another one"
    assert folder == f"{expected.marker_path.parent} is another folder: all nodes must share the data folder"
    assert redis.startswith("what answers at the address of the Redis server is another one")
