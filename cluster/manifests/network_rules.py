"""What pods of a RayService must reach by their settings, beside what the NetworkPolicies of the same file let them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address, ip_network
from typing import Any
from urllib.parse import urlsplit

from .kuberay_rules import Manifest
from .serve_config import arguments

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
    for what, template in [("head", cluster["headGroupSpec"]["template"]), *groups]:
        rules = _egress(policies, template.get("metadata", {}).get("labels", {}))
        if rules is None:
            continue  # nothing is closed
        for one in _destinations(template, arguments(ray_service) if what != "head" else {}):
            if not any(_allows(rule, one) for rule in rules):
                server = f"{one.why} names {one.host}:{one.port}"
                problems[f"{server}, which the file's NetworkPolicies close: add it to networkPolicies.egress"] = None
    yield from problems


def _egress(policies: Sequence[Manifest], labels: Mapping[str, str]) -> list[dict[str, Any]] | None:
    """The rules for what pods with these labels may reach; None: no policy closes anything for them."""
    specs = [one["spec"] for one in policies if "Egress" in one["spec"].get("policyTypes", ("Ingress",))]
    found = [spec for spec in specs if _selects(spec["podSelector"], labels)]
    return [rule for spec in found for rule in spec.get("egress") or ()] if found else None


def _selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Expressions other than In are of no policy here, and count as a match."""
    if any(labels.get(key) != value for key, value in selector.get("matchLabels", {}).items()):
        return False
    listed = (one for one in selector.get("matchExpressions", ()) if one["operator"] == "In")
    return all(labels.get(one["key"]) in one["values"] for one in listed)


def _destinations(template: Manifest, given: Mapping[str, Any]) -> Iterator[Destination]:
    container = template["spec"]["containers"][0]
    variables = {one["name"]: one["value"] for one in container.get("env", ()) if "value" in one}
    proxy = next((name for one in PROXIES for name in (one, one.upper()) if variables.get(name)), None)
    if proxy is not None:
        url = variables[proxy] if "://" in variables[proxy] else f"http://{variables[proxy]}"
        yield from _of_url(url, f"the variable {proxy}")
    if proxy is not None and proxy.lower() != "http_proxy":
        return  # which is asked for the rest
    issuers = given.get("oidc-issuers") or variables.get("MOTET_OIDC_ISSUERS") or ()
    for issuer in issuers.split(",") if isinstance(issuers, str) else issuers:
        yield from _of_url(issuer.strip(), "oidc-issuers")
    model = given.get("model")
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
    return (not ports or any(_has_port(one, to.port) for one in ports)) and (
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
    networks = [ip_network(one, strict=False) for one in (block["cidr"], *block.get("except", ()))]
    return address in networks[0] and not any(address in network for network in networks[1:])
