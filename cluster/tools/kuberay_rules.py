"""What KubeRay 1.7's operator refuses beyond its schema, as far as a RayService of motet could break it.

After ValidateRayServiceMetadata, ValidateRayServiceSpec and ValidateRayClusterSpec of KubeRay v1.7.0
(ray-operator/controllers/ray/utils/validation.go, Apache-2.0), with the feature gates that are on by default and
RayServiceIncrementalUpgrade. The operator only emits an event, which users would see too late.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

Manifest = dict[str, Any]

MAX_NAME_CHARS = (
    63 - len("-serve-svc") - len("-abcde")
)  # of the service of a cluster that is named after the RayService
TIMEOUT_ANNOTATION = "ray.io/initializing-timeout"
DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
LABEL_KEY = re.compile(r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
RAY_RESOURCES = ("num-cpus", "num-gpus", "memory", "resources")
UPGRADES = ("NewClusterWithIncrementalUpgrade", "NewCluster", "None")
TOKEN_VERSION = (2, 52)
GATED = {
    "networkPolicy": "RayClusterNetworkPolicy",
    "tlsOptions": "RayClusterMTLS",
    "historyServerOptions": "RayClusterHistoryServer",
}


def operator_problems(ray_service: Manifest) -> Iterator[str]:
    """What the operator would refuse."""
    metadata, spec = ray_service["metadata"], ray_service["spec"]
    annotations = metadata.get("annotations", {})
    yield from _of_metadata(metadata["name"], annotations)
    cluster = spec["rayClusterConfig"]
    yield from _of_groups(cluster)
    yield from _of_head_recovery(cluster, annotations)
    yield from _of_autoscaling(cluster)
    yield from _of_authentication(cluster)
    for field, gate in GATED.items():
        if field in cluster:
            yield f"{field} needs the feature gate {gate}"
    if cluster["headGroupSpec"].get("headService", {}).get("metadata", {}).get("name"):
        yield "the head's service must not have its own name (headService)"
    yield from _of_upgrade(spec, cluster)


def _of_metadata(name: str, annotations: Mapping[str, str]) -> Iterator[str]:
    if len(name) > MAX_NAME_CHARS:
        yield f"the name {name} is longer than {MAX_NAME_CHARS} characters"
    if not DNS_LABEL.fullmatch(name):
        yield f"the name {name} is not a DNS label that begins with a letter"
    timeout = annotations.get(TIMEOUT_ANNOTATION, "1")
    if not re.fullmatch(r"(\d+(\.\d+)?(h|m|s|ms))+|\d+", timeout) or not re.search(r"[1-9]", timeout):
        yield f"{TIMEOUT_ANNOTATION} is not a duration: {timeout}"


def _of_groups(cluster: Manifest) -> Iterator[str]:
    head, workers = cluster["headGroupSpec"], cluster.get("workerGroupSpecs", [])
    for name, group in [("head", head), *((spec["groupName"], spec) for spec in workers)]:
        params = group.get("rayStartParams", {})
        if not group["template"]["spec"].get("containers"):
            yield f"{name} has no container"
        if group.get("resources") and any(params.get(resource) for resource in RAY_RESOURCES):
            yield f"{name} has resources both in rayStartParams and beside them"
        if "labels" in params:
            yield f"{name} has labels in rayStartParams"
        for key, value in group.get("labels", {}).items():
            if not LABEL_KEY.fullmatch(key) or not LABEL_VALUE.fullmatch(value):
                yield f"{name} has an invalid label: {key}={value}"
    scales = bool(cluster.get("enableInTreeAutoscaling"))
    for group in workers:
        name, min_pods, max_pods = group["groupName"], group.get("minReplicas"), group.get("maxReplicas")
        if not scales and (min_pods is None or max_pods is None):
            yield f"{name} needs minReplicas and maxReplicas where nothing scales"
        if min_pods is not None and max_pods is not None and not 0 <= min_pods <= max_pods:
            yield f"{name} has minReplicas {min_pods} and maxReplicas {max_pods}"
        if group.get("suspend"):
            yield f"{name} cannot be suspended"
        for field in ("idleTimeoutSeconds", "priority"):
            if group.get(field) and not _is_version_2(cluster):
                yield f"{name} has {field}, which wants the autoscaler's version 2"


def _of_head_recovery(cluster: Manifest, annotations: Mapping[str, str]) -> Iterator[str]:
    options, head = cluster.get("gcsFaultToleranceOptions"), cluster["headGroupSpec"]
    environment, params = _environment(head), head.get("rayStartParams", {})
    if options is None:
        if "RAY_REDIS_ADDRESS" in environment:
            yield "RAY_REDIS_ADDRESS is set without gcsFaultToleranceOptions"
    else:
        for name in ("RAY_REDIS_ADDRESS", "REDIS_PASSWORD"):
            if name in environment:
                yield f"{name} is set beside gcsFaultToleranceOptions"
        if params.get("redis-password"):
            yield "rayStartParams has redis-password beside gcsFaultToleranceOptions"
        for name in ("ray.io/ft-enabled", "ray.io/external-storage-namespace"):
            if annotations.get(name):
                yield f"the annotation {name} is set beside gcsFaultToleranceOptions"
        if options.get("backend", "redis") == "rocksdb":
            yield "the backend rocksdb needs the feature gate GCSFaultToleranceEmbeddedStorage"
        elif "storage" in options:
            yield "storage is only for the backend rocksdb"
    if params.get("redis-username") or "REDIS_USERNAME" in environment:
        yield "a redis username belongs into gcsFaultToleranceOptions"


def _of_autoscaling(cluster: Manifest) -> Iterator[str]:
    options = cluster.get("autoscalerOptions", {})
    is_named = "RAY_enable_autoscaler_v2" in _environment(cluster["headGroupSpec"])
    if not cluster.get("enableInTreeAutoscaling"):
        if _environment(cluster["headGroupSpec"]).get("RAY_enable_autoscaler_v2") in ("1", "true"):
            yield "RAY_enable_autoscaler_v2 is set, but not enableInTreeAutoscaling"
    elif is_named and "version" in options:
        yield "RAY_enable_autoscaler_v2 is set beside autoscalerOptions.version"
    if options.get("idleTimeoutSeconds", 0) < 0:
        yield "idleTimeoutSeconds is negative"
    if any(variable["name"] == "KUBERAY_GEN_AUTOSCALER_START_CMD" for variable in options.get("env", ())):
        yield "KUBERAY_GEN_AUTOSCALER_START_CMD is the operator's"
    if _is_version_2(cluster):
        groups = [("head", cluster["headGroupSpec"])]
        groups += [(spec["groupName"], spec) for spec in cluster.get("workerGroupSpecs", ())]
        for name, group in groups:
            if group["template"]["spec"].get("restartPolicy", "Never") != "Never":
                yield f"{name} has another restartPolicy than Never, with version 2 of the autoscaler"


def _of_authentication(cluster: Manifest) -> Iterator[str]:
    options = cluster.get("authOptions", {})
    if options.get("enableK8sTokenAuth"):
        yield "a RayService cannot have enableK8sTokenAuth"
    if options.get("mode") != "token":
        return
    numbers = re.match(r"(\d+)\.(\d+)", cluster.get("rayVersion", ""))
    if numbers is None or (int(numbers[1]), int(numbers[2])) < TOKEN_VERSION:
        yield f"tokens want a rayVersion from {'.'.join(map(str, TOKEN_VERSION))}.0"


def _of_upgrade(spec: Manifest, cluster: Manifest) -> Iterator[str]:
    strategy = spec.get("upgradeStrategy", {})
    kind = strategy.get("type", "NewCluster")
    if kind not in UPGRADES:
        yield f"upgradeStrategy.type {kind} is none of {', '.join(UPGRADES)}"
    if kind != UPGRADES[0]:
        return
    if not cluster.get("enableInTreeAutoscaling"):
        yield "an incremental upgrade needs enableInTreeAutoscaling"
    options = strategy.get("clusterUpgradeOptions")
    if options is None:
        yield "an incremental upgrade needs clusterUpgradeOptions"
        return
    surge, step = options.get("maxSurgePercent", 100), options["stepSizePercent"]  # which the schema wants
    if not 0 <= surge <= 100:
        yield "maxSurgePercent is not between 0 and 100"
    if not 0 <= step <= 100:
        yield "stepSizePercent is not between 0 and 100"
    elif step > surge:
        yield "stepSizePercent is more than maxSurgePercent"
    if options.get("intervalSeconds", 0) <= 0:
        yield "intervalSeconds is not above 0"
    if not options.get("gatewayClassName"):
        yield "an incremental upgrade needs a gatewayClassName"


def _is_version_2(cluster: Manifest) -> bool:
    return bool(cluster.get("enableInTreeAutoscaling")) and cluster.get("autoscalerOptions", {}).get("version") == "v2"


def _environment(group: Manifest) -> dict[str, Any]:
    """The environment of Ray's container, which is the first one."""
    containers = group["template"]["spec"].get("containers") or [{}]
    return {variable["name"]: variable.get("value") for variable in containers[0].get("env", ())}
