"""What Serve and motet would say of a configuration of Serve, as in the `serveConfigV2` of a RayService."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from ..application.application_config import application_config
from ..application.live_settings import live_values
from ..settings.config_error import ConfigError
from ..settings.setting import Part
from .kuberay_rules import Manifest

IMPORT_PATH = "motet.cluster.serve_application:build"
POLICY = "motet.cluster.replicas.autoscaler:GangAutoscaler"
DEPLOYMENTS: tuple[Part, ...] = ("router", "gang")


def serve_config(ray_service: Manifest) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(ray_service["spec"]["serveConfigV2"])
    return found


def arguments(ray_service: Manifest) -> dict[str, Any]:
    """The arguments of motet's application."""
    (application,) = serve_config(ray_service)["applications"]
    found: dict[str, Any] = application["args"]
    return found


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
        for one in error.errors():
            yield f"{'.'.join(str(part) for part in one['loc'])}: {one['msg']}"
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

    least, most = scaling.get("min_replicas", 1), scaling.get("max_replicas", 1)
    if least > most:
        yield f"autoscaling_config of gang: min_replicas, {least}, is more than max_replicas, {most}"
    try:
        GangAutoscaler(**arguments)
    except (ValueError, TypeError) as error:  # ConfigError among them
        yield f"autoscaling_config of gang: policy_kwargs: {error}"


def _unknown(model: type[BaseModel], given: Any, place: str) -> Iterator[str]:
    """Keys that a model does not have, nor those within it."""
    if not isinstance(given, dict):
        return
    for key, value in given.items():
        path = f"{place}.{key}" if place else key
        field = model.model_fields.get(key)
        if field is None:
            yield path
            continue
        for inner in _models(field.annotation):
            for n, one in enumerate(value if isinstance(value, list) else [value]):
                yield from _unknown(inner, one, f"{path}.{n}" if isinstance(value, list) else path)


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for one in get_args(annotation):
        yield from _models(one)
