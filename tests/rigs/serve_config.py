"""What Serve and motet would say of the `serveConfigV2` of a RayService."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from motet.cluster.application.application_config import application_config
from motet.cluster.application.live_settings import live_values
from motet.cluster.settings.config_error import ConfigError
from motet.cluster.settings.setting import Part

from .kube_tools import Manifest

IMPORT_PATH = "motet.cluster.serve_application:build"
DEPLOYMENTS: tuple[Part, ...] = ("router", "gang")


def serve_config(ray_service: Manifest) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(ray_service["spec"]["serveConfigV2"])
    return found


def arguments(ray_service: Manifest) -> dict[str, Any]:
    """Of motet's application."""
    (application,) = serve_config(ray_service)["applications"]
    found: dict[str, Any] = application["args"]
    return found


def serve_problems(ray_service: Manifest) -> Iterator[str]:
    """What is wrong with it for Ray Serve, which itself ignores fields that it does not know, or for motet."""
    from ray.serve.schema import ServeDeploySchema

    config = serve_config(ray_service)
    try:
        ServeDeploySchema.model_validate(config)
    except ValidationError as error:
        for one in error.errors():
            yield f"serveConfigV2: {'.'.join(str(part) for part in one['loc'])}: {one['msg']}"
        return
    yield from (f"serveConfigV2: {name} is no field of Serve" for name in _unknown(ServeDeploySchema, config, ""))
    for application in config["applications"]:
        if application["import_path"] != IMPORT_PATH:
            yield f"serveConfigV2: {application['import_path']} is not motet's application"
        for deployment in application.get("deployments", ()):
            yield from _of_deployment(deployment["name"], deployment.get("user_config") or {})
        try:
            application_config(application["args"], {})
        except ValueError as error:  # ConfigError among them
            yield f"serveConfigV2: {error}"


def _of_deployment(name: str, user_config: dict[str, Any]) -> Iterator[str]:
    if name not in DEPLOYMENTS:
        yield f"serveConfigV2: motet has no deployment {name}"
        return
    try:
        live_values(name, user_config)
    except ConfigError as error:
        yield f"serveConfigV2: {error}"


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
