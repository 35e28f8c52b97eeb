"""What people usually set in a chart: each such value is accepted and lands where it should."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from motet.cluster.tools.file_problems import arguments, file_problems, serve_config
from motet.tests.rigs.kube_tools import CHART, NO_PROXY, Manifest, run_tool, templated
from motet.tests.rigs.manifest_checks import problems

GPU_NODES = {"nodes": "gpu"}
AFFINITY: dict[str, Any] = {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}
TOLERATION = {"key": "routers", "operator": "Exists", "effect": "NoSchedule"}
TOKEN = {"secretKeyRef": {"name": "hub", "key": "token"}}
DIGEST = "sha256:" + "0f" * 32
SPREAD = {
    "maxSkew": 1,
    "topologyKey": "rack",
    "whenUnsatisfiable": "DoNotSchedule",
    "labelSelector": {"matchLabels": {"app.kubernetes.io/name": "motet"}},
}
CACHE = {"name": "big", "emptyDir": {"sizeLimit": "1Ti"}}


class Made:
    """The manifests that a set of values makes."""

    def __init__(self, manifests: list[Manifest]) -> None:
        self.manifests = manifests

    def one(self, kind: str, name: str = "motet") -> Manifest:
        (found,) = (m for m in self.manifests if (m["kind"], m["metadata"]["name"]) == (kind, name))
        return found

    def names(self, kind: str) -> set[str]:
        return {m["metadata"]["name"] for m in self.manifests if m["kind"] == kind}

    @property
    def groups(self) -> list[Any]:
        found: list[Any] = self.one("RayService")["spec"]["rayClusterConfig"]["workerGroupSpecs"]
        return found

    def pod(self, group: str) -> Any:
        """Its template, of `head` or of a group of workers."""
        if group == "head":
            return self.one("RayService")["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]
        return next(one["template"] for one in self.groups if one["groupName"] == group)

    def spec(self, group: str) -> Any:
        return self.pod(group)["spec"]

    def volumes_of(self, name: str, group: str) -> Any:
        """Of a group's pods, of a RayService of this name."""
        groups = self.one("RayService", name)["spec"]["rayClusterConfig"]["workerGroupSpecs"]
        return next(one["template"]["spec"]["volumes"] for one in groups if one["groupName"] == group)

    def ray(self, group: str) -> Any:
        return self.spec(group)["containers"][0]

    def environment(self, group: str) -> dict[str, Any]:
        return {one["name"]: one.get("value", one.get("valueFrom")) for one in self.ray(group)["env"]}

    @property
    def redis(self) -> Any:
        return self.one("StatefulSet", "motet-redis")["spec"]["template"]["spec"]

    @property
    def pods(self) -> list[Any]:
        return [self.spec("head"), *(group["template"]["spec"] for group in self.groups), self.redis]


Check = Callable[[Made], object]


def each(*checks: bool) -> None:
    assert all(checks), checks


