"""All checks of `motet doctor`: what each node says of itself, as plain data that travels, and what it means."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import resource
import secrets
import shutil
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from ... import __version__
from ...kernels.native.build import COMPILERS
from ...workers.device_probe import has_driver
from ...workers.machine_memory import memory_limit
from ..config import CACHE_VARIABLE
from ..edge.edge_config import EdgeLimits
from ..edge.haproxy import connections_with_room, is_edge_program
from ..edge.serve_variables import SERVE_FLAGS
from ..resources import usable_cores
from ..settings.setting_field import format_byte_size, shortest_byte_size
from .folder_checks import (
    FolderFacts,
    SecretsFacts,
    check_folder,
    check_locks_between,
    check_secrets,
    gather_folder,
    gather_secrets,
    hold_lock,
    is_locked_out,
    redis_url_in,
    remove_trial,
)
from .machine_checks import (
    Finding,
    GpuFacts,
    RedisFacts,
    check_gpus,
    check_redis,
    error,
    gather_gpus,
    gather_redis,
    ok,
    warning,
)
from .serve_front import SERVE as OF_SERVE
from .serve_front import (
    NodeServeFacts,
    RunningServe,
    check_node_serve,
    check_port,
    check_running_serve,
    gather_port,
    gather_serve,
)

# What a node lets a process have: open files, memory, processors, shared memory.

LIMITS = "limits"
SHARED_MEMORY = Path("/dev/shm")
FEWEST_FILES = 4096


@dataclass(frozen=True, kw_only=True)
class LimitFacts:
    max_files: int | None  # None: no limit
    memory_bytes: int  # of the machine
    memory_limit_bytes: int | None  # of the container
    num_cores: int  # of the machine
    num_usable_cores: int
    shared_memory_bytes: int | None  # None: there is no /dev/shm


def gather_limits() -> LimitFacts:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        shared_memory_bytes = shutil.disk_usage(SHARED_MEMORY).total
    except OSError:
        shared_memory_bytes = None
    return LimitFacts(
        max_files=None if soft == resource.RLIM_INFINITY else soft,
        memory_bytes=psutil.virtual_memory().total,
        memory_limit_bytes=memory_limit(),
        num_cores=os.cpu_count() or 1,
        num_usable_cores=usable_cores(),
        shared_memory_bytes=shared_memory_bytes,
    )


def check_limits(
    facts: LimitFacts, *, max_connections: int, pool_bytes: int, computes_on_cpu: bool, object_store_bytes: int
) -> list[Finding]:
    """`pool_bytes`: of one worker; `object_store_bytes`: what Ray keeps in shared memory on this node."""
    findings = [_files(facts.max_files, max_connections), *_memory(facts, pool_bytes, computes_on_cpu)]
    if facts.num_usable_cores < facts.num_cores:
        findings.append(ok(LIMITS, f"{facts.num_usable_cores} of {facts.num_cores} cores may be used"))
    return [*findings, *_shared_memory(facts.shared_memory_bytes, object_store_bytes)]


def _files(max_files: int | None, max_connections: int) -> Finding:
    if max_files is None:
        return ok(LIMITS, "a process may open any number of files")
    room = connections_with_room(max_connections, max_files)
    if room >= max_connections:
        return ok(LIMITS, f"a process may open {max_files} files, enough for {max_connections} connections")
    do = "ulimit -n 65536 before motet serve or ray start; in a service of systemd LimitNOFILE=65536"
    state = f"a process may open {max_files} files, enough for {room} of {max_connections} connections"
    level = error if max_files < FEWEST_FILES else warning
    return level(LIMITS, state, why="further clients wait until others have gone", do=do)


def _memory(facts: LimitFacts, pool_bytes: int, computes_on_cpu: bool) -> list[Finding]:
    limit, pool = facts.memory_limit_bytes, shortest_byte_size(pool_bytes)
    room = min(facts.memory_bytes, limit or facts.memory_bytes)
    whose = "this container" if limit is not None and limit < facts.memory_bytes else "this machine"
    if computes_on_cpu and pool_bytes > room:
        return [
            error(
                LIMITS,
                f"{whose} may use {format_byte_size(room)}, and the pool of one worker takes {pool}",
                why="the kernel ends the gang as soon as the pool fills",
                do="give less with --pool-bytes, or more with resources.limits.memory of the gangs' workerGroupSpecs",
            )
        ]
    return [ok(LIMITS, f"{whose} may use {format_byte_size(room)} of memory")]


def _shared_memory(num_bytes: int | None, object_store_bytes: int) -> list[Finding]:
    if num_bytes is None:
        return []  # not Linux: Ray keeps its objects elsewhere
    has, takes = format_byte_size(num_bytes), format_byte_size(object_store_bytes)
    if num_bytes >= object_store_bytes:
        return [ok(LIMITS, f"{SHARED_MEMORY} has {has}")]
    return [
        warning(
            LIMITS,
            f"{SHARED_MEMORY} has {has}, and Ray's object store takes {takes}",
            why="Ray then keeps its objects on the disk; NCCL cannot start where too little is left",
            do="an emptyDir with medium: Memory and sizeLimit: 512Mi at /dev/shm (docker run --shm-size=512m)",
        )
    ]


# Whether gangs here would compute with the fast kernels.

KERNELS = "kernels"
CPU_FACTS = Path("/proc/cpuinfo")
# CPU features that the C++ kernels use, the best first, and their purpose.
INSTRUCTIONS = {"amx_bf16": "AMX", "avx512_bf16": "AVX512-BF16", "avx512f": "AVX512", "avx2": "AVX2", "asimd": "NEON"}
WHY_SLOW = "gangs would compute with the plain kernels, with many times fewer tokens per second"


@dataclass(frozen=True, kw_only=True)
class KernelFacts:
    compiler: str | None
    cache: Path
    cache_is_writable: bool
    instructions: str | None  # the best of INSTRUCTIONS; None: none of them, or unknown
    has_gpu_driver: bool
    has_triton: bool


def gather_kernels() -> KernelFacts:
    cache = Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache") / "motet"
    try:
        text = CPU_FACTS.read_text()
        flags = {word for line in text.splitlines() if line.startswith(("flags", "Features")) for word in line.split()}
    except OSError:
        flags = set()
    return KernelFacts(
        compiler=next((path for name in COMPILERS if (path := shutil.which(name))), None),
        cache=cache,
        cache_is_writable=_is_writable(cache),
        instructions=next((name for flag, name in INSTRUCTIONS.items() if flag in flags), None),
        has_gpu_driver=has_driver(),
        has_triton=importlib.util.find_spec("triton") is not None,
    )


def _is_writable(folder: Path) -> bool:
    """Whether files can be made there, once it and what is above it are made."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)


