"""All that a node can say of itself, as plain data that travels, and what it means."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import resource
import shutil
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from ... import __version__
from ...kernels.native.build import COMPILERS
from ...workers.device_probe import has_driver
from ...workers.machine_memory import memory_limit
from ..config import CACHE_VARIABLE
from ..edge.edge_config import EdgeLimits
from ..edge.haproxy import connections_with_room
from ..resources import usable_cores
from ..settings.setting_field import format_byte_size, shortest_byte_size
from .folder_checks import (
    FolderFacts,
    SecretsFacts,
    check_folder,
    check_secrets,
    gather_folder,
    gather_secrets,
    redis_url_in,
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
from .serve_front import NodeServeFacts, check_node_serve, gather_serve

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
