"""What a node lets a process have: open files, memory, processors, shared memory."""

from __future__ import annotations

import os
import resource
import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil

from ...workers.machine_memory import memory_limit
from ..byte_size import format_byte_size, shortest_byte_size
from ..edge.haproxy import connections_with_room
from ..threads import usable_cores
from .finding import Finding, error, ok, warning

CHECK = "limits"
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
        findings.append(ok(CHECK, f"{facts.num_usable_cores} of {facts.num_cores} cores may be used"))
    return [*findings, *_shared_memory(facts.shared_memory_bytes, object_store_bytes)]


def _files(max_files: int | None, max_connections: int) -> Finding:
    if max_files is None:
        return ok(CHECK, "a process may open any number of files")
    room = connections_with_room(max_connections, max_files)
    if room >= max_connections:
        return ok(CHECK, f"a process may open {max_files} files, enough for {max_connections} connections")
    do = "ulimit -n 65536 before motet serve or ray start; in a service of systemd LimitNOFILE=65536"
    found = f"a process may open {max_files} files, enough for {room} of {max_connections} connections"
    level = error if max_files < FEWEST_FILES else warning
    return level(CHECK, found, why="further clients wait until others have gone", do=do)


def _memory(facts: LimitFacts, pool_bytes: int, computes_on_cpu: bool) -> list[Finding]:
    limit, pool = facts.memory_limit_bytes, shortest_byte_size(pool_bytes)
    room = min(facts.memory_bytes, limit or facts.memory_bytes)
    whose = "this container" if limit is not None and limit < facts.memory_bytes else "this machine"
    if computes_on_cpu and pool_bytes > room:
        return [
            error(
                CHECK,
                f"{whose} may use {format_byte_size(room)}, and the pool of one worker takes {pool}",
                why="the kernel ends the gang as soon as the pool fills",
                do="give less with --pool-bytes, or more with resources.limits.memory of the gangs' workerGroupSpecs",
            )
        ]
    return [ok(CHECK, f"{whose} may use {format_byte_size(room)} of memory")]


def _shared_memory(num_bytes: int | None, object_store_bytes: int) -> list[Finding]:
    if num_bytes is None:
        return []  # not Linux: Ray keeps its objects elsewhere
    has, takes = format_byte_size(num_bytes), format_byte_size(object_store_bytes)
    if num_bytes >= object_store_bytes:
        return [ok(CHECK, f"{SHARED_MEMORY} has {has}")]
    return [
        warning(
            CHECK,
            f"{SHARED_MEMORY} has {has}, and Ray's object store takes {takes}",
            why="Ray then keeps its objects on the disk; NCCL cannot start where too little is left",
            do="an emptyDir with medium: Memory and sizeLimit: 512Mi at /dev/shm (docker run --shm-size=512m)",
        )
    ]
