"""Every overlay passes every check, and each check sees the fault that is planted for it, by its name."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import yaml

from motet.cluster.tools.file_problems import MAX_NAME_CHARS
from motet.tests.rigs.kube_tools import OVERLAY_NAMES, OVERLAYS, Manifest, kustomized, only
from motet.tests.rigs.manifest_checks import problems

Plant = Callable[[Manifest], object]
FULLEST = OVERLAYS / "incremental-upgrade"


@pytest.mark.parametrize("name", OVERLAY_NAMES)
def test_an_overlay_passes_every_check(name: str) -> None:
    assert list(problems(kustomized(OVERLAYS / name))) == []


def faults_of(plant: Plant, kind: str = "RayService", name: str = "motet") -> list[str]:
    """What is said of one manifest of the fullest overlay after something was planted there."""
    (manifest,) = (one for one in kustomized(FULLEST) if (one["kind"], one["metadata"]["name"]) == (kind, name))
    plant(manifest)
    return list(problems([manifest]))


def cluster(manifest: Manifest) -> Any:
    return manifest["spec"]["rayClusterConfig"]


def head(manifest: Manifest) -> Any:
    return cluster(manifest)["headGroupSpec"]


def gangs(manifest: Manifest) -> Any:
    return cluster(manifest)["workerGroupSpecs"][1]


def ray(group: Any) -> Any:
    """Ray's container of a group."""
    return group["template"]["spec"]["containers"][0]


def upgrade(manifest: Manifest) -> Any:
    return manifest["spec"]["upgradeStrategy"]["clusterUpgradeOptions"]


def in_serve(change: Callable[[Any], object]) -> Plant:
    """A change of what Serve reads."""

    def plant(manifest: Manifest) -> None:
        config = yaml.safe_load(manifest["spec"]["serveConfigV2"])
        change(config)
        manifest["spec"]["serveConfigV2"] = yaml.safe_dump(config)

    return plant


def set_variable(group: Any, name: str, value: str) -> object:
    return ray(group)["env"].append({"name": name, "value": value})