ORDINARY: dict[str, tuple[dict[str, Any], Check]] = {
    "nodeSelector": (
        {"gangs": {"nodeSelector": GPU_NODES}, "redis": {"nodeSelector": {"disk": "ssd"}}},
        lambda made: each(
            made.spec("gangs")["nodeSelector"] == GPU_NODES,
            made.redis["nodeSelector"] == {"disk": "ssd"},
            "nodeSelector" not in made.spec("routers"),
        ),
    ),
    "affinity": (
        {"routers": {"affinity": AFFINITY}},
        lambda made: each(made.spec("routers")["affinity"] == AFFINITY, "affinity" not in made.spec("head")),
    ),
    "runtimeClassName": (
        {"gangs": {"runtimeClassName": "nvidia"}},
        lambda made: each(made.spec("gangs")["runtimeClassName"] == "nvidia"),
    ),
    "priorityClassName": (
        {"head": {"priorityClassName": "high"}, "gangs": {"priorityClassName": "low"}},
        lambda made: each(
            made.spec("head")["priorityClassName"] == "high", made.spec("gangs")["priorityClassName"] == "low"
        ),
    ),
    "tolerations of routers": (
        {"routers": {"tolerations": [TOLERATION]}},
        lambda made: each(made.spec("routers")["tolerations"] == [TOLERATION], "tolerations" not in made.spec("gangs")),
    ),
    "volumes and environment": (
        {
            "environment": {"EVERYWHERE": "1"},
            "gangs": {
                "environment": {"NCCL_DEBUG": "INFO"},
                "volumes": [CACHE],
                "volumeMounts": [{"name": "big", "mountPath": "/big"}],
            },
        },
        lambda made: each(
            CACHE in made.spec("gangs")["volumes"],
            {"name": "big", "mountPath": "/big"} in made.ray("gangs")["volumeMounts"],
            made.environment("gangs")["NCCL_DEBUG"] == "INFO",
            "NCCL_DEBUG" not in made.environment("routers"),
            all(made.environment(group)["EVERYWHERE"] == "1" for group in ("head", "routers", "gangs")),
        ),
    ),
    "a variable from a secret": (
        {"environment": {"HF_TOKEN": TOKEN}},
        lambda made: each(*(made.environment(group)["HF_TOKEN"] == TOKEN for group in ("head", "routers", "gangs"))),
    ),
    "a variable from a secret, in full": (
        {"environment": {"HF_TOKEN": {"valueFrom": TOKEN}}},
        lambda made: each(*(made.environment(group)["HF_TOKEN"] == TOKEN for group in ("head", "routers", "gangs"))),
    ),
    "images by digest": (
        {"image": {"repository": "r/motet", "digest": DIGEST}, "head": {"image": {"repository": "r/head"}}},
        lambda made: each(
            made.ray("gangs")["image"] == made.ray("routers")["image"] == f"r/motet@{DIGEST}",
            made.ray("head")["image"] == "r/head:0.1.0",
        ),
    ),
    "a head by digest": (
        {"head": {"image": {"digest": DIGEST}}},
        lambda made: each(
            made.ray("head")["image"] == f"motet-cpu@{DIGEST}", made.ray("gangs")["image"] == "motet-cpu:0.1.0"
        ),
    ),
    "networks of a load balancer": (
        {"service": {"type": "LoadBalancer", "loadBalancerSourceRanges": ["192.0.2.0/24"]}},
        lambda made: each(made.one("Service")["spec"]["loadBalancerSourceRanges"] == ["192.0.2.0/24"]),
    ),
    "labels of pods": (
        {"podLabels": {"team": "a"}, "gangs": {"labels": {"cost": "gpu"}}, "redis": {"labels": {"cost": "disk"}}},
        lambda made: each(
            made.pod("gangs")["metadata"]["labels"]["cost"] == "gpu",
            made.one("StatefulSet", "motet-redis")["spec"]["template"]["metadata"]["labels"]["cost"] == "disk",
            "cost" not in made.pod("routers")["metadata"]["labels"],
            all(made.pod(group)["metadata"]["labels"]["team"] == "a" for group in ("head", "routers", "gangs")),
            made.pod("gangs")["metadata"]["labels"]["app.kubernetes.io/component"] == "gang",
            "team" not in made.one("Service")["spec"]["selector"],
        ),
    ),
    "another name": (
        {"fullnameOverride": "voices", "headRecovery": True},
        lambda made: each(
            made.one("RayService", "voices")["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"]["redisAddress"]
            == "redis://voices-redis:6379",
            all(one["metadata"]["name"].startswith("voices") for one in made.manifests),
            made.names("PersistentVolumeClaim") == {"voices-store", "voices-models"},
            {"voices-store", "voices-models"}
            < {one.get("persistentVolumeClaim", {}).get("claimName") for one in made.volumes_of("voices", "routers")},
            made.names("ServiceAccount") == {"voices", "voices-head"},
        ),
    ),
    "containers that end before Ray starts": (
        {
            "initContainers": [{"name": "all", "image": "i"}],
            "gangs": {"initContainers": [{"name": "one", "image": "i"}]},
        },
        lambda made: each(
            [one["name"] for one in made.spec("gangs")["initContainers"]] == ["log-shipper", "all", "one"],
            [one["name"] for one in made.spec("head")["initContainers"]] == ["log-shipper", "all"],
        ),
    ),
    "containers that end before Ray starts, alone": (
        {"routers": {"initContainers": [{"name": "one", "image": "i"}]}, "logShipper": {"enabled": False}},
        lambda made: each(
            [one["name"] for one in made.spec("routers")["initContainers"]] == ["one"],
            "initContainers" not in made.spec("gangs"),
        ),
    ),
    "constraints of topology": (
        {
            "routers": {"topologySpreadConstraints": [SPREAD], "spread": True},
            "gangs": {"topologySpreadConstraints": [SPREAD]},
        },
        lambda made: each(
            made.spec("routers")["topologySpreadConstraints"][2:] == [SPREAD],
            made.spec("gangs")["topologySpreadConstraints"] == [SPREAD],
            "topologySpreadConstraints" not in made.spec("head"),
        ),
    ),
    "a security context of pods": (
        {"podSecurityContext": {"runAsUser": 4711, "fsGroup": 4711, "supplementalGroups": [7]}},
        lambda made: each(
            *(
                pod["securityContext"]["runAsUser"] == pod["securityContext"]["fsGroup"] == 4711
                and pod["securityContext"]["supplementalGroups"] == [7]
                and pod["securityContext"]["runAsNonRoot"]
                for pod in made.pods
            )
        ),
    ),
    "a list of identity providers": (
        {"settings": {"oidc-issuers": ["https://a.example.com", "https://b.example.com"], "oidc-audience": "motet"}},
        lambda made: each("motet-outside" in made.names("NetworkPolicy")),
    ),
    "existing claims": (
        {"store": {"existingClaim": "adapters"}, "models": {"existingClaim": "bases"}},
        lambda made: each(
            made.names("PersistentVolumeClaim") == set(),
            {"adapters", "bases"}
            <= {one.get("persistentVolumeClaim", {}).get("claimName") for one in made.spec("gangs")["volumes"]},
        ),
    ),
    "annotations of pods and accounts": (
        {
            "podAnnotations": {"linkerd.io/inject": "disabled"},
            "routers": {"annotations": {"a": "b"}},
            "serviceAccountAnnotations": {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/r"},
        },
        lambda made: each(
            made.pod("routers")["metadata"]["annotations"] == {"linkerd.io/inject": "disabled", "a": "b"},
            made.pod("head")["metadata"]["annotations"] == {"linkerd.io/inject": "disabled"},
            "eks.amazonaws.com/role-arn" in made.one("ServiceAccount")["metadata"]["annotations"],
        ),
    ),
    "ingress": (
        {
            "ingress": {
                "enabled": True,
                "className": "nginx",
                "hosts": ["llm.example.com"],
                "tls": [{"secretName": "tls", "hosts": ["llm.example.com"]}],
                "annotations": {"nginx.ingress.kubernetes.io/proxy-buffering": "off"},
            }
        },
        lambda made: each(
            made.one("Ingress")["spec"]["ingressClassName"] == "nginx",
            made.one("Ingress")["spec"]["rules"][0]["host"] == "llm.example.com",
            made.one("Ingress")["spec"]["rules"][0]["http"]["paths"][0]["backend"]["service"]["name"] == "motet",
            made.one("Ingress")["spec"]["tls"][0]["secretName"] == "tls",
        ),
    ),
    "type of the service": (
        {"service": {"type": "LoadBalancer", "port": 80, "annotations": {"lb": "internal"}}},
        lambda made: each(
            made.one("Service")["spec"]["type"] == "LoadBalancer",
            made.one("Service")["spec"]["ports"] == [{"name": "http", "port": 80, "targetPort": "serve"}],
            made.one("Service")["metadata"]["annotations"] == {"lb": "internal"},
        ),
    ),
    "user of Redis": (
        {
            "headRecovery": True,
            "redis": {"embedded": False, "address": "rediss://redis:6380", "username": "motet"},
        },
        lambda made: each(
            made.one("RayService")["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"]["redisUsername"]
            == {"value": "motet"}
        ),
    ),
    "labels of the PrometheusRule": (
        {"prometheus": {"enabled": True, "labels": {"release": "stack"}, "docsUrl": "https://wiki/"}},
        lambda made: each(
            made.one("PrometheusRule")["metadata"]["labels"]["release"] == "stack",
            made.one("PodMonitor")["metadata"]["labels"]["release"] == "stack",
            all(
                rule["annotations"]["runbook_url"].startswith("https://wiki/docs/metrics.md#")
                for rule in made.one("PrometheusRule")["spec"]["groups"][1]["rules"]
            ),
        ),
    ),
    "image of the shipper": (
        {"logShipper": {"image": "registry.example.com/fluent-bit:4.0"}},
        lambda made: each(made.spec("routers")["initContainers"][0]["image"] == "registry.example.com/fluent-bit:4.0"),
    ),
    "several groups": (
        {
            "autoscaling": True,
            "gangs": {"replicas": 1, "maxReplicas": 2, "tolerations": [TOLERATION]},
            "gangGroups": [{"name": "spot", "replicas": 0, "maxReplicas": 4, "nodeSelector": {"capacity": "spot"}}],
        },
        lambda made: each(
            [group["groupName"] for group in made.groups] == ["routers", "gangs", "gangs-spot"],
            made.groups[2]["minReplicas"] == 0 and made.groups[2]["maxReplicas"] == 4,
            made.spec("gangs-spot")["nodeSelector"] == {"capacity": "spot"},
            made.spec("gangs-spot")["tolerations"] == [TOLERATION],
            gangs_of(made)["autoscaling_config"]["min_replicas"] == 1,
            gangs_of(made)["autoscaling_config"]["max_replicas"] == 6,
        ),
    ),
    "grace": (
        {"grace": {"drainSeconds": 900, "terminationSeconds": 1000, "deletionDelaySeconds": 950}},
        lambda made: each(
            made.environment("gangs")["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] == "900",
            made.spec("routers")["terminationGracePeriodSeconds"] == 1000,
            made.one("RayService")["spec"]["rayClusterDeletionDelaySeconds"] == 950,
        ),
    ),
    "more objects": (
        {
            "extraObjects": [
                {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "mine"}, "data": {"a": "b"}},
                'apiVersion: v1\nkind: ConfigMap\nmetadata: {name: "{{ .Release.Name }}-too"}\n',
            ]
        },
        lambda made: each({"mine", "motet-too"} <= made.names("ConfigMap")),
    ),
    "pull secrets": (
        {"image": {"pullSecrets": ["registry"]}},
        lambda made: each(*(pod["imagePullSecrets"] == [{"name": "registry"}] for pod in made.pods)),
    ),
    "no gangs without requests": (
        {"autoscaling": True, "disruptionBudgets": True, "gangs": {"replicas": 0, "maxReplicas": 3}},
        lambda made: each(
            made.groups[1]["minReplicas"] == 0,
            arguments(made.one("RayService"))["min-gangs"] == 0,
            gangs_of(made)["autoscaling_config"]["min_replicas"] == 0,
            gangs_of(made)["autoscaling_config"]["initial_replicas"] == 1,
            made.names("PodDisruptionBudget") == set(),
        ),
    ),
}


def gangs_of(made: Made) -> Any:
    """Serve's deployment of gangs."""
    (application,) = serve_config(made.one("RayService"))["applications"]
    return next(one for one in application["deployments"] if one["name"] == "gang")


@pytest.fixture
def made(tmp_path: Path) -> Callable[[dict[str, Any]], Made]:
    def make(values: dict[str, Any]) -> Made:
        path = tmp_path / "values.yaml"
        path.write_text(yaml.safe_dump(values))
        return Made(templated("--values", str(path)))

    return make


@pytest.mark.parametrize("name", ORDINARY)
def test_an_ordinary_value_lands_where_it_should(name: str, made: Callable[[dict[str, Any]], Made]) -> None:
    values, check = ORDINARY[name]
    found = made(values)
    check(found)
    assert list(problems(found.manifests)) == []


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ("gangs.replicas=3,autoscaling=true,gangs.maxReplicas=2", "replicas, 3, is more than maxReplicas, 2"),
        ("gangs.maxReplicas=2", "needs autoscaling"),
        ("routers.maxReplicas=2", "routers: maxReplicas above replicas needs autoscaling"),
        ("incrementalUpgrade.enabled=true,autoscaling=true,incrementalUpgrade.stepSizePercent=60", "stepSizePercent"),
        ("grace.drainSeconds=800", "terminationSeconds must be more"),
        ("redis.username=u", "redis.username"),
        ("service.loadBalancerSourceRanges[0]=10.0.0.0/8", "needs service.type LoadBalancer"),
        (f"image.digest={DIGEST}", "head.image.digest"),
        ("podLabels.app\\.kubernetes\\.io/name=other", "app.kubernetes.io/name"),
        ("settings.max-gangs=4", "gangs.maxReplicas"),
        ("ingress.enabled=true", "ingress.hosts"),
    ],
)
def test_values_that_do_not_go_together_end_the_rendering(values: str, said: str) -> None:
    ended = run_tool("helm", "template", str(CHART), *NO_PROXY, "--set", values, check=False)
    assert ended.returncode != 0 and said in ended.stderr, ended.stderr


