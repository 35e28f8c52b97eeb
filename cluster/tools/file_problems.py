"""What would fail in a cluster of a file: a rendered RayService, a configuration of Serve, or one of `motet serve`."""

from __future__ import annotations

import re
import tomllib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any, get_args
from urllib.parse import urlsplit

import yaml
from pydantic import BaseModel, ValidationError

from ..application.application_config import ApplicationConfig, application_config, live_values, values_of
from ..settings.setting_field import ConfigError, Part

# What KubeRay 1.7's operator refuses beyond its schema, as far as a RayService of motet could break it.
#
# After ValidateRayServiceMetadata, ValidateRayServiceSpec and ValidateRayClusterSpec of KubeRay v1.7.0
# (ray-operator/controllers/ray/utils/validation.go, Apache-2.0), with the feature gates that are on by default and
# RayServiceIncrementalUpgrade. The operator only emits an event, which users would see too late.

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


# What Serve and motet would say of a configuration of Serve, as in the `serveConfigV2` of a RayService.

IMPORT_PATH = "motet.cluster.serve_application:build"
POLICY = "motet.cluster.replicas.autoscaler:GangAutoscaler"
DEPLOYMENTS: tuple[Part, ...] = ("router", "gang")


def serve_config(ray_service: Manifest) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load(ray_service["spec"]["serveConfigV2"])
    return config


def arguments(ray_service: Manifest) -> dict[str, Any]:
    """The arguments of motet's application."""
    (application,) = serve_config(ray_service)["applications"]
    args: dict[str, Any] = application["args"]
    return args


def serve_problems(ray_service: Manifest) -> Iterator[str]:
    """What is wrong with it for Ray Serve, which itself ignores fields that it does not know, or for motet."""
    yield from (f"serveConfigV2: {problem}" for problem in config_problems(serve_config(ray_service)))


def config_problems(config: dict[str, Any]) -> Iterator[str]:
    """The same of a configuration that stands by itself."""
    from ray.serve.schema import ServeDeploySchema  # takes seconds to load

    try:
        with warnings.catch_warnings():
            # Of metrics_interval_s: Ray 2.60 prefers variables that it does not read for replicas yet.
            warnings.simplefilter("ignore", DeprecationWarning)
            ServeDeploySchema.model_validate(config)
    except ValidationError as error:
        for detail in error.errors():
            yield f"{'.'.join(str(part) for part in detail['loc'])}: {detail['msg']}"
        return
    yield from (f"{name} is not a field of Serve" for name in _unknown(ServeDeploySchema, config, ""))
    for application in config["applications"]:
        if application["import_path"] != IMPORT_PATH:
            yield f"{application['import_path']} is not motet's application"
        for deployment in application.get("deployments", ()):
            yield from _of_deployment(deployment)
        try:
            application_config(application["args"], {})
        except ValueError as error:  # ConfigError among them
            yield f"{error}"


def _of_deployment(deployment: dict[str, Any]) -> Iterator[str]:
    name = deployment["name"]
    if name not in DEPLOYMENTS:
        yield f"motet has no deployment {name}"
        return
    try:
        live_values(name, deployment.get("user_config") or {})
    except ConfigError as error:
        yield str(error)
    scaling = deployment.get("autoscaling_config")
    if scaling is None:
        return
    if name != "gang":
        yield f"autoscaling_config of {name}: only gangs scale by themselves"
    elif (policy := scaling.get("policy", {})).get("policy_function") != POLICY:
        yield f"autoscaling_config of gang: policy: policy_function is not {POLICY}: Serve's own sees no load"
    else:
        yield from _of_scaling(scaling, policy.get("policy_kwargs") or {})


def _of_scaling(scaling: dict[str, Any], arguments: dict[str, Any]) -> Iterator[str]:
    from ..replicas.autoscaler import GangAutoscaler

    min_gangs, max_gangs = scaling.get("min_replicas", 1), scaling.get("max_replicas", 1)
    if min_gangs > max_gangs:
        yield f"autoscaling_config of gang: min_replicas, {min_gangs}, is more than max_replicas, {max_gangs}"
    try:
        GangAutoscaler(**arguments)
    except (ValueError, TypeError) as error:  # ConfigError among them
        yield f"autoscaling_config of gang: policy_kwargs: {error}"


