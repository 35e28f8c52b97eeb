"""Scales gangs and routers of a running RayService: the changes, and their order.

KubeRay compares the configurations of clusters without their numbers. So it hands a new `serveConfigV2` to
Serve, but leaves `replicas` and its bounds in a RayCluster that runs as they were: pods for more gangs never come.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from .file_problems import IMPORT_PATH, POLICY, Manifest

ROUTERS = "routers"  # the group of pods of routers


class CannotScale(ValueError):  # noqa: N818
    """The numbers cannot be taken over, and why."""


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """The wanted numbers; None: unchanged."""

    min_gangs: int | None = None
    max_gangs: int | None = None
    num_routers: int | None = None


@dataclass(frozen=True)
class Change:
    """A JSON patch (RFC 6902) of one object."""

    kind: str  # rayservice or raycluster
    name: str
    patch: Sequence[Mapping[str, Any]]


def active_cluster(ray_service: Manifest) -> str:
    """The name of the RayCluster that serves. Raises CannotScale while there is none, or a second one."""
    status = ray_service.get("status", {})
    if status.get("pendingServiceStatus", {}).get("rayClusterName"):
        raise CannotScale("an upgrade is under way: a second cluster starts. Scale when it has taken over")
    name: str | None = status.get("activeServiceStatus", {}).get("rayClusterName")
    if not name:
        raise CannotScale("no cluster of this RayService serves yet")
    return name


def scale_plan(ray_service: Manifest, ray_cluster: Manifest, target: Numbers, group: str | None) -> list[Change]:
    """The changes in their order. `group`: the pods for the gangs; None: there is one such group.

    Raises CannotScale.
    """
    config = yaml.safe_load(ray_service["spec"]["serveConfigV2"])
    scales = bool(ray_cluster["spec"].get("enableInTreeAutoscaling"))
    before, (min_gangs, max_gangs) = _bounds(config), _wanted_bounds(_bounds(config), target)
    if min_gangs != max_gangs and not scales:
        raise CannotScale("bounds that differ need Ray's autoscaler (autoscaling: true), which is not on")
    routers = _deployment(config, "router").get("num_replicas", 1)
    num_routers = routers if target.num_routers is None else target.num_routers
    is_less = max_gangs < before[1] or num_routers < routers
    if is_less and not scales:
        raise CannotScale("without Ray's autoscaler KubeRay would end any pod of a smaller group, also one that serves")
    if (before[0] == 0) != (min_gangs == 0):
        raise CannotScale("to or from 0 gangs args change as well (min-gangs): change the values, and apply them")
    _set(config, min_gangs, max_gangs, num_routers)
    group_specs = {
        key: value for key, value in ray_service["spec"]["rayClusterConfig"].items() if key == "workerGroupSpecs"
    }
    groups = group_specs["workerGroupSpecs"]
    name = group or _only_group(groups)
    # Other groups of gangs keep their numbers.
    other_groups = [other for other in groups if other["groupName"] not in (ROUTERS, name)]
    pods = {
        name: (
            min_gangs - sum(other["minReplicas"] for other in other_groups),
            max_gangs - sum(other["maxReplicas"] for other in other_groups),
        ),
        ROUTERS: (num_routers, None),
    }
    if min(pods[name][0], pods[name][1] or 0) < 0:
        raise CannotScale(
            f"the other groups of gangs have more pods than that: name one of them with --group, not {name}"
        )
    of_service = _group_patch(groups, "/spec/rayClusterConfig", pods, scales=scales)
    of_service.append(
        {"op": "replace", "path": "/spec/serveConfigV2", "value": yaml.safe_dump(config, sort_keys=False)}
    )
    of_cluster = _group_patch(ray_cluster["spec"]["workerGroupSpecs"], "/spec", pods, scales=scales)
    changes = [
        Change("raycluster", ray_cluster["metadata"]["name"], of_cluster),
        Change("rayservice", ray_service["metadata"]["name"], of_service),
    ]
    return changes[::-1] if is_less else changes  # pods come before their gangs and go after them


def _wanted_bounds(before: tuple[int, int], target: Numbers) -> tuple[int, int]:
    low = before[0] if target.min_gangs is None else target.min_gangs
    is_fixed = before[0] == before[1]
    high = target.max_gangs if target.max_gangs is not None else (low if is_fixed else before[1])
    if low > high:
        raise CannotScale(f"at least {low} gangs and at most {high} do not go together: give --max-gangs as well")
    if high < 1:
        raise CannotScale("at most 0 gangs: at least 1 is needed")
    return low, high


def _deployment(config: dict[str, Any], name: str) -> dict[str, Any]:
    """The deployment in motet's application; added if it is missing."""
    applications = [entry for entry in config["applications"] if entry["import_path"] == IMPORT_PATH]
    if len(applications) != 1:
        raise CannotScale(f"serveConfigV2 has {len(applications)} applications of motet: one is needed")
    deployments = applications[0].setdefault("deployments", [])
    for entry in deployments:
        if entry["name"] == name:
            deployment: dict[str, Any] = entry
            return deployment
    deployments.append({"name": name})
    new_deployment: dict[str, Any] = deployments[-1]
    return new_deployment