# Network policies: what docs offer can be opened, and by default the named namespaces alone are let in.


def peers_of(made: Made, name: str, way: str = "ingress") -> Any:
    (rule,) = made.one("NetworkPolicy", name)["spec"][way]
    return rule["from" if way == "ingress" else "to"], rule.get("ports")


def test_operators_and_prometheus_come_from_named_namespaces(made: Callable[[dict[str, Any]], Made]) -> None:
    found = made({"redis": {"embedded": False}})
    for name in ("motet-operator", "motet-prometheus"):
        for peer in peers_of(found, name)[0]:
            assert peer["podSelector"] and peer["namespaceSelector"]["matchExpressions"][0]["values"], name
    ports = [one["port"] for one in peers_of(found, "motet-prometheus")[1]]
    assert 8080 in ports  # Ray's own
    assert [one["port"] for one in peers_of(found, "motet-to-redis", "egress")[1]] == [6379, 6380, 26379]
    dns = found.one("NetworkPolicy", "motet-among-themselves")["spec"]["egress"][1]
    assert {"ipBlock": {"cidr": "169.254.20.10/32"}} in dns["to"]
    assert "motet-outside" not in found.names("NetworkPolicy")


@pytest.mark.parametrize(
    "values",
    [{"settings": {"oidc-issuers": "https://id.example.com", "oidc-audience": "motet"}}, {"model": "org/model"}],
)
def test_what_lies_outside_is_reached_where_settings_need_it(
    values: dict[str, Any], made: Callable[[dict[str, Any]], Made]
) -> None:
    found = made(values)
    assert peers_of(found, "motet-outside", "egress")[1] == [{"port": 443, "protocol": "TCP"}]
    store = [{"to": [{"ipBlock": {"cidr": "10.9.0.0/16"}}], "ports": [{"port": 9000, "protocol": "TCP"}]}]
    found = made({**values, "networkPolicies": {"egress": store}})
    assert found.one("NetworkPolicy", "motet-outside")["spec"]["egress"] == store


