"""What the schemas of an API server would say of a manifest, unknown fields included.

Kubernetes' own kinds have kubernetes-validate's schemas, RayService KubeRay's (`tests/deploy/crds/`). Of the Prometheus
operator's kinds no schema is at hand: what is written here allows just what motet uses of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate

from .kube_tools import Manifest

CRDS = Path(__file__).resolve().parents[1] / "deploy" / "crds"
KUBERNETES = "1.37"

LABELS = {"type": "object", "additionalProperties": {"type": "string"}}
METADATA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "namespace": {"type": "string"}, "labels": LABELS},
    "additionalProperties": False,
    "required": ["name"],
}
SECRET_KEY = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "key": {"type": "string"}},
    "additionalProperties": False,
    "required": ["name", "key"],
}
AUTHORIZATION = {
    "type": "object",
    "properties": {"type": {"const": "Bearer"}, "credentials": SECRET_KEY},
    "additionalProperties": False,
}
RELABELING = {
    "type": "object",
    "properties": {
        "sourceLabels": {"type": "array", "items": {"type": "string", "pattern": "^[a-zA-Z_][a-zA-Z0-9_]*$"}},
        "targetLabel": {"type": "string"},
        "regex": {"type": "string"},
        "action": {"enum": ["drop", "keep", "replace"]},
    },
    "additionalProperties": False,
}
POD_MONITOR = {
    "type": "object",
    "properties": {
        "apiVersion": {"const": "monitoring.coreos.com/v1"},
        "kind": {"const": "PodMonitor"},
        "metadata": METADATA,
        "spec": {
            "type": "object",
            "properties": {
                "selector": {
                    "type": "object",
                    "properties": {"matchLabels": LABELS},
                    "additionalProperties": False,
                    "required": ["matchLabels"],
                },
                "podMetricsEndpoints": {
                    "type": "array",
                    "minItems": 1,
                    "items": {
                        "type": "object",
                        "properties": {
                            "port": {"type": "string", "pattern": "^[a-z0-9-]{1,15}$"},
                            "path": {"type": "string", "pattern": "^/"},
                            "interval": {"type": "string", "pattern": "^[0-9]+s$"},
                            "authorization": AUTHORIZATION,
                            "relabelings": {"type": "array", "items": RELABELING},
                            "metricRelabelings": {"type": "array", "items": RELABELING},
                        },
                        "additionalProperties": False,
                    },
                },
            },
            "additionalProperties": False,
            "required": ["selector", "podMetricsEndpoints"],
        },
    },
    "additionalProperties": False,
    "required": ["apiVersion", "kind", "metadata", "spec"],
}
RULE = {
    "type": "object",
    "properties": {
        "record": {"type": "string", "pattern": "^[a-zA-Z_:][a-zA-Z0-9_:]*$"},
        "alert": {"type": "string", "minLength": 1},
        "expr": {"type": "string", "minLength": 1},
        "for": {"type": "string", "pattern": "^[0-9]+[smh]$"},
        "labels": LABELS,
        "annotations": LABELS,
    },
    "additionalProperties": False,
    "required": ["expr"],
}
PROMETHEUS_RULE = {
    "type": "object",
    "properties": {
        "apiVersion": {"const": "monitoring.coreos.com/v1"},
        "kind": {"const": "PrometheusRule"},
        "metadata": METADATA,
        "spec": {
            "type": "object",
            "properties": {
                "groups": {
                    "type": "array",
                    "minItems": 1,
                    "items": {
                        "type": "object",
                        "properties": {
                            "name": {"type": "string", "minLength": 1},
                            "rules": {"type": "array", "items": RULE},
                        },
                        "additionalProperties": False,
                        "required": ["name", "rules"],
                    },
                },
            },
            "additionalProperties": False,
            "required": ["groups"],
        },
    },
    "additionalProperties": False,
    "required": ["apiVersion", "kind", "metadata", "spec"],
}
OF_PROMETHEUS = {"PodMonitor": POD_MONITOR, "PrometheusRule": PROMETHEUS_RULE}


def schema_problems(manifest: Manifest) -> Iterator[str]:
    """What is wrong with a manifest, each with the path of the field."""
    kind, name = manifest.get("kind"), manifest.get("metadata", {}).get("name")
    if kind == "RayService":
        yield from (f"RayService {name}: {problem}" for problem in _against(_ray_service(), manifest))
        for group, template in pod_templates(manifest):
            pod = {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": template.get("metadata", {}),
                "spec": template["spec"],
            }
            yield from (f"RayService {name}: pod of {group}: {problem}" for problem in _of_kubernetes(pod))
    elif kind in OF_PROMETHEUS:
        yield from (f"{kind} {name}: {problem}" for problem in _against(OF_PROMETHEUS[kind], manifest))
    else:
        yield from (f"{kind} {name}: {problem}" for problem in _of_kubernetes(manifest))


def pod_templates(ray_service: Manifest) -> Iterator[tuple[str, Manifest]]:
    """The groups' names, `head` for the head's, with their pods."""
    cluster = ray_service["spec"]["rayClusterConfig"]
    yield "head", cluster["headGroupSpec"]["template"]
    for group in cluster.get("workerGroupSpecs", ()):
        yield group["groupName"], group["template"]


def _of_kubernetes(manifest: Manifest) -> Sequence[str]:
    return _of_kubernetes_text(json.dumps(manifest))


@cache
def _of_kubernetes_text(manifest: str) -> Sequence[str]:
    """Tests ask of the same manifests often, and each answer reads megabytes of schemas."""
    try:
        kubernetes_validate.validate(json.loads(manifest), KUBERNETES, strict=True)
    except kubernetes_validate.ValidationError as error:
        path = ".".join(str(one) for one in error.path)
        return (f"{path}: {error.message}",)
    except kubernetes_validate.SchemaNotFoundError:
        return ("Kubernetes has no such kind",)
    return ()


def _against(schema: dict[str, Any], manifest: Manifest) -> Iterator[str]:
    for error in jsonschema.Draft202012Validator(schema).iter_errors(manifest):
        yield f"{'.'.join(str(one) for one in error.absolute_path)}: {error.message}"


@cache
def _ray_service() -> dict[str, Any]:
    schema: dict[str, Any] = _strict(json.loads((CRDS / "rayservice.json").read_text()))
    schema["properties"]["metadata"] = {"type": "object"}  # its own, of which the pods' are an example
    return schema


def _strict(part: Any, *, are_names: bool = False) -> Any:
    """The schema as a strict API server uses it: no field is unknown, and what has a default may be missing."""
    if isinstance(part, list):
        return [_strict(one) for one in part]
    if not isinstance(part, dict):
        return part
    found = {
        key: _strict(value, are_names=key in ("properties", "$defs") and not are_names) for key, value in part.items()
    }
    if are_names:
        return found
    if "properties" in part and not part.get("x-kubernetes-preserve-unknown-fields"):
        found.setdefault("additionalProperties", False)
        missing = [name for name in part.get("required", ()) if "default" not in part["properties"].get(name, {})]
        found["required"] = missing
    return found
