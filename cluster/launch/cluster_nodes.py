"""The nodes of a running Ray cluster: whether motet has room there, and whether they are fit for it."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ... import __version__
from ...adapters.registry.registry_keys import PREFIX
from ..application.base_fingerprint import identify_base
from ..config import MotetConfig
from .feasibility import Demand, Node, can_host, places, why_no_place
from .node_check import NodeExpectations, problems_of_this_node

CHECK_TIMEOUT_S = 300.0  # of all nodes together; each may start processes first, and load torch from a cold disk
MARKER_TTL_S = 600


class CannotJoin(Exception):  # noqa: N818
    """The cluster cannot be used in its present state; the message says why and what would help."""


def check_room(config: MotetConfig) -> None:
    """Raises CannotJoin if the nodes could not hold the first gangs and the routers even if they were empty."""
    nodes = alive_nodes()
    if config.placement.address is None:
        remedy = "Ask for less, or start a cluster of several machines and give its --address"
    else:
        remedy = "Start nodes that have it, ask for less, or, where the cluster grows by itself, add --wait-for-nodes"
    for demand, wanted in demands(config):
        if (problem := why_no_place(demand, wanted, nodes)) is not None:
            raise CannotJoin(f"{wanted} {demand.what}{'s' * (wanted > 1)} cannot be placed: {problem}. {remedy}")


def room_taken(config: MotetConfig) -> list[str]:
    """A warning for each part of motet that does not fit into what others leave free at the moment."""
    nodes = free_nodes()
    found = [(demand, why_no_place(demand, wanted, nodes)) for demand, wanted in demands(config)]
    return [
        f"a {demand.what} must wait for others to leave: of what is free now, {problem}"
        for demand, problem in found
        if problem
    ]


def check_nodes(config: MotetConfig) -> None:
    """Has every node that may get a part of motet check itself. Raises CannotJoin with all that is wrong."""
    assert config.access.redis_url is not None
    wanted = [demand for demand, _ in demands(config)]
    hosts = [node for node in alive_nodes() if any(can_host(demand, node) for demand in wanted)]
    rooms = [room_for_workers(config, node) for node in hosts]
    marker = secrets.token_hex(8)
    expected = NodeExpectations(
        version=__version__,
        model_path=config.model_path,
        fingerprint=identify_base(config.model_path, config.serving.name).fingerprint,
        marker_path=config.serving.data_dir / f"joining-{marker}",
        marker=marker,
        redis_url=config.access.redis_url,
        redis_key=f"{PREFIX}joining:{marker}",
        worker=None,
    )
    of_each = [replace(expected, worker=config.worker_device if room else None, num_workers=room) for room in rooms]
    with expected.prepared(MARKER_TTL_S):
        problems = _examine_nodes(hosts, of_each)
    if problems:
        raise CannotJoin("the cluster is not ready for motet:\n" + "\n".join(f"- {line}" for line in problems))


def demands(config: MotetConfig) -> list[tuple[Demand, int]]:
    """The gangs and the routers that must have room at the start: what one takes, and how many there are."""
    placement = config.placement
    gang = Demand("gang", config.gang_bundles, dict(placement.gang_labels), placement.strategy)
    router = Demand("router", (dict(placement.router_resources),), {}, "strict-pack")
    return [(gang, max(1, config.scaling.min_gangs)), (router, placement.num_routers)]


def room_for_workers(config: MotetConfig, node: Node) -> int:
    """How many workers of gangs the node could hold at once, if it were empty."""
    worker = Demand("worker", config.gang_bundles[-1:], dict(config.placement.gang_labels), "strict-pack")
    return places(worker, [node], config.scaling_policy.max_gangs * config.placement.tensor_parallel)


def alive_nodes() -> list[Node]:
    """Living nodes with all their resources."""
    return [_node(node, node["Resources"]) for node in _ray_nodes()]


def addresses_of_nodes() -> dict[str, str]:
    """Addresses of living nodes, by node id."""
    return {node["NodeID"]: node["NodeManagerAddress"] for node in _ray_nodes()}


def free_nodes() -> list[Node]:
    """Living nodes with their free resources."""
    # Ray has no public call for the free resources of each node.
    from ray._private.state import available_resources_per_node

    free = available_resources_per_node()
    return [_node(node, free.get(node["NodeID"], {})) for node in _ray_nodes()]


def _ray_nodes() -> list[Mapping[str, Any]]:
    import ray

    return sorted((node for node in ray.nodes() if node["Alive"]), key=lambda node: str(node["NodeManagerAddress"]))


def _node(node: Mapping[str, Any], resources: Mapping[str, float]) -> Node:
    labels = {**(node.get("Labels") or {}), "ray.io/node-id": node["NodeID"]}
    return Node(name=node["NodeManagerAddress"], resources=dict(resources), labels=labels)


def _examine_nodes(nodes: Sequence[Node], of_each: Sequence[NodeExpectations]) -> list[str]:
    """The problems of all nodes, each after its node's name. A node without an answer is a problem, too."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ask = ray.remote(problems_of_this_node)
    calls = [
        ask.options(
            num_cpus=0,
            max_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.labels["ray.io/node-id"], soft=False),
        ).remote(expected)
        for node, expected in zip(nodes, of_each, strict=True)
    ]
    done, _ = ray.wait(calls, num_returns=len(calls), timeout=CHECK_TIMEOUT_S)
    found = []
    for node, answer in zip(nodes, calls, strict=True):
        if answer not in done:
            found.append(f"{node.name}: it did not answer within {CHECK_TIMEOUT_S:g} s")
            continue
        try:
            found += [f"{node.name}: {problem}" for problem in ray.get(answer)]
        except ray.exceptions.RayError as error:
            found.append(f"{node.name}: {_cause(error)}")
    return found


def _cause(error: Exception) -> str:
    text = str(error)
    if "No module named 'motet'" in text:
        return "motet is not installed there"
    if "No module named 'motet." in text or "AttributeError" in text:
        return f"another version of motet is installed there, and {__version__} is needed"
    return "it could not be checked: " + next((line for line in reversed(text.splitlines()) if line.strip()), text)