def _unknown(model: type[BaseModel], document: Any, place: str) -> Iterator[str]:
    """Keys that a model does not have, nor those within it."""
    if not isinstance(document, dict):
        return
    for key, value in document.items():
        path = f"{place}.{key}" if place else key
        field = model.model_fields.get(key)
        if field is None:
            yield path
            continue
        for inner in _models(field.annotation):
            for n, element in enumerate(value if isinstance(value, list) else [value]):
                yield from _unknown(inner, element, f"{path}.{n}" if isinstance(value, list) else path)


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models(argument)


# What pods of a RayService must reach by their settings, beside what the NetworkPolicies of the same file let them.

PROXIES = ("https_proxy", "http_proxy", "all_proxy")  # variables, also in capitals, in the order of their use for https
PORTS = {"http": 80, "https": 443, "socks5": 1080, "socks5h": 1080}
OURS = ("motet", "motet-redis")  # pods that are no server of a setting
HUB = "https://huggingface.co"


@dataclass(frozen=True)
class Destination:
    """A server that pods must reach."""

    host: str
    port: int
    why: str  # the setting or the variable that names it


def policy_problems(ray_service: Manifest, policies: Sequence[Manifest]) -> Iterator[str]:
    """Servers that pods are to reach by their settings and that no policy lets them reach.

    Secrets, which may name a Redis, are not in the file. Names are not resolved: a rule for any address counts.
    """
    cluster = ray_service["spec"]["rayClusterConfig"]
    groups = [("routers and gangs", group["template"]) for group in cluster.get("workerGroupSpecs", ())]
    problems: dict[str, None] = {}
    for part, template in [("head", cluster["headGroupSpec"]["template"]), *groups]:
        rules = _egress(policies, template.get("metadata", {}).get("labels", {}))
        if rules is None:
            continue  # nothing is closed
        for destination in _destinations(template, arguments(ray_service) if part != "head" else {}):
            if not any(_allows(rule, destination) for rule in rules):
                server = f"{destination.why} names {destination.host}:{destination.port}"
                problems[f"{server}, which the file's NetworkPolicies close: add it to networkPolicies.egress"] = None
    yield from problems


def _egress(policies: Sequence[Manifest], labels: Mapping[str, str]) -> list[dict[str, Any]] | None:
    """The rules for what pods with these labels may reach; None: no policy closes anything for them."""
    specs = [policy["spec"] for policy in policies if "Egress" in policy["spec"].get("policyTypes", ("Ingress",))]
    matches = [spec for spec in specs if _selects(spec["podSelector"], labels)]
    return [rule for spec in matches for rule in spec.get("egress") or ()] if matches else None


def _selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Expressions other than In are of no policy here, and count as a match."""
    if any(labels.get(key) != value for key, value in selector.get("matchLabels", {}).items()):
        return False
    listed = (expression for expression in selector.get("matchExpressions", ()) if expression["operator"] == "In")
    return all(labels.get(expression["key"]) in expression["values"] for expression in listed)


def _destinations(template: Manifest, app_args: Mapping[str, Any]) -> Iterator[Destination]:
    container = template["spec"]["containers"][0]
    variables = {variable["name"]: variable["value"] for variable in container.get("env", ()) if "value" in variable}
    proxy = next(
        (name for proxy_name in PROXIES for name in (proxy_name, proxy_name.upper()) if variables.get(name)), None
    )
    if proxy is not None:
        url = variables[proxy] if "://" in variables[proxy] else f"http://{variables[proxy]}"
        yield from _of_url(url, f"the variable {proxy}")
    if proxy is not None and proxy.lower() != "http_proxy":
        return  # which is asked for the rest
    issuers = app_args.get("oidc-issuers") or variables.get("MOTET_OIDC_ISSUERS") or ()
    for issuer in issuers.split(",") if isinstance(issuers, str) else issuers:
        yield from _of_url(issuer.strip(), "oidc-issuers")
    model = app_args.get("model")
    if isinstance(model, str) and not model.startswith("/"):
        yield from _of_url(variables.get("HF_ENDPOINT") or HUB, f"model = {model}, a hub id,")


def _of_url(url: str, why: str) -> Iterator[Destination]:
    try:
        parts = urlsplit(url)
        port = parts.port or PORTS.get(parts.scheme)
    except ValueError:
        return  # the check of settings says so
    if parts.hostname and port:
        yield Destination(parts.hostname, port, why)


def _allows(rule: Mapping[str, Any], to: Destination) -> bool:
    ports, peers = rule.get("ports"), rule.get("to")
    return (not ports or any(_has_port(port, to.port) for port in ports)) and (
        not peers or any(_may_be(peer, to.host) for peer in peers)
    )


def _has_port(port: Mapping[str, Any], number: int) -> bool:
    first = port.get("port", number)
    if port.get("protocol", "TCP") != "TCP":
        return False
    return not isinstance(first, int) or first <= number <= port.get("endPort", first)  # a named port may be any


def _may_be(peer: Mapping[str, Any], host: str) -> bool:
    """Whether a host may be one of the peer's. A name of no service of the cluster is an address outside of it."""
    block = peer.get("ipBlock")
    if peer.get("podSelector", {}).get("matchLabels", {}).get("app.kubernetes.io/name") in OURS:
        return False
    try:
        address = ip_address(host)
    except ValueError:
        is_outside = "." in host and not host.endswith((".svc", ".cluster.local")) and ".svc." not in host
        return block is not None or not is_outside
    if block is None:
        return True  # a service's address
    networks = [ip_network(cidr, strict=False) for cidr in (block["cidr"], *block.get("except", ()))]
    return address in networks[0] and not any(address in network for network in networks[1:])