def _bounds(config: dict[str, Any]) -> tuple[int, int]:
    gang = _deployment(config, "gang")
    scaling = gang.get("autoscaling_config")
    if scaling is not None:
        return scaling.get("min_replicas", 1), scaling.get("max_replicas", 1)
    (application,) = (entry for entry in config["applications"] if entry["import_path"] == IMPORT_PATH)
    if {"min-gangs", "gangs", "max-gangs"} & application["args"].keys() and "num_replicas" not in gang:
        raise CannotScale(
            "args say how many gangs there are, and a change there replaces every process: apply a manifest of this "
            "version first"
        )
    count = gang.get("num_replicas", 1)
    return count, count


def _set(config: dict[str, Any], min_gangs: int, max_gangs: int, num_routers: int) -> None:
    _deployment(config, "router")["num_replicas"] = num_routers
    gang = _deployment(config, "gang")
    scaling = copy.deepcopy(gang.pop("autoscaling_config", None))
    gang.pop("num_replicas", None)
    if min_gangs == max_gangs and scaling is None:
        gang["num_replicas"] = min_gangs
        return
    scaling = scaling or {
        "upscale_delay_s": 0,
        "downscale_delay_s": 0,
        "downscale_to_zero_delay_s": 0,
        "look_back_period_s": 5,
        "metrics_interval_s": 1,
        "policy": {"policy_function": POLICY},
    }
    gang["autoscaling_config"] = {**scaling, "min_replicas": min_gangs, "max_replicas": max_gangs}


def _only_group(groups: Sequence[Manifest]) -> str:
    names = [spec["groupName"] for spec in groups if spec["groupName"] != ROUTERS]
    if len(names) != 1:
        raise CannotScale(f"the groups {', '.join(names)} are for gangs: say which one with --group")
    return str(names[0])


def _group_patch(
    groups: Sequence[Manifest], place: str, pods: Mapping[str, tuple[int, int | None]], *, scales: bool
) -> list[dict[str, Any]]:
    """`pods`: least and most of each group that changes; most None: what it was, raised if it is too small."""
    names = {spec["groupName"] for spec in groups}
    if missing := pods.keys() - names:
        raise CannotScale(
            f"there is no group of pods {', '.join(sorted(missing))}: there are {', '.join(sorted(names))}"
        )
    patch = []
    for number, group in enumerate(groups):
        if group["groupName"] not in pods:
            continue
        path = f"{place}/workerGroupSpecs/{number}"
        min_pods, max_pods = pods[group["groupName"]]
        if max_pods is None:
            # An update of routers starts all of them before it ends one: keep the room that there was for it.
            max_pods = max(min_pods, group["maxReplicas"] * min_pods // max(1, group["minReplicas"]))
        patch.append({"op": "test", "path": f"{path}/groupName", "value": group["groupName"]})
        values = {"minReplicas": min_pods, "maxReplicas": max_pods}
        if not scales:  # else Ray's autoscaler writes it
            values["replicas"] = min_pods
        patch += [{"op": "add", "path": f"{path}/{key}", "value": value} for key, value in values.items()]
    return patch
