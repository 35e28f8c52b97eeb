"""What manifests say agrees with the product, with Ray, and with itself."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from motet.cluster.application.secret_files import SECRETS_VARIABLE
from motet.cluster.edge.serve_variables import HUGE_PAGES, LASTING_STREAMS, PATIENT_STARTS, SERVE_FLAGS
from motet.cluster.process_log import FOLDER
from motet.cluster.settings.setting_field import fields_of
from motet.cluster.settings.settings import Settings
from motet.cluster.tools.file_problems import arguments, serve_config
from motet.tests.rigs.image_variables import image_variables
from motet.tests.rigs.kube_schemas import pod_templates
from motet.tests.rigs.kube_tools import OVERLAY_NAMES, OVERLAYS, ROOT, Manifest, kustomized, only

SETTINGS = {flag: field for field in fields_of(Settings) for flag in field.flags}
RAY_FOLDERS = ("_private", "_common/usage", "serve/_private")  # where Ray's Python reads its environment
RAY_PROGRAMS = ("_raylet.so", "core/src/ray/raylet/raylet")  # which know RAY_x as x
DRAIN = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"
SERVE_PORT, METRICS_PORT = 8000, 9400

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


def deployment(service: Manifest, name: str) -> Any:
    """Serve's own options of it."""
    (application,) = serve_config(service)["applications"]
    return next(one for one in application["deployments"] if one["name"] == name)


def gang_bounds(service: Manifest) -> tuple[int, int]:
    """How many gangs Serve runs, at least and at most."""
    options = deployment(service, "gang")
    if "num_replicas" in options:
        return options["num_replicas"], options["num_replicas"]
    return options["autoscaling_config"]["min_replicas"], options["autoscaling_config"]["max_replicas"]


@every_overlay
def test_serve_has_its_flags_on_every_node(name: str) -> None:
    # KubeRay gives the last one a value of its own where a pod gives it none, whatever the image says.
    gcs = "RAY_gcs_server_request_timeout_seconds"
    own = {"RAY_SERVE_DEFAULT_HTTP_HOST": "0.0.0.0", gcs: PATIENT_STARTS[gcs]}
    wanted = SERVE_FLAGS | LASTING_STREAMS | HUGE_PAGES | own
    for group, pod in pod_templates(ray_service(name)):
        found = environment(pod)
        assert {key: found.get(key) for key in wanted} == wanted, group


@cache
def text_of_ray() -> str:
    import ray

    folder = Path(ray.__file__).parent
    python = [path.read_text() for part in RAY_FOLDERS for path in (folder / part).glob("*.py")]
    return "".join([*python, *((folder / part).read_bytes().decode("latin-1") for part in RAY_PROGRAMS)])


def is_read(variable: str) -> bool:
    """Whether Ray or motet has a use for it."""
    if variable.startswith("RAY_"):
        return any(name in text_of_ray() for name in (f'"{variable}"', f"\0{variable.removeprefix('RAY_')}\0"))
    return variable in {SECRETS_VARIABLE, *(field.mark.env for field in fields_of(Settings))}


