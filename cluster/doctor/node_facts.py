"""All that a node can say of itself, as plain data that travels, and what it means."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ..edge.edge_limits import EdgeLimits
from .finding import Finding
from .gpus import GpuFacts, check_gpus, gather_gpus
from .kernels import KernelFacts, check_kernels, gather_kernels
from .limits import LimitFacts, check_limits, gather_limits
from .redis import RedisFacts, check_redis, gather_redis
from .secrets_folder import SecretsFacts, check_secrets, gather_secrets, redis_url_in
from .serve_front import NodeServeFacts, check_node_serve, gather_serve
from .shared_folder import FolderFacts, check_folder, gather_folder
from .versions import gather_versions


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
    return [replace(one, node=name) for one in findings]
