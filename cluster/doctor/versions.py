"""Versions, on one node and among nodes."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Mapping

from ... import __version__
from .finding import Finding, error, ok

CHECK = "versions"
PACKAGES = ("ray", "torch", "transformers", "msgspec", "grpcio")  # nodes send each other what these make


def gather_versions() -> dict[str, str]:
    """Versions of packages that must be equal on all nodes, if installed. Imports none of them."""
    found = {"motet": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def check_versions(by_node: Mapping[str, Mapping[str, str]]) -> list[Finding]:
    """`by_node`: what `gather_versions` found on each."""
    findings = []
    for name in ("motet", "python", *PACKAGES):
        nodes_of: dict[str, list[str]] = {}
        for node, versions in by_node.items():
            nodes_of.setdefault(versions.get(name, "none"), []).append(node)
        if "none" in nodes_of:
            findings.append(
                error(
                    CHECK,
                    f"{name} is not installed on {', '.join(nodes_of['none'])}",
                    why="no part of motet can start there",
                    do=f"pip install {name}, or the same image for every group of the RayCluster",
                )
            )
        elif len(nodes_of) > 1:
            found = "; ".join(f"{version} on {', '.join(nodes)}" for version, nodes in sorted(nodes_of.items()))
            findings.append(
                error(
                    CHECK,
                    f"{name} has several versions: {found}",
                    why="parts of motet on these nodes may not understand each other, or not compute alike",
                    do="the same image, by its digest, for the head and every workerGroupSpecs of the RayCluster",
                )
            )
    if not findings:
        versions = next(iter(by_node.values()))
        findings.append(ok(CHECK, ", ".join(f"{name} {version}" for name, version in versions.items())))
    return findings
