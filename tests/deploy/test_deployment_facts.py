"""What manifests say agrees with the product, with Ray, and with itself."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from motet.cluster.launch.joined_cluster import SERVE_FLAGS
from motet.cluster.launch.local_serve import HUGE_PAGES, LASTING_STREAMS
from motet.cluster.settings.setting_field import fields_of
from motet.cluster.settings.settings import Settings
from motet.tests.rigs.kube_schemas import pod_templates
from motet.tests.rigs.kube_tools import OVERLAY_NAMES, OVERLAYS, ROOT, Manifest, kustomized, only
from motet.tests.rigs.serve_config import arguments

SETTINGS = {flag: field for field in fields_of(Settings) for flag in field.flags}
RAY_FOLDERS = ("_private", "serve/_private")  # of Ray, where it reads its environment
VARIABLES_OF_MOTET = {"MOTET_SECRETS_DIR"}  # of cluster/application
DRAIN = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"
SERVE_PORT, METRICS_PORTS = 8000, range(9400, 9408)

every_overlay = pytest.mark.parametrize("name", OVERLAY_NAMES)


def ray_service(name: str) -> Manifest:
    return only(kustomized(OVERLAYS / name), "RayService")


def containers(pod: Any) -> Iterator[Any]:
    yield from pod["spec"].get("initContainers", ())
    yield from pod["spec"]["containers"]


def environment(pod: Any) -> dict[str, str]:
    return {one["name"]: one["value"] for one in pod["spec"]["containers"][0]["env"]}


def pods(manifests: list[Manifest]) -> Iterator[tuple[str, Any]]:
    for manifest in manifests:
        if manifest["kind"] == "RayService":
            yield from pod_templates(manifest)
        elif manifest["kind"] == "StatefulSet":
            yield manifest["metadata"]["name"], manifest["spec"]["template"]


def setting(service: Manifest, key: str) -> Any:
    """As it holds for the rendered application."""
    given = arguments(service).get(key)
    field = SETTINGS[key]
    return field.default if given is None else field.converted(given)


@every_overlay
def test_serve_has_its_flags_on_every_node(name: str) -> None:
    wanted = SERVE_FLAGS | LASTING_STREAMS | HUGE_PAGES | {"RAY_SERVE_DEFAULT_HTTP_HOST": "0.0.0.0"}
    for group, pod in pod_templates(ray_service(name)):
        found = environment(pod)
        assert {key: found.get(key) for key in wanted} == wanted, group


def test_every_variable_is_read_by_somebody() -> None:
    import ray

    folder = Path(ray.__file__).parent
    text = "".join(path.read_text() for part in RAY_FOLDERS for path in (folder / part).glob("*.py"))
    text += (folder / "_raylet.so").read_bytes().decode("latin-1")  # the C++ side knows RAY_x as x
    for _, pod in pod_templates(ray_service("incremental-upgrade")):
        for variable in environment(pod):
            if variable.startswith("RAY_"):
                assert variable in text or variable.removeprefix("RAY_") in text, variable
            elif variable.startswith("MOTET_"):
                assert variable in VARIABLES_OF_MOTET, variable


@every_overlay
def test_who_ends_has_time_to(name: str) -> None:
    service = ray_service(name)
    router_drain_s = setting(service, "router-drain")
    assert service["spec"]["rayClusterDeletionDelaySeconds"] > router_drain_s
    for group, pod in pod_templates(service):
        drain_s = float(environment(pod)[DRAIN])
        assert router_drain_s < drain_s < pod["spec"]["terminationGracePeriodSeconds"], group


@every_overlay
def test_the_head_computes_nothing_and_has_room(name: str) -> None:
    head = ray_service(name)["spec"]["rayClusterConfig"]["headGroupSpec"]
    assert head["rayStartParams"]["num-cpus"] == "0"
    (container,) = head["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["memory"] == container["resources"]["requests"]["memory"]
    assert int(container["resources"]["requests"]["memory"].removesuffix("Gi")) >= 4


@every_overlay
def test_gangs_and_routers_fit_into_their_pods(name: str) -> None:
    """With what Ray is told, or finds in the limits, of a pod of each group."""
    service = ray_service(name)
    routers, gangs = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    workers = setting(service, "tensor-parallel")
    limits = gangs["template"]["spec"]["containers"][0]["resources"]["limits"]
    params = gangs["rayStartParams"]
    leader = 0.1 if workers > 1 else 0
    assert setting(service, "gang-num-cpus") * workers + leader <= float(limits["cpu"])
    gpus = sum(int(amount) for one, amount in limits.items() if one.endswith("gpu") or "/mig-" in one)
    assert setting(service, "gang-num-gpus") * workers == float(params.get("num-gpus", gpus))
    offered = yaml.safe_load(yaml.safe_load(params.get("resources", '"{}"')))
    assert dict(setting(service, "resource")) == offered
    assert all(limits[one] == str(amount) for one, amount in offered.items())

    of_routers = yaml.safe_load(yaml.safe_load(routers["rayStartParams"]["resources"]))
    ((resource, amount),) = setting(service, "router-resource")
    assert of_routers[resource] >= 2 * amount  # an update starts a router's successor before it ends
    assert routers["replicas"] >= setting(service, "routers")
    assert gangs["minReplicas"] == setting(service, "min-gangs")
    assert gangs["maxReplicas"] == (setting(service, "max-gangs") or max(setting(service, "min-gangs"), 1))


@every_overlay
def test_a_pod_without_a_proxy_can_be_ready(name: str) -> None:
    """Else its disruption budget counts it as broken for ever; behind a Gateway it must not be, as nothing listens."""
    routers, gangs = ray_service(name)["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    probes = [group["template"]["spec"]["containers"][0]["readinessProbe"]["httpGet"] for group in (routers, gangs)]
    assert probes[0] == {"path": "/-/healthz", "port": "serve"}
    behind_a_gateway = name == "incremental-upgrade"
    assert probes[1] == (probes[0] if behind_a_gateway else {"path": "/api/healthz", "port": 52365})
    if behind_a_gateway:
        assert setting(ray_service(name), "placement") == "strict-pack"


@every_overlay
def test_no_container_can_do_what_it_need_not(name: str) -> None:
    for group, pod in pods(kustomized(OVERLAYS / name)):
        spec = pod["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True and spec["securityContext"]["runAsUser"] == 1000
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in containers(pod):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }, group
            for bound in ("requests", "limits"):
                assert {"cpu", "memory", "ephemeral-storage"} <= container["resources"][bound].keys(), group
            mounts = {one["name"] for one in container["volumeMounts"]}
            assert mounts <= {one["name"] for one in spec["volumes"]} | {"data"}, group  # a claim of its own
        secrets = next(one["secret"] for one in spec["volumes"] if one["name"] == "secrets")
        assert secrets["defaultMode"] == 0o400 and "fsGroup" in spec["securityContext"]


def test_only_the_autoscaler_has_a_token_of_the_api_server() -> None:
    cluster = ray_service("high-availability")["spec"]["rayClusterConfig"]
    assert "api-token" in {one["name"] for one in cluster["autoscalerOptions"]["volumeMounts"]}
    for _, pod in pod_templates(ray_service("high-availability")):
        assert "api-token" not in {mount["name"] for one in containers(pod) for mount in one["volumeMounts"]}


@every_overlay
def test_selectors_find_their_pods(name: str) -> None:
    manifests = kustomized(OVERLAYS / name)
    labels = [pod["metadata"]["labels"] for _, pod in pods(manifests)]
    for manifest in manifests:
        spec = manifest.get("spec", {})
        selector = spec.get("podSelector") or spec.get("selector")
        if manifest["kind"] not in ("NetworkPolicy", "PodDisruptionBudget", "Service", "PodMonitor") or not selector:
            continue
        wanted = selector.get("matchLabels", {} if "matchExpressions" in selector else selector)
        assert any(wanted.items() <= one.items() for one in labels), manifest["metadata"]["name"]


@every_overlay
def test_a_budget_lets_a_node_be_drained(name: str) -> None:
    """Kubernetes can count pods of a RayCluster only against a whole number."""
    routers, gangs = ray_service(name)["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    least = {"motet-routers": routers["minReplicas"], "motet-gangs": gangs["minReplicas"]}
    for budget in (one for one in kustomized(OVERLAYS / name) if one["kind"] == "PodDisruptionBudget"):
        assert budget["spec"].keys() == {"minAvailable", "unhealthyPodEvictionPolicy", "selector"}
        assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
        assert budget["spec"]["minAvailable"] < least[budget["metadata"]["name"]]


def test_steps_of_an_upgrade_are_whole_gangs_and_routers() -> None:
    service = ray_service("incremental-upgrade")
    options = service["spec"]["upgradeStrategy"]["clusterUpgradeOptions"]
    for key in ("stepSizePercent", "maxSurgePercent"):
        for count in ("routers", "min-gangs"):
            assert setting(service, count) * options[key] % 100 == 0, (key, count)


@every_overlay
def test_what_is_open_to_others_is_named(name: str) -> None:
    """From without only the API's port, by label; the operator's and Prometheus's ports to nobody else."""
    to_clients = 0
    for policy in (one for one in kustomized(OVERLAYS / name) if one["kind"] == "NetworkPolicy"):
        for rule in policy["spec"].get("ingress", ()):
            assert rule["from"], policy["metadata"]["name"]
            for source in rule["from"]:
                assert "ipBlock" not in source
                by_pod, by_namespace = source.get("podSelector"), source.get("namespaceSelector")
                assert by_pod or by_namespace, policy["metadata"]["name"]
                if by_namespace and not by_pod:
                    to_clients += 1
                    assert rule["ports"] == [{"port": SERVE_PORT, "protocol": "TCP"}]
    assert to_clients == 1


@every_overlay
def test_ports_have_one_meaning(name: str) -> None:
    manifests = kustomized(OVERLAYS / name)
    service = next(one for one in manifests if one["kind"] == "Service" and one["metadata"]["name"] == "motet")
    for group, pod in pod_templates(only(manifests, "RayService")):
        ports = {one["name"]: one["containerPort"] for one in pod["spec"]["containers"][0]["ports"]}
        assert ports["serve"] == SERVE_PORT == service["spec"]["ports"][0]["port"]
        if group != "head":
            assert [ports[f"metrics-{n}"] for n in range(len(METRICS_PORTS))] == list(METRICS_PORTS)


def test_images_have_the_version_and_the_files() -> None:
    version = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.M)
    assert version is not None
    for name in OVERLAY_NAMES:
        for _, pod in pod_templates(ray_service(name)):
            image = pod["spec"]["containers"][0]["image"]
            assert image in (f"motet-cpu:{version[1]}", f"motet-cuda:{version[1]}")