def check_kernels(facts: KernelFacts) -> list[Finding]:
    findings = []
    if facts.compiler is None:
        findings.append(
            error(
                KERNELS,
                f"no C++ compiler was found ({', '.join(COMPILERS)})",
                why=WHY_SLOW,
                do="apt-get install g++; motet's images have it",
            )
        )
    else:
        cpu = facts.instructions or "no vector instructions that are known"
        findings.append(ok(KERNELS, f"{facts.compiler} compiles for this CPU ({cpu})"))
    if not facts.cache_is_writable:
        findings.append(
            error(
                KERNELS,
                f"{facts.cache} cannot be written",
                why=f"compiled kernels are kept there; {WHY_SLOW}",
                do=f"a folder that can be written, named by {CACHE_VARIABLE}: with readOnlyRootFilesystem an emptyDir "
                "at /var/cache",
            )
        )
    if facts.has_gpu_driver and not facts.has_triton:
        findings.append(
            warning(
                KERNELS,
                "there is an NVIDIA driver, and Triton is not installed",
                why="gangs on a GPU would compute with the plain kernels, several times slower",
                do="pip install 'motet[gpu]', or the image motet-cuda",
            )
        )
    return findings


# Versions, on one node and among nodes.

VERSIONS = "versions"
PACKAGES = ("ray", "torch", "transformers", "msgspec", "grpcio")  # nodes send each other what these make


