"""A plan of MIG slices as Kubernetes takes it: the operator's configurations, nodes' labels, gangs' resources."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from .mig_planner import Plan
from .mig_profiles import Placement

CONFIG_LABEL = "nvidia.com/mig.config"  # the GPU operator's MIG manager reads it


@dataclass(frozen=True)
class MigManifests:
    """`node_configs`: by node that the plan needs, the value of its label. `settings`: by model, of motet."""

    config_map: dict[str, Any]
    node_configs: tuple[str, ...]
    settings: dict[str, dict[str, Any]]


def mig_manifests(plan: Plan, gpus_per_node: int, name: str = "motet-mig") -> MigManifests:
    """The last node may keep GPUs that are not cut; MIG is off there."""
    if gpus_per_node < 1:
        raise ValueError(f"gpus_per_node = {gpus_per_node}: a node has one GPU at least")
    nodes = [plan.gpus[first : first + gpus_per_node] for first in range(0, len(plan.gpus), gpus_per_node)]
    configs: dict[str, list[dict[str, Any]]] = {}
    node_configs = []
    for node in nodes:
        devices = _devices(node, gpus_per_node)
        known = next((key for key, value in configs.items() if value == devices), None)
        if known is None:
            known = f"{name}-{len(configs)}"
            configs[known] = devices
        node_configs.append(known)
    return MigManifests(
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": name},
            "data": {"config.yaml": _yaml({"version": "v1", "mig-configs": configs})},
        },
        tuple(node_configs),
        {
            gangs.model: {
                "gang-num-gpus": 1,
                "resource": [f"{gangs.profile.resource}=1"],
                "min-gangs": gangs.num_gangs,
                "max-gangs": gangs.num_gangs,
                "max-num-sequences": gangs.users,
            }
            for gangs in plan.gangs
        },
    )


def _devices(node: tuple[Placement, ...], gpus_per_node: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for index, placement in enumerate(node):
        mix = Counter(profile.name for profile, _ in placement)
        found.append({"devices": [index], "mig-enabled": True, "mig-devices": dict(sorted(mix.items()))})
    if len(node) < gpus_per_node:
        found.append({"devices": list(range(len(node), gpus_per_node)), "mig-enabled": False})
    return found


def _yaml(document: dict[str, Any]) -> str:
    import yaml  # loaded here: a plan does without

    text: str = yaml.safe_dump(document, sort_keys=False)
    return text
