"""What Serve and motet would say of the `serveConfigV2` of a RayService."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from motet.cluster.settings.config_error import ConfigError
from motet.cluster.settings.setting_field import fields_of
from motet.cluster.settings.settings import Settings

from .kube_tools import Manifest

IMPORT_PATH = "motet.cluster.serve_application:build"
DEPLOYMENTS = ("router", "gang")
MODEL = "model"


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
            if deployment["name"] not in DEPLOYMENTS:
                yield f"serveConfigV2: motet has no deployment {deployment['name']}"
            for key, value in (deployment.get("user_config") or {}).items():
                yield from _of_setting(key, value, live=True)
        for key, value in application["args"].items():
            if key != MODEL:
                yield from _of_setting(key, value, live=False)


def _of_setting(key: str, value: Any, *, live: bool) -> Iterator[str]:
    field = next((one for one in fields_of(Settings) if key in one.flags), None)
    if field is None:
        yield f"serveConfigV2: there is no setting {key}"
        return
    if field.mark.secret:
        yield f"serveConfigV2: {key} is a secret"
    if live and field.mark.change != "live":
        yield f"serveConfigV2: {key} does not change while motet serves"
    try:
        field.converted(tuple(value) if isinstance(value, list) else value)
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