def gather_versions() -> dict[str, str]:
    """Versions of packages that must be equal on all nodes, if installed. Imports none of them."""
    versions = {"motet": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


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
                    VERSIONS,
                    f"{name} is not installed on {', '.join(nodes_of['none'])}",
                    why="no part of motet can start there",
                    do=f"pip install {name}, or the same image for every group of the RayCluster",
                )
            )
        elif len(nodes_of) > 1:
            distribution = "; ".join(f"{version} on {', '.join(nodes)}" for version, nodes in sorted(nodes_of.items()))
            findings.append(
                error(
                    VERSIONS,
                    f"{name} has several versions: {distribution}",
                    why="parts of motet on these nodes may not understand each other, or not compute alike",
                    do="the same image, by its digest, for the head and every workerGroupSpecs of the RayCluster",
                )
            )
    if not findings:
        versions = next(iter(by_node.values()))
        findings.append(ok(VERSIONS, ", ".join(f"{name} {version}" for name, version in versions.items())))
    return findings


@dataclass(frozen=True, kw_only=True)
class Questions:
    """What every node is to look at. Plain data, because it travels."""

    data_dir: Path
    redis_url: str | None  # None: a node looks into its folder of secrets

    def __repr__(self) -> str:
        return "Questions(…)"  # the URL has a password


@dataclass(frozen=True, kw_only=True)
class Expectations:
    """What the facts are held to."""

    limits: EdgeLimits | None  # None: those of each node's environment
    pool_bytes: int
    tensor_parallel: int
    computes_on_cpu: bool
    object_store_bytes: int


@dataclass(frozen=True, kw_only=True)
class NodeFacts:
    host: str
    redis: RedisFacts
    serve: NodeServeFacts
    limits: LimitFacts
    folder: FolderFacts
    gpus: GpuFacts
    kernels: KernelFacts
    secrets: SecretsFacts
    versions: Mapping[str, str]


def gather_node(questions: Questions, num_gpus_of_ray: int = 0) -> NodeFacts:
    """Looks at this machine. It takes a second or two; torch is loaded only where there is a GPU's driver."""
    secrets = gather_secrets()
    url = questions.redis_url or redis_url_in(secrets.folder)
    return NodeFacts(
        host=socket.gethostname(),
        redis=gather_redis(url),
        serve=gather_serve(),
        limits=gather_limits(),
        folder=gather_folder(questions.data_dir),
        gpus=gather_gpus(num_gpus_of_ray),
        kernels=gather_kernels(),
        secrets=secrets,
        versions=gather_versions(),
    )


def check_node(facts: NodeFacts, expected: Expectations, name: str = "") -> list[Finding]:
    """What one node's facts mean. `name`: of the node; empty: this machine."""
    limits = expected.limits or facts.serve.limits
    findings = [
        *check_folder(facts.folder),  # first: what a full disk does looks like other faults
        *check_secrets(facts.secrets),
        *check_redis(facts.redis),
        *check_node_serve(facts.serve),
        *check_limits(
            facts.limits,
            max_connections=limits.max_connections if limits is not None else 0,
            pool_bytes=expected.pool_bytes,
            computes_on_cpu=expected.computes_on_cpu and not facts.gpus.has_driver,
            object_store_bytes=expected.object_store_bytes,
        ),
        *check_kernels(facts.kernels),
        *check_gpus(facts.gpus, tensor_parallel=expected.tensor_parallel),
    ]
    return [replace(finding, node=name) for finding in findings]


# All checks of `motet doctor`: on this machine, or on every node of a running cluster.

# Clocks: of Redis, and of the nodes among each other.

CLOCKS = "clocks"
APART_S = 1.0
FAR_APART_S = 60.0  # what the hour of a sweep may still be wrong by
WHY = "what is younger than an hour is kept from sweeps by its time, and logs of several nodes are read by theirs"
DO = "let a time service run on every node (chronyd, systemd-timesyncd): chronyc tracking says how it is doing"


def check_clocks(offsets_s: Mapping[str, float]) -> list[Finding]:
    """`offsets_s`: of each clock, against one that all were compared with.

    >>> check_clocks({"head": 0.0, "redis": 0.004})[0].found
    '2 clocks are within 4 ms'
    >>> check_clocks({"head": 0.0, "redis": 90.0})[0].level
    'error'
    """
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