def test_each_peer_and_port_can_be_said(made: Callable[[dict[str, Any]], Made]) -> None:
    peer = [{"namespaceSelector": {"matchLabels": {"a": "b"}}}]
    policies = {
        "clients": peer,
        "operator": peer,
        "prometheus": peer,
        "gateways": peer,
        "dns": {"to": peer, "ports": [5353]},
        "redis": {"to": peer, "ports": [7000]},
        "apiServer": {"to": peer, "ports": [16443]},
    }
    found = made(
        {
            "autoscaling": True,
            "redis": {"embedded": False},
            "incrementalUpgrade": {"enabled": True},
            "networkPolicies": policies,
        }
    )
    for name in ("motet-clients", "motet-operator", "motet-prometheus", "motet-gateway"):
        assert peers_of(found, name)[0] == peer, name
    for name, port in (("motet-to-redis", 7000), ("motet-head-to-api-server", 16443)):
        assert peers_of(found, name, "egress") == (peer, [{"port": port, "protocol": "TCP"}])
    dns = found.one("NetworkPolicy", "motet-among-themselves")["spec"]["egress"][1]
    assert dns["to"] == peer and {one["port"] for one in dns["ports"]} == {5353}
    assert list(problems(found.manifests)) == []
    assert made({"networkPolicies": {"enabled": False}}).names("NetworkPolicy") == set()


