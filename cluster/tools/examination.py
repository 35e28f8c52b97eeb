"""All checks of `motet doctor`: on this machine, or on every node of a running cluster."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..edge.haproxy import is_edge_program
from ..edge.serve_variables import SERVE_FLAGS
from .folder_checks import check_locks_between, hold_lock, is_locked_out, remove_trial
from .machine_checks import Finding, error, ok, warning
from .node_facts import Expectations, NodeFacts, Questions, check_node, check_versions, gather_node
from .serve_front import SERVE as OF_SERVE
from .serve_front import RunningServe, check_port, check_running_serve, gather_port

# Clocks: of Redis, and of the nodes among each other.

CLOCKS = "clocks"
APART_S = 1.0
FAR_APART_S = 60.0  # what the hour of a sweep may still be wrong by
WHY = "what is younger than an hour is kept from sweeps by its time, and logs of several nodes are read by theirs"
DO = "let a time service run on every node (chronyd, systemd-timesyncd): chronyc tracking says how it is doing"


def check_clocks(offsets_s: Mapping[str, float]) -> list[Finding]:
    """`offsets_s`: of each clock, against one that all were compared with."""
    if len(offsets_s) < 2:
        return []
    first, *_, last = sorted(offsets_s, key=lambda name: offsets_s[name])
    apart_s = offsets_s[last] - offsets_s[first]
    state = f"{last} is {apart_s:.2f} s ahead of {first}"
    if apart_s >= FAR_APART_S:
        return [error(CLOCKS, state, why=WHY, do=DO)]
    if apart_s >= APART_S:
        return [warning(CLOCKS, state, why=WHY, do=DO)]
    return [ok(CLOCKS, f"{len(offsets_s)} clocks are within {apart_s * 1e3:.0f} ms")]


CHECK = "cluster"
TIMEOUT_S = 150.0  # of all nodes together; a node may have to start a process, and torch, first


def examine_machine(questions: Questions, expected: Expectations, port: int) -> list[Finding]:
    """Checks this machine alone."""
    facts = gather_node(questions)
    offset_s = facts.redis.clock_offset_s
    clocks = {} if offset_s is None else {"this machine": 0.0, "Redis": offset_s}
    return [
        *check_node(facts, expected),
        *check_clocks(clocks),
        *check_port(gather_port(port)),
        *check_versions({"this machine": facts.versions}),
    ]


def examine_cluster(address: str, questions: Questions, expected: Expectations) -> list[Finding]:
    """Checks every living node with a task; this process joins the cluster for that, and changes nothing in it."""
    import ray

    try:
        ray.init(address=address, log_to_driver=False, logging_level="error")
    except (ConnectionError, RuntimeError, ValueError, TimeoutError, ray.exceptions.RayError) as problem:
        return [
            error(
                CHECK,
                f"no running Ray cluster was joined at {address}: {problem}",
                why="none of its nodes could be examined",
                do="run it on a node of the cluster (kubectl exec into a pod), with RAY_AUTH_MODE and RAY_AUTH_TOKEN "
                "if the cluster requires a token",
            )
        ]
    try:
        nodes = sorted(
            (node for node in ray.nodes() if node["Alive"]), key=lambda node: str(node["NodeManagerAddress"])
        )
        facts, findings = _gathered(nodes, questions)
        for node in nodes:
            name = node["NodeManagerAddress"]
            if name in facts:
                store_bytes = int(node["Resources"].get("object_store_memory", 0))
                findings += check_node(facts[name], replace(expected, object_store_bytes=store_bytes), name)
        findings += check_clocks(clocks_of(facts))
        if facts:
            findings += check_versions({name: node_facts.versions for name, node_facts in facts.items()})
        findings += _locks_between(nodes, questions.data_dir)
        return [*findings, *_serve_findings()]
    finally:
        ray.shutdown()


def clocks_of(facts: Mapping[str, NodeFacts]) -> dict[str, float]:
    """How far each node's clock is ahead of Redis's, and Redis itself; without nodes that cannot reach it."""
    offsets = {name: node_facts.redis.clock_offset_s for name, node_facts in facts.items()}
    clocks = {name: -offset_s for name, offset_s in offsets.items() if offset_s is not None}
    return {"Redis": 0.0, **clocks} if clocks else {}


def _gathered(nodes: Sequence[Mapping[str, Any]], questions: Questions) -> tuple[dict[str, NodeFacts], list[Finding]]:
    """Facts of nodes by address, and findings for nodes that did not answer."""
    import ray

    gather = ray.remote(gather_node)
    calls = [_on(gather, node).remote(questions, int(node["Resources"].get("GPU", 0))) for node in nodes]
    done, _ = ray.wait(calls, num_returns=len(calls), timeout=TIMEOUT_S)
    facts: dict[str, NodeFacts] = {}
    findings: list[Finding] = []
    for node, answer in zip(nodes, calls, strict=True):
        name, problem = node["NodeManagerAddress"], f"it did not answer within {TIMEOUT_S:g} s"
        if answer in done:
            try:
                facts[name] = ray.get(answer)
                continue
            except ray.exceptions.RayError as failure:
                problem = _last_line(failure)
        do = "the same image, with motet in it, for every group of the RayCluster; ray status says how the node is"
        finding = error(CHECK, f"it could not be examined: {problem}", why="motet cannot use it", do=do)
        findings.append(replace(finding, node=name))
    return facts, findings


def _locks_between(nodes: Sequence[Mapping[str, Any]], data_dir: Path) -> list[Finding]:
    """The first node locks a file of the data folder, each other one tries, one after the other."""
    import ray

    findings: list[Finding] = []
    for other in nodes[1:]:
        trial = secrets.token_hex(4)
        holding = _on(ray.remote(hold_lock), nodes[0]).remote(data_dir, trial)
        trying = _on(ray.remote(is_locked_out), other).remote(data_dir, trial)
        names = (nodes[0]["NodeManagerAddress"], other["NodeManagerAddress"])
        try:
            locked_out = ray.get(trying, timeout=TIMEOUT_S)
            findings += check_locks_between(*names, ray.get(holding, timeout=TIMEOUT_S), locked_out)
        except ray.exceptions.RayError:
            findings += check_locks_between(*names, False, None)  # a node of them has no such folder
        finally:
            remove_trial(data_dir, trial)
    return findings


def _on(task: Any, node: Mapping[str, Any]) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    place = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    return task.options(num_cpus=0, max_retries=0, scheduling_strategy=place)


def _serve_findings() -> list[Finding]:
    """A controller that is dead or hangs is a finding too; the other checks still run."""
    import ray

    try:
        return check_running_serve(_running_serve())
    except ray.exceptions.RayError as failure:
        return [
            error(
                OF_SERVE,
                f"its controller does not answer: {_last_line(failure)}",
                why="without it no router or gang that dies is replaced; its flags and its edge are not known",
                do="serve status, and its log on the head node, in logs/serve of Ray's session folder",
            )
        ]


def _last_line(failure: BaseException) -> str:
    return next((line for line in reversed(str(failure).splitlines()) if line.strip()), "")


def _running_serve() -> RunningServe | None:
    import ray
    from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

    try:
        controller = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
    except ValueError:
        return None
    running: RunningServe = ray.get(controller.__ray_call__.remote(_in_controller), timeout=TIMEOUT_S)
    return running


def _in_controller(_controller: Any) -> RunningServe:
    from ray.serve._private import constants

    missing = tuple(name for name in SERVE_FLAGS if not getattr(constants, name))
    return RunningServe(missing_flags=missing, has_edge=is_edge_program(constants.RAY_SERVE_HAPROXY_BINARY_PATH))
