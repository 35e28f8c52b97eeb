"""All that is checked of what is sent to a cluster, without one."""

from __future__ import annotations

from collections.abc import Iterator

from motet.cluster.tools.file_problems import operator_problems, serve_problems

from .kube_schemas import schema_problems
from .kube_tools import Manifest


def problems(manifests: list[Manifest]) -> Iterator[str]:
    """What an API server, KubeRay's operator, Ray Serve or motet would refuse."""
    names = [(one["kind"], one["metadata"]["name"]) for one in manifests]
    yield from (f"{kind} {name} is there twice" for kind, name in set(names) if names.count((kind, name)) > 1)
    for manifest in manifests:
        found = list(schema_problems(manifest))
        yield from found
        if manifest["kind"] == "RayService" and not found:
            yield from operator_problems(manifest)
            yield from serve_problems(manifest)