# Numbers of gangs and routers: another one replaces no process.


def cluster_of(made: Made) -> Any:
    """What KubeRay makes a new cluster for, and Serve new processes: all but the numbers."""
    service = made.one("RayService")
    for group in made.groups:
        for key in ("replicas", "minReplicas", "maxReplicas"):
            group.pop(key)
    config = serve_config(service)
    config["applications"][0].pop("deployments")
    return [service["spec"]["rayClusterConfig"], config]


def scaled(least: int, most: int, routers: int = 2) -> dict[str, Any]:
    settings = {"pool-pressure": 0.7, "scaling-window": 10}
    gangs = {"replicas": least, "maxReplicas": most}
    return {
        "autoscaling": True,
        "settings": settings,
        "gangs": gangs,
        "routers": {"replicas": routers, "maxReplicas": 2 * routers},
    }


@pytest.mark.parametrize(("before", "after"), [((2, 2), (4, 4)), ((8, 8), (12, 12)), ((2, 4), (3, 12))])
def test_more_gangs_and_routers_are_numbers_alone(
    before: tuple[int, int], after: tuple[int, int], made: Callable[[dict[str, Any]], Made]
) -> None:
    old, new = made(scaled(*before)), made(scaled(*after, routers=4))
    assert new.groups[1]["maxReplicas"] == after[1]
    gang = gangs_of(new)
    if after[0] == after[1]:
        assert gang == {"name": "gang", "num_replicas": after[0]}
    else:
        config = gang["autoscaling_config"]
        assert (config["min_replicas"], config["max_replicas"]) == after
        assert (config["look_back_period_s"], config["metrics_interval_s"]) == (10, 2)
        assert config["policy"]["policy_kwargs"] == {"settings": {"pool-pressure": 0.7, "scaling-window": 10}}
    assert list(problems(new.manifests)) == []
    assert cluster_of(old) == cluster_of(new)