ROUTERS = "routers"  # the group of pods that holds them
_ANY_MODEL = Path("/models/base")  # `motet serve` takes it on its command line


class UnknownFile(ValueError):  # noqa: N818
    """Nothing in the file is motet's."""


def file_problems(text: str, *, is_toml: bool = False) -> list[str]:
    """A line for each; empty: none was found. Raises UnknownFile, also for what cannot be read."""
    if is_toml:
        return list(_of_settings(text))
    try:
        documents = [manifest for manifest in yaml.safe_load_all(text) if manifest is not None]
    except yaml.YAMLError as error:
        raise UnknownFile(f"it is not valid YAML: {error}") from error
    ours = [
        manifest
        for manifest in documents
        if isinstance(manifest, dict) and (manifest.get("kind") == "RayService" or _is_serve(manifest))
    ]
    if not ours:
        raise UnknownFile("it has neither a RayService nor the applications of Ray Serve")
    policies = [
        manifest for manifest in documents if isinstance(manifest, dict) and manifest.get("kind") == "NetworkPolicy"
    ]
    return [problem for document in ours for problem in _of_document(document, policies)]


def _is_serve(document: Manifest) -> bool:
    return "applications" in document and "kind" not in document


def _of_document(document: Manifest, policies: Sequence[Manifest]) -> Iterator[str]:
    if _is_serve(document):
        yield from config_problems(document)
        return
    try:
        yield from operator_problems(document)
        problems = list(serve_problems(document))
        yield from problems
        if not problems:
            yield from _of_numbers(document)
            yield from policy_problems(document, policies)
    except (KeyError, TypeError, AttributeError, yaml.YAMLError) as error:
        yield f"the RayService is not complete, or a part of it is of another kind: {error!r}"


def _of_numbers(ray_service: Manifest) -> Iterator[str]:
    """Serve's numbers of gangs and routers beside those of pods: KubeRay compares them with nothing."""
    groups = ray_service["spec"]["rayClusterConfig"].get("workerGroupSpecs", ())
    gang_pods = sum(group.get("maxReplicas", 0) for group in groups if group["groupName"] != ROUTERS)
    for application in serve_config(ray_service)["applications"]:
        for deployment in application.get("deployments", ()):
            max_gangs = _max_replicas(deployment)
            if deployment["name"] == "gang" and max_gangs is not None and max_gangs > gang_pods:
                yield f"Serve may run {max_gangs} gangs, and there are at most {gang_pods} pods for them (maxReplicas)"


def _max_replicas(deployment: dict[str, Any]) -> int | None:
    scaling = deployment.get("autoscaling_config")
    number = deployment.get("num_replicas") if scaling is None else scaling.get("max_replicas", 1)
    return number if isinstance(number, int) else None


def _of_settings(text: str) -> Iterator[str]:
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UnknownFile(f"it is not valid TOML: {error}") from error
    try:
        values = values_of(document, "settings", lambda _: None)
        ApplicationConfig.from_environment({}, model_path=_ANY_MODEL, **values)
    except ValueError as error:  # ConfigError among them
        yield str(error)
