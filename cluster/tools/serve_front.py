"""Checks Ray Serve's flags, on a node and in the running Serve, and the program that Serve runs as HAProxy."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field

import httpx
import psutil

from ..edge.edge_config import EdgeLimits, limits_of_environment
from ..edge.haproxy import is_edge_program
from ..edge.serve_variables import BINARY_VARIABLE, LASTING_STARTS, LASTING_STREAMS, SERVE_FLAGS
from .machine_checks import Finding, error, ok, warning

# Checks that motet's port is free, or finds the process that listens there.

PORTS = "ports"
TIMEOUT_S = 2.0


@dataclass(frozen=True, kw_only=True)
class PortFacts:
    port: int
    is_taken: bool
    is_motet: bool = False  # it answers as motet does
    owner: str = ""  # name and id of the process; empty: not visible to this user


def gather_port(port: int) -> PortFacts:
    """Checks the port on all addresses of this machine."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            return PortFacts(port=port, is_taken=False)
        except OSError:
            pass
    return PortFacts(port=port, is_taken=True, is_motet=_is_motet(port), owner=_owner(port))


def _is_motet(port: int) -> bool:
    """Whether the server answers /health, and asks for a key with an error of OpenAI's shape."""
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=TIMEOUT_S, trust_env=False) as client:
            refused = client.get("/v1/models")
            return client.get("/health").is_success and refused.json()["error"]["code"] == "invalid_api_key"
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return False


def _owner(port: int) -> str:
    try:
        listening = [
            connection for connection in psutil.net_connections("tcp") if connection.status == psutil.CONN_LISTEN
        ]
        pid = next(
            (
                connection.pid
                for connection in listening
                if connection.laddr and connection.laddr.port == port and connection.pid
            ),
            None,
        )
        return f"{psutil.Process(pid).name()}, process {pid}" if pid else ""
    except (psutil.Error, OSError):
        return ""


def check_port(facts: PortFacts) -> list[Finding]:
    owner = f" ({facts.owner})" if facts.owner else ""
    if not facts.is_taken:
        return [ok(PORTS, f"port {facts.port} is free")]
    if facts.is_motet:
        return [ok(PORTS, f"a motet serves at port {facts.port}{owner}")]
    return [
        error(
            PORTS,
            f"port {facts.port} is taken by another server{owner}",
            why="motet cannot listen there",
            do=f"stop it (ss -ltnp 'sport = :{facts.port}' shows its process), or choose another port with --port",
        )
    ]


SERVE = "serve"
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
                SERVE,
                f"the front's limits: {facts.limits_problem}",
                why="HAProxy does not start",
                do=f"correct it in {OF_PODS}",
            )
        )
    if not facts.variables and not facts.program:
        return [
            *findings,
            ok(SERVE, "the environment sets nothing for Serve: motet serve sets it when it starts Serve"),
        ]
    if missing := [f"{name}={value}" for name, value in SERVE_FLAGS.items() if facts.variables.get(name) != value]:
        findings.append(
            error(
                SERVE,
                f"the environment lacks {' and '.join(missing)}",
                why="unless both are set, tokens reach clients seconds late",
                do=f"{OF_PODS} (motet's images have them), or before ray start",
            )
        )
    if not facts.program_is_edge:
        named = f"{facts.program} is not motet's edge" if facts.program else f"{BINARY_VARIABLE} is not set"
        findings.append(
            error(
                SERVE,
                named,
                why="Serve's own HAProxy has no limits, forwards its control headers, and turns 502 to 504 into 500",
                do=f"motet edge-program /opt/motet/bin/motet-haproxy, and {BINARY_VARIABLE} in {OF_PODS} (motet's "
                "images have both)",
            )
        )
    if other := [f"{name}={value}" for name, value in LASTING_STREAMS.items() if facts.variables.get(name) != value]:
        findings.append(
            warning(
                SERVE,
                f"the environment lacks {', '.join(other)}",
                why="streams open while routers are replaced are cut after two minutes, or reach another router",
                do=f"{OF_PODS} (motet's images have them)",
            )
        )
    if other := [f"{name}={value}" for name, value in LASTING_STARTS.items() if facts.variables.get(name) != value]:
        findings.append(
            warning(
                SERVE,
                f"the environment lacks {', '.join(other)}",
                why="Serve gives up on gangs for good after three failed starts of each",
                do=f"{OF_PODS} (motet's images have them)",
            )
        )
    return findings or [ok(SERVE, f"flags and edge are set ({facts.program})")]


def check_running_serve(running: RunningServe | None) -> list[Finding]:
    """Findings of the running Serve; None: none runs."""
    if running is None:
        return [ok(SERVE, "no Serve runs on the cluster yet")]
    findings = []
    remedy = "serve shutdown, then motet serve --address, which starts its own; in a RayService, correct " + OF_PODS
    if running.missing_flags:
        findings.append(
            error(
                SERVE,
                f"the running Serve lacks {' and '.join(running.missing_flags)}",
                why="unless both are set, tokens reach clients seconds late",
                do=remedy,
            )
        )
    if not running.has_edge:
        findings.append(
            error(
                SERVE,
                "the running Serve does not run motet's edge",
                why="its HAProxy has no limits, forwards control headers, and turns 502 to 504 into 500",
                do=remedy,
            )
        )
    return findings or [ok(SERVE, "the running Serve has its flags and motet's edge")]