EVERYWHERE = [{"ipBlock": {"cidr": "0.0.0.0/0"}}]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"model": "org/model"}, None),
        ({"settings": {"oidc-issuers": ["https://id.example.com"], "oidc-audience": "m"}}, None),
        (
            {"model": "org/model", "environment": {"HTTPS_PROXY": "http://proxy.example.com:3128"}},
            "proxy.example.com:3128",
        ),
        ({"environment": {"https_proxy": "10.1.2.3:3128"}}, "the variable https_proxy names 10.1.2.3:3128"),
        (
            {"settings": {"oidc-issuers": "https://id.example.com:8443", "oidc-audience": "m"}},
            "oidc-issuers names id.example.com:8443",
        ),
        ({"gangs": {"environment": {"HF_ENDPOINT": "https://hub.example.com:444"}}, "model": "org/model"}, ":444"),
    ],
)
def test_what_settings_name_and_policies_close_is_found(
    values: dict[str, Any], said: str | None, made: Callable[[dict[str, Any]], Made]
) -> None:
    found = file_problems(yaml.safe_dump_all(made(values).manifests))
    assert len(found) == (said is not None) and (said is None or said in found[0])
    if said is not None:
        port = {"port": int(found[0].partition(", which")[0].rpartition(":")[2]), "protocol": "TCP"}
        for to, is_open in ((EVERYWHERE, True), ([{"podSelector": {"matchLabels": {"a": "b"}}}], False)):
            egress = [{"to": to, "ports": [port]}, {"to": EVERYWHERE, "ports": [{"port": 443, "protocol": "TCP"}]}]
            opened = made({**values, "networkPolicies": {"egress": egress}})
            has_name = "example.com" in found[0]
            assert (file_problems(yaml.safe_dump_all(opened.manifests)) == []) == (is_open or not has_name)
    assert file_problems(yaml.safe_dump_all(made({**values, "networkPolicies": {"enabled": False}}).manifests)) == []