TYPOS: dict[str, Plant] = {
    "workerGroupSpec": lambda m: cluster(m).update(workerGroupSpec=[]),
    "rayStartParam": lambda m: gangs(m).update(rayStartParam={}),
    "imagePullPolcy": lambda m: ray(gangs(m)).update(imagePullPolcy="Always"),
    "terminationGracePeriodSecond": lambda m: gangs(m)["template"]["spec"].update(terminationGracePeriodSecond=1),
    "failureThreshhold": lambda m: ray(gangs(m))["readinessProbe"].update(failureThreshhold=1),
    "redisAdress": lambda m: cluster(m)["gcsFaultToleranceOptions"].update(redisAdress="redis://r:6379"),
    "stepSize": lambda m: upgrade(m).update(stepSize=5),
}
WRONG_TYPES: dict[str, Plant] = {
    "rayClusterConfig.workerGroupSpecs.1.replicas": lambda m: gangs(m).update(replicas="two"),
    "rayClusterConfig.headGroupSpec.rayStartParams.num-cpus": lambda m: head(m)["rayStartParams"].update(
        {"num-cpus": 0}
    ),
    "rayClusterDeletionDelaySeconds": lambda m: m["spec"].update(rayClusterDeletionDelaySeconds="660s"),
    "authOptions.mode": lambda m: cluster(m)["authOptions"].update(mode="tokens"),
    "serveConfigV2": lambda m: m["spec"].update(serveConfigV2={"applications": []}),
    "env.0.value": lambda m: ray(gangs(m))["env"][0].update(value=1),
}
SERVE: dict[str, Plant] = {
    "proxy_locations is not a field": in_serve(lambda c: c.update(proxy_locations="EveryNode")),
    "http_options.prot is not a field": in_serve(lambda c: c["http_options"].update(prot=8000)),
    "applications.0.deployment is not a field": in_serve(lambda c: c["applications"][0].update(deployment=[])),
    "deployments.0.num_replica is not a field": in_serve(
        lambda c: c["applications"][0].update(deployments=[{"name": "gang", "num_replica": 2}])
    ),
    "no deployment gangs": in_serve(lambda c: c["applications"][0].update(deployments=[{"name": "gangs"}])),
    "proxy_location: ": in_serve(lambda c: c.update(proxy_location="Everywhere")),
    "is not motet's application": in_serve(lambda c: c["applications"][0].update(import_path="motet.cluster:build")),
    "pool-byte = '…': there is no such setting": in_serve(
        lambda c: c["applications"][0]["args"].update({"pool-byte": "1GiB"})
    ),
    "pool-bytes": in_serve(lambda c: c["applications"][0]["args"].update({"pool-bytes": "much"})),
    "redis-url = '…': arguments show": in_serve(
        lambda c: c["applications"][0]["args"].update({"redis-url": "redis://r"})
    ),
    "replicas of gang do not take this over": in_serve(
        lambda c: c["applications"][0].update(deployments=[{"name": "gang", "user_config": {"tensor-parallel": 2}}])
    ),
}
OPERATOR: dict[str, Plant] = {
    f"longer than {MAX_NAME_CHARS}": lambda m: m["metadata"].update(name="m" * (MAX_NAME_CHARS + 1)),
    "is not a DNS label": lambda m: m["metadata"].update(name="7motet"),
    "is not a duration": lambda m: m["metadata"].update(annotations={"ray.io/initializing-timeout": "soon"}),
    "head has no container": lambda m: head(m)["template"]["spec"].update(containers=[]),
    "both in rayStartParams and beside": lambda m: head(m).update(resources={"CPU": "0"}),
    "labels in rayStartParams": lambda m: gangs(m)["rayStartParams"].update(labels="a=b"),
    "has an invalid label": lambda m: gangs(m).update(labels={"a b": "c"}),
    "needs minReplicas": lambda m: [cluster(m).pop("enableInTreeAutoscaling"), gangs(m).pop("minReplicas")],
    "minReplicas 9 and maxReplicas 8": lambda m: gangs(m).update(minReplicas=9),
    "cannot be suspended": lambda m: gangs(m).update(suspend=True),
    "has idleTimeoutSeconds": lambda m: [
        gangs(m).update(idleTimeoutSeconds=9),
        cluster(m)["autoscalerOptions"].update(version="v1"),
    ],
    "RAY_REDIS_ADDRESS is set beside": lambda m: set_variable(head(m), "RAY_REDIS_ADDRESS", "r:6379"),
    "RAY_REDIS_ADDRESS is set without": lambda m: [
        set_variable(head(m), "RAY_REDIS_ADDRESS", "r:6379"),
        cluster(m).pop("gcsFaultToleranceOptions"),
    ],
    "REDIS_PASSWORD is set beside": lambda m: set_variable(head(m), "REDIS_PASSWORD", "x"),
    "has redis-password beside": lambda m: head(m)["rayStartParams"].update({"redis-password": "x"}),
    "ray.io/ft-enabled": lambda m: m["metadata"].update(annotations={"ray.io/ft-enabled": "true"}),
    "ray.io/external-storage-namespace": lambda m: m["metadata"].update(
        annotations={"ray.io/external-storage-namespace": "x"}
    ),
    "backend rocksdb needs": lambda m: cluster(m)["gcsFaultToleranceOptions"].update(backend="rocksdb"),
    "storage is only for": lambda m: cluster(m)["gcsFaultToleranceOptions"].update(storage={"size": "1Gi"}),
    "redis username": lambda m: set_variable(head(m), "REDIS_USERNAME", "x"),
    "RAY_enable_autoscaler_v2 is set, but": lambda m: [
        cluster(m).pop("enableInTreeAutoscaling"),
        set_variable(head(m), "RAY_enable_autoscaler_v2", "1"),
    ],
    "beside autoscalerOptions.version": lambda m: set_variable(head(m), "RAY_enable_autoscaler_v2", "1"),
    "idleTimeoutSeconds is negative": lambda m: cluster(m)["autoscalerOptions"].update(idleTimeoutSeconds=-1),
    "is the operator's": lambda m: cluster(m)["autoscalerOptions"]["env"].append(
        {"name": "KUBERAY_GEN_AUTOSCALER_START_CMD", "value": "x"}
    ),
    "gangs has another restartPolicy": lambda m: gangs(m)["template"]["spec"].update(restartPolicy="Always"),
    "head has another restartPolicy": lambda m: head(m)["template"]["spec"].update(restartPolicy="OnFailure"),
    "cannot have enableK8sTokenAuth": lambda m: cluster(m)["authOptions"].update(enableK8sTokenAuth=True),
    "tokens want a rayVersion": lambda m: cluster(m).update(rayVersion="2.51.1"),
    "tokens want a rayVersion from": lambda m: cluster(m).pop("rayVersion"),
    "networkPolicy needs the feature gate": lambda m: cluster(m).update(networkPolicy={"mode": "DenyAll"}),
    "tlsOptions needs the feature gate": lambda m: cluster(m).update(tlsOptions={"enabled": True}),
    "historyServerOptions needs": lambda m: cluster(m).update(historyServerOptions={"collectorOptions": {}}),
    "must not have its own name": lambda m: head(m).update(headService={"metadata": {"name": "head"}}),
    "is none of": lambda m: m["spec"]["upgradeStrategy"].update(type="Rolling"),
    "rayClusterDeletionDelaySeconds: -1 is less": lambda m: m["spec"].update(rayClusterDeletionDelaySeconds=-1),
    "upgrade needs enableInTreeAutoscaling": lambda m: cluster(m).pop("enableInTreeAutoscaling"),
    "needs clusterUpgradeOptions": lambda m: m["spec"]["upgradeStrategy"].pop("clusterUpgradeOptions"),
    "maxSurgePercent is not between": lambda m: upgrade(m).update(maxSurgePercent=101),
    "stepSizePercent is not between": lambda m: upgrade(m).update(stepSizePercent=-1),
    "'stepSizePercent' is a required property": lambda m: upgrade(m).pop("stepSizePercent"),
    "stepSizePercent is more than maxSurgePercent": lambda m: upgrade(m).update(stepSizePercent=51),
    "intervalSeconds is not above 0": lambda m: upgrade(m).update(intervalSeconds=0),
    "needs a gatewayClassName": lambda m: upgrade(m).update(gatewayClassName=""),
}


