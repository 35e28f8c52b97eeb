"""What would fail in a cluster of a file: a rendered RayService, a configuration of Serve, or one of `motet serve`."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from ..application.application_config import ApplicationConfig
from ..application.setting_keys import values_of
from .kuberay_rules import Manifest, operator_problems
from .network_rules import policy_problems
from .serve_config import config_problems, serve_config, serve_problems

ROUTERS = "routers"  # the group of pods that holds them
_ANY_MODEL = Path("/models/base")  # `motet serve` takes it on its command line


class UnknownFile(ValueError):  # noqa: N818
    """Nothing in the file is motet's."""


def file_problems(text: str, *, is_toml: bool = False) -> list[str]:
    """A line for each; empty: none was found. Raises UnknownFile, also for what cannot be read."""
    if is_toml:
        return list(_of_settings(text))
    try:
        documents = [one for one in yaml.safe_load_all(text) if one is not None]
    except yaml.YAMLError as error:
        raise UnknownFile(f"it is not valid YAML: {error}") from error
    ours = [one for one in documents if isinstance(one, dict) and (one.get("kind") == "RayService" or _is_serve(one))]
    if not ours:
        raise UnknownFile("it has neither a RayService nor the applications of Ray Serve")
    policies = [one for one in documents if isinstance(one, dict) and one.get("kind") == "NetworkPolicy"]
    return [problem for document in ours for problem in _of_document(document, policies)]


def _is_serve(document: Manifest) -> bool:
    return "applications" in document and "kind" not in document


def _of_document(document: Manifest, policies: Sequence[Manifest]) -> Iterator[str]:
    if _is_serve(document):
        yield from config_problems(document)
        return
    try:
        yield from operator_problems(document)
        found = list(serve_problems(document))
        yield from found
        if not found:
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
            most = _most(deployment)
            if deployment["name"] == "gang" and most is not None and most > gang_pods:
                yield f"Serve may run {most} gangs, and there are at most {gang_pods} pods for them (maxReplicas)"


def _most(deployment: dict[str, Any]) -> int | None:
    scaling = deployment.get("autoscaling_config")
    found = deployment.get("num_replicas") if scaling is None else scaling.get("max_replicas", 1)
    return found if isinstance(found, int) else None


def _of_settings(text: str) -> Iterator[str]:
    try:
        given = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UnknownFile(f"it is not valid TOML: {error}") from error
    try:
        values = values_of(given, "settings", lambda _: None)
        ApplicationConfig.from_environment({}, model_path=_ANY_MODEL, **values)
    except ValueError as error:  # ConfigError among them
        yield str(error)
