"""Whether gangs have room on a cluster's nodes: pure functions of what the nodes have and what is wanted.

Ray waits forever for a place that no node has. So motet checks first, and reports what is missing.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..resources import Placement

ROUNDING = 1e-6


@dataclass(frozen=True, kw_only=True)
class Node:
    """A living node, with all its resources or with its free ones: the caller decides."""

    name: str
    resources: Mapping[str, float]
    labels: Mapping[str, str]


@dataclass(frozen=True)
class Demand:
    """What one gang takes, or one router, which has one bundle."""

    what: str  # "gang"
    bundles: tuple[Mapping[str, float], ...]  # first the leader's, if it has one, then the workers'
    labels: Mapping[str, str]  # that each of its nodes must have
    placement: Placement

    @property
    def sum(self) -> dict[str, float]:
        return dict(sum((Counter(bundle) for bundle in self.bundles), Counter()))


def places(demand: Demand, nodes: Sequence[Node], limit: int) -> int:
    """How many such demands have room at once, counted up to `limit`."""
    eligible = [node for node in nodes if has_labels(node, demand)]
    if demand.placement == "strict-pack":
        return min(limit, sum(_times(demand.sum, node.resources) for node in eligible))
    for wanted in range(limit, 0, -1):
        # Large bundles first: small ones still fit into what is left, on whichever nodes that is.
        bundles = sorted(demand.bundles * wanted, key=lambda bundle: (len(bundle), sum(bundle.values())), reverse=True)
        if _fit(bundles, [dict(node.resources) for node in eligible]):
            return wanted
    return 0


def why_no_place(demand: Demand, wanted: int, nodes: Sequence[Node]) -> str | None:
    """A sentence that says what is missing for `wanted` of these at once; None: nothing."""
    found = places(demand, nodes, wanted)
    if found >= wanted:
        return None
    needs = describe(demand)
    if nodes and not any(has_labels(node, demand) for node in nodes):
        labels = ", ".join(f"{key}={value}" for key, value in demand.labels.items())
        return f"no node has the labels {labels}. {_describe_nodes(nodes, demand)}"
    if found:
        return f"the nodes have room for {found} of {wanted}, and {needs}. {_describe_nodes(nodes, demand)}"
    return f"no node has room: {needs}. {_describe_nodes(nodes, demand)}"


def can_host(demand: Demand, node: Node) -> bool:
    """Whether the node could hold at least one bundle of the demand."""
    return has_labels(node, demand) and any(_times(bundle, node.resources) for bundle in demand.bundles)


def has_labels(node: Node, demand: Demand) -> bool:
    return all(node.labels.get(key) == value for key, value in demand.labels.items())


def describe(demand: Demand) -> str:
    """A sentence that says what the demand takes, and whether all on one node."""
    if len(demand.bundles) == 1 or demand.placement == "strict-pack":
        where = "" if len(demand.bundles) == 1 else " of one node"
        return f"a {demand.what} takes {_amounts(demand.sum)}{where}"
    bundles = "; ".join(_amounts(bundle) for bundle in demand.bundles)
    return f"a {demand.what} takes, each on one node: {bundles}"


def _describe_nodes(nodes: Sequence[Node], demand: Demand) -> str:
    names = sorted({name for bundle in demand.bundles for name in bundle}, key=lambda name: (name not in "CPU", name))
    found = []
    for node in nodes:
        has = _amounts({name: node.resources.get(name, 0.0) for name in names})
        labels = "".join(f", {key}={node.labels.get(key, 'none')}" for key in demand.labels)
        found.append(f"{node.name} has {has}{labels}")
    return "; ".join(found) or "there is no node"


def _amounts(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{round(amount, 4):g} {name}" for name, amount in resources.items()) or "nothing"


def _times(demand: Mapping[str, float], resources: Mapping[str, float]) -> int:
    """How often the demand goes into the resources; a demand of nothing goes without end."""
    if not demand:
        return sys.maxsize
    return min(int((resources.get(name, 0.0) + ROUNDING) / amount) for name, amount in demand.items())


def _fit(bundles: Iterable[Mapping[str, float]], free: list[dict[str, float]]) -> bool:
    """First fit; `free` is used up."""
    for bundle in bundles:
        node = next((node for node in free if _times(bundle, node)), None)
        if node is None:
            return False
        for name, amount in bundle.items():
            node[name] -= amount
    return True