def test_every_variable_is_read() -> None:
    found = {one for _, pod in pod_templates(ray_service("incremental-upgrade")) for one in environment(pod)}
    ours = {one for one in found if one.startswith(("RAY_", "MOTET_"))}
    assert len(ours) > 5 and [one for one in ours if not is_read(one)] == []
    assert not is_read("RAY_SERVE_ENABLE_HAPROXY") and not is_read("MOTET_SECRETS")  # as one might misspell them


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
    assert (head["rayStartParams"]["num-cpus"], head["rayStartParams"]["num-gpus"]) == ("0", "0")
    (container,) = head["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["memory"] == container["resources"]["requests"]["memory"]
    assert int(container["resources"]["requests"]["memory"].removesuffix("Gi")) >= 4


@every_overlay
def test_gangs_and_routers_fit_into_their_pods(name: str) -> None:
    """With the resources that Ray is given, or finds in the limits, of a pod of each group."""
    service = ray_service(name)
    routers, gangs = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    workers = setting(service, "tensor-parallel")
    limits = gangs["template"]["spec"]["containers"][0]["resources"]["limits"]
    params = gangs["rayStartParams"]
    leader = 0.1 if workers > 1 else 0
    assert setting(service, "gang-num-cpus") * workers + leader <= float(params.get("num-cpus", limits["cpu"]))
    # KubeRay counts those of the limits, but not beside `resources`, which it cannot read in these quotes.
    gpus = 0 if "resources" in params else int(limits.get("nvidia.com/gpu", 0))
    assert setting(service, "gang-num-gpus") * workers == float(params.get("num-gpus", gpus))
    offered = yaml.safe_load(yaml.safe_load(params.get("resources", '"{}"')))
    assert dict(setting(service, "resource")) == offered
    assert all(limits[one] == str(amount) for one, amount in offered.items())
    assert routers["replicas"] >= deployment(service, "router")["num_replicas"]
    assert (gangs["minReplicas"], gangs["maxReplicas"]) == gang_bounds(service)


@every_overlay
def test_what_can_scale_does(name: str) -> None:
    """All but the trial, which has one node."""
    service = ray_service(name)
    least, most = gang_bounds(service)
    scales = bool(service["spec"]["rayClusterConfig"].get("enableInTreeAutoscaling"))
    assert (scales, most > least) == ((False, False) if name == "cpu-trial" else (True, True))
    assert (
        not {"min-gangs", "max-gangs", "routers"} & arguments(service).keys()
    )  # there they would replace every process


@every_overlay
def test_a_head_waits_for_no_volume_and_has_no_image_for_gpus(name: str) -> None:
    service = ray_service(name)
    for group, pod in pod_templates(service):
        claims = [one for one in pod["spec"]["volumes"] if "persistentVolumeClaim" in one]
        assert bool(claims) == (group != "head"), group
        is_cpu = pod["spec"]["containers"][0]["image"].startswith("motet-cpu:")
        assert is_cpu == (group == "head" or name == "cpu-trial"), group


@every_overlay
def test_a_router_finds_room_and_no_gang_does_beside_it(name: str) -> None:
    service = ray_service(name)
    cluster = service["spec"]["rayClusterConfig"]
    routers = cluster["workerGroupSpecs"][0]
    params, count = routers["rayStartParams"], deployment(service, "router")["num_replicas"]
    assert (params["num-cpus"], params["num-gpus"]) == ("0", "0")
    offered = yaml.safe_load(yaml.safe_load(params["resources"]))
    ((resource, amount),) = setting(service, "router-resource")
    room_in_a_pod = offered.pop(resource) // amount
    assert offered == {} and routers["replicas"] * room_in_a_pod >= count
    # An update starts the successors of all routers before it ends one.
    most_pods = routers["maxReplicas"] if cluster.get("enableInTreeAutoscaling") else routers["replicas"]
    assert most_pods * room_in_a_pod >= 2 * count
    if count > 1:  # else those of a pod that was lost start on another one, and nothing moves them back
        assert room_in_a_pod == 1


def test_the_trial_leaves_room_for_what_else_runs_on_its_node() -> None:
    """The operator, whose chart asks for half a GiB, and what is Kubernetes' own."""
    pages = (
        "docs/install.md",
        "deploy/kustomize/overlays/cpu-trial/kustomization.yaml",
        "deploy/helm/motet/presets/cpu-trial.yaml",
    )
    said = [int(gib) for page in pages for gib in re.findall(r"4 CPUs and (\d+) GiB", (ROOT / page).read_text())]
    requested = [
        gib(container["resources"]["requests"]["memory"])
        for _, pod in pods(kustomized(OVERLAYS / "cpu-trial"))
        for container in containers(pod)
    ]
    assert len(said) == len(pages)
    assert all(1.5 <= one - sum(requested) < 2.5 for one in said), (said, sum(requested))


def gib(quantity: str) -> float:
    return int(quantity[:-2]) / {"Gi": 1, "Mi": 1 << 10}[quantity[-2:]]


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
        for count in (deployment(service, "router")["num_replicas"], gang_bounds(service)[0]):
            assert count * options[key] % 100 == 0, (key, count)


@every_overlay
def test_what_is_open_to_others_is_named(name: str) -> None:
    """From without only the API's port, by label; the operator's and Prometheus's ports to no other pod."""
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
            assert ports["metrics"] == METRICS_PORT == Settings().access.metrics_port


@every_overlay
def test_images_are_of_this_version(name: str) -> None:
    version = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.M)
    assert version is not None
    for group, pod in pod_templates(ray_service(name)):
        (container,) = pod["spec"]["containers"]
        kind = "cpu" if name == "cpu-trial" or group == "head" else "cuda"
        assert container["image"] == f"motet-{kind}:{version[1]}"


