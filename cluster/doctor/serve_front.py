"""Checks Ray Serve's flags, on a node and in the running Serve, and the program that Serve runs as HAProxy."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..edge.edge_limits import EdgeLimits, limits_of_environment
from ..edge.haproxy import is_edge_program
from ..edge.serve_variables import BINARY_VARIABLE, LASTING_STARTS, LASTING_STREAMS, SERVE_FLAGS
from .finding import Finding, error, ok, warning

CHECK = "serve"
OF_PODS = "env of the containers of headGroupSpec and of every workerGroupSpecs in the RayService"


@dataclass(frozen=True, kw_only=True)
class NodeServeFacts:
    """What a node's environment sets for Ray Serve."""

    variables: Mapping[str, str] = field(default_factory=dict)  # those of SERVE_FLAGS and LASTING_… that are set
    program: str = ""  # for HAProxy
    program_is_edge: bool = False
    limits: EdgeLimits | None = None  # that the edge would read from the environment
    limits_problem: str = ""


@dataclass(frozen=True, kw_only=True)
class RunningServe:
    """The Serve of a cluster, as its controller knows it."""

    missing_flags: tuple[str, ...]
    has_edge: bool


def gather_serve() -> NodeServeFacts:
    program = os.environ.get(BINARY_VARIABLE, "")
    limits: EdgeLimits | None = None
    problem = ""
    try:
        limits = limits_of_environment()
    except ValueError as refusal:
        problem = str(refusal)
    return NodeServeFacts(
        variables={
            name: os.environ[name] for name in SERVE_FLAGS | LASTING_STREAMS | LASTING_STARTS if name in os.environ
        },
        program=program,
        program_is_edge=is_edge_program(program),
        limits=limits,
        limits_problem=problem,
    )


def check_node_serve(facts: NodeServeFacts) -> list[Finding]:
    """Findings of a node whose environment sets anything for Serve; else motet sets it all when it starts Serve."""
    findings = []
    if facts.limits_problem:
        findings.append(
            error(
                CHECK,
                f"the front's limits: {facts.limits_problem}",
                why="HAProxy does not start",
                do=f"correct it in {OF_PODS}",
            )
        )
    if not facts.variables and not facts.program:
        return [
            *findings,
            ok(CHECK, "the environment sets nothing for Serve: motet serve sets it when it starts Serve"),
        ]
    if missing := [f"{name}={value}" for name, value in SERVE_FLAGS.items() if facts.variables.get(name) != value]:
        findings.append(
            error(
                CHECK,
                f"the environment lacks {' and '.join(missing)}",
                why="unless both are set, tokens reach clients seconds late",
                do=f"{OF_PODS} (motet's images have them), or before ray start",
            )
        )
    if not facts.program_is_edge:
        named = f"{facts.program} is not motet's edge" if facts.program else f"{BINARY_VARIABLE} is not set"
        findings.append(
            error(
                CHECK,
                named,
                why="Serve's own HAProxy has no limits, forwards its control headers, and turns 502 to 504 into 500",
                do=f"motet edge-program /opt/motet/bin/motet-haproxy, and {BINARY_VARIABLE} in {OF_PODS} (motet's "
                "images have both)",
            )
        )
    if other := [f"{name}={value}" for name, value in LASTING_STREAMS.items() if facts.variables.get(name) != value]:
        findings.append(
            warning(
                CHECK,
                f"the environment lacks {', '.join(other)}",
                why="streams open while routers are replaced are cut after two minutes, or reach another router",
                do=f"{OF_PODS} (motet's images have them)",
            )
        )
    if other := [f"{name}={value}" for name, value in LASTING_STARTS.items() if facts.variables.get(name) != value]:
        findings.append(
            warning(
                CHECK,
                f"the environment lacks {', '.join(other)}",
                why="Serve gives up on gangs for good after three failed starts of each",
                do=f"{OF_PODS} (motet's images have them)",
            )
        )
    return findings or [ok(CHECK, f"flags and edge are set ({facts.program})")]


def check_running_serve(running: RunningServe | None) -> list[Finding]:
    """Findings of the running Serve; None: none runs."""
    if running is None:
        return [ok(CHECK, "no Serve runs on the cluster yet")]
    findings = []
    remedy = "serve shutdown, then motet serve --address, which starts its own; in a RayService, correct " + OF_PODS
    if running.missing_flags:
        findings.append(
            error(
                CHECK,
                f"the running Serve lacks {' and '.join(running.missing_flags)}",
                why="unless both are set, tokens reach clients seconds late",
                do=remedy,
            )
        )
    if not running.has_edge:
        findings.append(
            error(
                CHECK,
                "the running Serve does not run motet's edge",
                why="its HAProxy has no limits, forwards control headers, and turns 502 to 504 into 500",
                do=remedy,
            )
        )
    return findings or [ok(CHECK, "the running Serve has its flags and motet's edge")]
