"""What is checked on which nodes before gangs are started, with nodes that are only lists of what they have."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from motet.cluster.config import MotetConfig
from motet.cluster.launch import cluster_nodes
from motet.cluster.launch.cluster_nodes import (
    CannotJoin,
    Node,
    NodeExpectations,
    check_nodes,
    check_room,
    problems_of_this_node,
)

BASE = Path(__file__).resolve().parents[2] / "examples" / "demo" / "base"


def node(name: str, **resources: float) -> Node:
    return Node(name=name, resources=resources, labels={"ray.io/node-id": name})


def config(tmp_path: Path, **given: Any) -> MotetConfig:
    return MotetConfig.of(model_path=BASE, data_dir=tmp_path, **given)


@pytest.fixture
def requested(monkeypatch: pytest.MonkeyPatch) -> dict[str, NodeExpectations]:
    """What was checked on each node. All of them are this machine."""
    found: dict[str, NodeExpectations] = {}

    def ask(nodes: Sequence[Node], of_each: Sequence[NodeExpectations]) -> list[str]:
        found.update({node.name: expected for node, expected in zip(nodes, of_each, strict=True)})
        return [f"{name}: {problem}" for name, each in found.items() for problem in problems_of_this_node(each)]

    monkeypatch.setattr(cluster_nodes, "_examine_nodes", ask)
    return found


def test_nodes_for_gangs_are_checked_for_their_device_and_others_are_not(
    requested: dict[str, NodeExpectations], tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """float8 on a CPU is reported before any gang is started, and of the nodes that gangs may come to."""
    monkeypatch.setattr(cluster_nodes, "alive_nodes", lambda: [node("head", CPU=0), node("a", CPU=2), node("b", CPU=9)])
    wanted = config(tmp_path, address="auto", redis_url=redis_url, max_gangs=4)
    check_nodes(wanted)
    assert {name: each.num_workers for name, each in requested.items()} == {"head": 0, "a": 2, "b": 4}
    assert [each.worker is None for each in requested.values()] == [True, False, False]
    with pytest.raises(CannotJoin) as caught:
        check_nodes(config(tmp_path, address="auto", redis_url=redis_url, weights_dtype="float8"))
    assert str(caught.value).splitlines()[1:] == [
        f"- {name}: a gang could not start there: --weights-dtype = 'float8': weights in float8 are for GPUs of "
        "compute capability 9.0 or more: CPUs serve those of dtype and int8"
        for name in ("a", "b")
    ]


def test_a_machine_with_fewer_gpus_than_its_gangs_need_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray would wait for the others without end."""
    monkeypatch.setattr(cluster_nodes, "alive_nodes", lambda: [node("127.0.0.1", CPU=4, GPU=1)])
    check_room(config(tmp_path, gang_num_gpus=1.0))
    with pytest.raises(CannotJoin, match=r"2 gangs cannot be placed: .* room for 1 of 2, .*Ask for less") as caught:
        check_room(config(tmp_path, gang_num_gpus=1.0, min_gangs=2))
    assert "--wait-for-nodes" not in str(caught.value)
    with pytest.raises(CannotJoin, match="--wait-for-nodes"):
        check_room(config(tmp_path, gang_num_gpus=1.0, min_gangs=2, address="auto"))