@cache
def cases() -> list[tuple[str, Plant]]:
    return [case for group in (TYPOS, WRONG_TYPES, SERVE, OPERATOR) for case in group.items()]


@pytest.mark.parametrize(("name", "plant"), cases(), ids=[name for name, _ in cases()])
def test_a_planted_fault_is_caught_by_name(name: str, plant: Plant) -> None:
    found = faults_of(plant)
    assert any(name in one for one in found), found


@pytest.mark.parametrize(
    ("kind", "name", "plant", "said"),
    [
        ("PodDisruptionBudget", "motet-gangs", lambda m: m["spec"].update(minAvailble=1), "minAvailble"),
        ("NetworkPolicy", "motet-clients", lambda m: m["spec"]["ingress"][0].update(form=[]), "form"),
        ("NetworkPolicy", "motet-clients", lambda m: m["spec"].update(policyTypes="Ingress"), "policyTypes"),
        ("PersistentVolumeClaim", "motet-store", lambda m: m["spec"].update(storageClas="x"), "storageClas"),
        ("PrometheusRule", "motet", lambda m: m["spec"]["groups"][0]["rules"][0].update(exprs="up"), "exprs"),
        ("PodMonitor", "motet", lambda m: m["spec"]["podMetricsEndpoints"][0].update(prot="x"), "prot"),
        ("Service", "motet", lambda m: m.update(kind="Servce"), "no such kind"),
    ],
)
def test_a_fault_of_another_kind_is_caught_by_name(kind: str, name: str, plant: Plant, said: str) -> None:
    found = faults_of(plant, kind, name)
    assert any(said in one for one in found), found


def test_what_is_there_twice_is_seen() -> None:
    manifest = only(kustomized(OVERLAYS / "cpu-trial"), "StatefulSet")
    assert list(problems([manifest, manifest])) == ["StatefulSet motet-redis is there twice"]