@every_overlay
def test_what_images_bring_is_where_manifests_look(name: str) -> None:
    service = ray_service(name)
    kind = "cpu" if name == "cpu-trial" else "cuda"
    made = (ROOT / "deploy" / "images" / f"{kind}.Dockerfile").read_text()
    model = arguments(service)["model"]
    folders = [model, *re.findall(r"/var/lib/motet", arguments(service)["data-dir"])]
    for folder in folders:
        assert folder in made or (folder.startswith("/models/") and "/models" in made), folder
    assert "USER 1000:1000" in made
    of_image = image_variables("")
    for group, pod in pod_templates(service):
        mounts = {one["mountPath"] for one in pod["spec"]["containers"][0]["volumeMounts"]}
        assert environment(pod)[SECRETS_VARIABLE] in mounts
        assert group == "head" or arguments(service)["data-dir"] in mounts
        assert group == "head" or model.startswith("/opt/") or "/models" in mounts
        for variable, value in environment(pod).items():  # said twice, but not differently
            assert of_image.get(variable, value) == value, variable


@every_overlay
def test_files_of_ray_stay_far_below_their_volume(name: str) -> None:
    """The bare output of processes, the GCS's and the raylet's too, grows for ever without these variables."""
    for group, pod in pod_templates(ray_service(name)):
        (volume,) = (one["emptyDir"] for one in pod["spec"]["volumes"] if one["name"] == "ray-logs")
        variables = environment(pod)
        a_file = int(variables["RAY_ROTATION_MAX_BYTES"]) * (1 + int(variables["RAY_ROTATION_BACKUP_COUNT"]))
        assert 32 * a_file <= int(volume["sizeLimit"].removesuffix("Gi")) << 30, group


@every_overlay
def test_the_shipper_reads_the_logs_that_are_written(name: str) -> None:
    manifests = kustomized(OVERLAYS / name)
    (config,) = (one for one in manifests if one["kind"] == "ConfigMap" and "fluent-bit.yaml" in one["data"])
    (tail,) = yaml.safe_load(config["data"]["fluent-bit.yaml"])["pipeline"]["inputs"]
    assert f"/tmp/ray/session_latest/logs/{FOLDER}/*.log" in tail["path"].split(",")
    for group, pod in pod_templates(only(manifests, "RayService")):
        shipper, ray_container = containers(pod)
        written = {one["mountPath"]: one["name"] for one in ray_container["volumeMounts"]}
        read = {one["mountPath"]: one["name"] for one in shipper["volumeMounts"]}
        assert written["/tmp/ray"] == read["/tmp/ray"], group
        assert shipper["restartPolicy"] == "Always"  # it ends after Ray


def test_a_different_redis_password_cannot_be_meant() -> None:
    """The server's start, its probes and Ray's arguments read one Secret, which motet's pods do not."""
    redis = only(kustomized(OVERLAYS / "cpu-trial"), "StatefulSet")["spec"]["template"]["spec"]
    (secret,) = (one["secret"] for one in redis["volumes"] if one["name"] == "secrets")
    recovery = ray_service("high-availability")["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"]
    reference = recovery["redisPassword"]["valueFrom"]["secretKeyRef"]
    assert (reference["name"], reference["key"]) == (secret["secretName"], secret["items"][0]["key"])
    for _, pod in pod_templates(ray_service("cpu-trial")):
        named = [one["secret"]["secretName"] for one in pod["spec"]["volumes"] if "secret" in one]
        assert named == ["motet"] != [secret["secretName"]]
