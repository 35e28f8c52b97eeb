"""Whether gangs have room, and the message if not."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.cluster.launch.cluster_nodes import Demand, Node, can_host, places, why_no_place
from motet.cluster.resources import PLACEMENTS, Placement

LEADER = {"CPU": 0.1}
MIG = "nvidia.com/mig-1g.10gb"


def node(name: str, labels: dict[str, str] | None = None, **resources: float) -> Node:
    return Node(name=name, resources=resources, labels=labels or {})


def gang(*bundles: dict[str, float], placement: Placement = "strict-pack", **labels: str) -> Demand:
    return Demand(part="gang", bundles=bundles, labels=labels, placement=placement)


def test_a_gang_on_one_node_needs_one_that_has_it_all() -> None:
    two = gang(LEADER, {"CPU": 1.0}, {"CPU": 1.0})
    assert why_no_place(two, 1, [node("a", CPU=2.1)]) is None
    halves = [node("a", CPU=1.1), node("b", CPU=1.1)]
    assert why_no_place(two, 1, halves) == (
        "no node has room: a gang takes 2.1 CPU of one node. a has 1.1 CPU; b has 1.1 CPU"
    )
    for placement in ("pack", "spread"):
        assert why_no_place(gang(LEADER, {"CPU": 1.0}, {"CPU": 1.0}, placement=placement), 1, halves) is None


def test_shares_add_up_without_rounding_errors() -> None:
    assert places(gang({"GPU": 0.1}), [node("a", GPU=1.0)], 100) == 10
    assert places(gang({"CPU": 0.1, "GPU": 0.3}), [node("a", CPU=0.3, GPU=0.9)], 100) == 3


def test_too_few_places_are_counted() -> None:
    one = gang({"CPU": 1.0, MIG: 1.0})
    nodes = [Node(name="a", resources={"CPU": 8.0, MIG: 2.0}, labels={}), node("b", CPU=8.0)]
    assert why_no_place(one, 2, nodes) is None
    assert why_no_place(one, 3, nodes) == (
        f"the nodes have room for 2 of 3, and a gang takes 1 CPU, 1 {MIG}. a has 8 CPU, 2 {MIG}; b has 8 CPU, 0 {MIG}"
    )


def test_labels_must_be_those_of_the_node() -> None:
    one = gang({"CPU": 1.0}, zone="east")
    nodes = [node("a", {"zone": "west"}, CPU=4.0), node("b", CPU=4.0)]
    problem = why_no_place(one, 1, nodes)
    assert problem == "no node has the labels zone=east. a has 4 CPU, zone=west; b has 4 CPU, zone=none"
    assert not can_host(one, nodes[0])
    assert why_no_place(one, 1, [*nodes, node("c", {"zone": "east"}, CPU=4.0)]) is None


def test_no_node_at_all() -> None:
    assert why_no_place(gang({"CPU": 1.0}), 1, []) == "no node has room: a gang takes 1 CPU. there is no node"


def test_a_demand_of_nothing_goes_anywhere() -> None:
    nothing = Demand(part="router", bundles=({},), labels={}, placement="strict-pack")
    assert why_no_place(nothing, 5, [node("a", CPU=0.0), *(node(str(n)) for n in range(4))]) is None
    assert why_no_place(nothing, 5, [node("a", CPU=0.0)]) is None
    assert can_host(nothing, node("a"))


def test_a_node_hosts_a_worker_though_not_the_whole_gang() -> None:
    spread = gang(LEADER, {"GPU": 1.0}, {"GPU": 1.0}, placement="spread")
    assert can_host(spread, node("a", GPU=1.0))
    assert can_host(spread, node("b", CPU=1.0))  # the leader
    assert not can_host(spread, node("c"))


@given(
    sizes=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    num_workers=st.integers(1, 4),
    limit=st.integers(1, 6),
    placement=st.sampled_from(PLACEMENTS),
)
def test_no_more_places_than_there_is(sizes: list[int], num_workers: int, limit: int, placement: Any) -> None:
    """With equal workers the right number is known: whole gangs on one node, or over all nodes together."""
    nodes = [node(str(number), GPU=float(size)) for number, size in enumerate(sizes)]
    demand = gang(*[{"GPU": 1.0}] * num_workers, placement=placement)
    whole = sum(size // num_workers for size in sizes) if placement == "strict-pack" else sum(sizes) // num_workers
    assert places(demand, nodes, limit) == min(limit, whole)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_leaders_take_what_workers_leave(placement: Placement) -> None:
    demand = gang(LEADER, {"CPU": 1.0}, placement=placement)
    assert places(demand, [node("a", CPU=1.0)], 1) == 0
    assert places(demand, [node("a", CPU=2.2)], 3) == 2
    assert places(demand, [node("a", CPU=1.0), node("b", CPU=0.1)], 3) == (0 if placement == "strict-pack" else 1)
