"""Settings of gangs: batches, memory, placement and scaling."""

from __future__ import annotations

from typing import Annotated, Literal

from ...adapters.errors import AdapterInvalid
from ...adapters.names import check_tenant
from ...workers.config import ExpertSharding, NanoBatches
from ..resources import Placement as Strategy
from ..resources import why_not_custom, why_not_labels, why_not_num_gpus
from .setting_field import (
    Amount,
    Bytes,
    BytesOrNone,
    Count,
    CountOrNone,
    Pairs,
    PositiveSeconds,
    Refusal,
    Seconds,
    Setting,
    SettingGroup,
    Share,
    Threads,
    Unit,
)

# Settings: what a gang computes at once, and which requests it takes.


def check_objectives(objectives_s: tuple[tuple[str, float], ...]) -> Refusal | None:
    """Whether there are such tenants is the registry's business."""
    seen: set[str] = set()
    for tenant, objective_s in objectives_s:
        pair_text = f"{tenant}={objective_s:g}"
        try:
            check_tenant(tenant)
        except AdapterInvalid as error:
            return pair_text, str(error)
        if not 0 < objective_s < float("inf"):
            return pair_text, "a positive number of seconds is needed"
        if tenant in seen:
            return pair_text, f"{tenant} has another one already; one is accepted"
        seen.add(tenant)
    return None


class Batching(SettingGroup, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Batching and admission."""

    max_num_sequences: Annotated[
        Count | None, Setting("Sequences of a gang that run at once.", "live", unset="128 on CPUs, 256 on a GPU")
    ] = None
    max_tokens_per_step: Annotated[
        Count | None, Setting("Tokens that a gang computes in one step.", "live", unset="512 on CPUs, 2,048 on a GPU")
    ] = None
    token_interval_s: Annotated[
        Seconds | Literal["auto"],
        Setting(
            "Target time of a step while answers are generated: each waits a step for its next token. It "
            "limits the prompt tokens of a step; while each tenant that generates has several prompts of its own to "
            "compute, a step may take up to 5 times as long. auto: 0.1 on CPUs, 0.05 on a GPU. 0: no target, up to "
            "max-tokens-per-step, for offline batches.",
            "live",
            live_in="gang",
        ),
    ] = "auto"
    scheduling: Annotated[
        Literal["fair", "fifo"],
        Setting(
            "fair: the tenant that a gang has served least goes first, by its weight, and is preempted last. fifo: "
            "first come, first served, without weights, priorities and background requests.",
            "live",
        ),
    ] = "fair"
    max_waiting_sequences: Annotated[
        Count,
        Setting("Sequences that wait for their first token in one gang; more are refused.", "live", live_in="gang"),
    ] = 4096
    tenant_queue_share: Annotated[
        Share,
        Setting(
            "Share of both limits of a gang's queue that one tenant may take; requests beyond that are refused.",
            "live",
            live_in="gang",
        ),
    ] = 0.5
    tenant_running_share: Annotated[
        Share,
        Setting(
            "Share of a gang's running sequences that one tenant may have. Its further ones wait, even if there are "
            "free places. 1: no limit.",
            "live",
            live_in="gang",
        ),
    ] = 1.0
    max_queue_wait_s: Annotated[
        Seconds,
        Setting(
            "A request with a longer expected wait in the queue is refused at once. 0: no limit.",
            "live",
            live_in="router",
        ),
    ] = 60.0
    latency_objectives_s: Annotated[
        tuple[tuple[str, float], ...],
        Pairs("TENANT=SECONDS", example="acme=2.5"),
        Setting(
            "A tenant's request whose first token would come later, because of the queue, is refused at once.",
            "live",
            live_in="router",
            flags=("latency-objective",),
            check=check_objectives,
        ),
    ] = ()
    nano_batches: Annotated[
        NanoBatches,
        Setting(
            "Whether gangs of several workers compute a step in two parts, one while the other's sum is under way. "
            "auto: the steps that are predicted to be faster so, by what a gang measures at its start. off: none.",
            "live",
        ),
    ] = "auto"
    num_threads: Annotated[
        Threads | Literal["auto"],
        Setting(
            "Threads that each worker computes with. auto: on this machine at most a worker's share of the cores, less "
            "what routers and HAProxy need; on a running cluster at most its CPUs of Ray (--gang-num-cpus); a worker "
            "alone on a CPU measures at its start how many of these are fastest; 1 on a GPU.",
            "live",
        ),
    ] = "auto"


# Settings: memory.


class Memory(SettingGroup, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Memory."""

    pool_bytes: Annotated[
        Bytes | None,
        Setting(
            "Memory of each worker, on its device, for the pages of KV and adapters.",
            "live",
            unset="on CPUs an eighth of the memory for all workers of a machine, with --address at most 1 GiB each; "
            "on a GPU what is left of --device-memory-share",
        ),
    ] = None
    device_memory_share: Annotated[
        Share,
        Setting(
            "Share of its GPU's memory that a worker may use without --pool-bytes, including what other processes use: "
            "it measures weights, the largest step and graphs, and the rest is its pool.",
            "live",
        ),
    ] = 0.9
    host_bytes: Annotated[
        BytesOrNone,
        Setting(
            "Host memory of each worker for packed adapters that are not in its pool. 0: none, they are read from the "
            "data folder.",
            "live",
        ),
    ] = 4 << 30
    kv_host_bytes: Annotated[
        BytesOrNone | None,
        Setting(
            "Host memory of each worker for KV that has no room in its pool, allocated on demand. 0: none.",
            "live",
            unset="a quarter of the pool, at least 1 GiB, at most an eighth of the machine for a gang",
        ),
    ] = None
    kv_disk_bytes: Annotated[
        BytesOrNone,
        Setting("Disk of each worker for KV that has no room in --kv-host-bytes, which it needs. 0: none.", "live"),
    ] = 0
    prefix_cache: Annotated[bool, Setting("Whether a tenant's requests with a common prefix share its KV.", "live")] = (
        True
    )
    block_size: Annotated[Count, Setting("Tokens in a page of KV. Adapters are packed for it.")] = 16


# Settings: where routers and gangs run, and what they take of their nodes.

Amounts = tuple[tuple[str, float], ...]
Labels = tuple[tuple[str, str], ...]
RESOURCE = Pairs(
    "NAME=AMOUNT", example="nvidia.com/mig-1g.10gb=1", split_last=True
)  # names of MIG slices hold slashes and dots


def check_num_gpus(num_gpus: float) -> Refusal | None:
    return None if (accepted := why_not_num_gpus(num_gpus)) is None else (num_gpus, accepted)


def check_resources(resources: Amounts) -> Refusal | None:
    return None if (problem := why_not_custom(resources)) is None else (resources, problem)


def check_labels(labels: Labels) -> Refusal | None:
    return None if (problem := why_not_labels(labels)) is None else (labels, problem)


def check_address(address: str | None) -> Refusal | None:
    if address is None or address == "auto":
        return None
    if address.startswith("ray://"):
        return (
            address,
            "Ray Client is not supported, as motet must be on a node of the cluster: run motet serve there, with "
            "auto or HOST:PORT of the head (6379 unless it was started with another --port)",
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
        return address, "auto or HOST:PORT of the head of a running Ray cluster is accepted"
    return None


class Placement(SettingGroup, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Placement."""

    address: Annotated[
        str | None,
        Unit("HOST:PORT|auto", "auto or HOST:PORT of the head of a running Ray cluster"),
        Setting(
            "Serve on a running Ray cluster of which this machine is a node: its head's HOST:PORT, or auto to find it.",
            unset="a private cluster on this machine",
            check=check_address,
            not_in_args="the application serves on the cluster that runs it",
        ),
    ] = None
    num_routers: Annotated[Count, Setting("HTTP fronts, spread over the nodes.")] = 1
    tensor_parallel: Annotated[Count, Setting("Workers of a gang, which hold one copy of the base together.")] = 1
    expert_sharding: Annotated[
        ExpertSharding,
        Setting("How the workers of a gang divide a mixture of experts: the features of each expert, or the experts."),
    ] = "tensor"
    gang_num_cpus: Annotated[Amount, Setting("Ray's CPUs for each worker of a gang.")] = 1.0
    gang_num_gpus: Annotated[
        Amount,
        Setting(
            "Ray's GPUs for each worker; in a gang of one worker also a share of a GPU, which needs --pool-bytes. On "
            "this machine 0 means one GPU if there is any.",
            check=check_num_gpus,
        ),
    ] = 0.0
    gang_resources: Annotated[
        Amounts,
        RESOURCE,
        Setting(
            "A custom resource of Ray that each worker of a gang needs.", flags=("resource",), check=check_resources
        ),
    ] = ()
    gang_labels: Annotated[
        Labels,
        Pairs("KEY=VALUE", example="accelerator=l4"),
        Setting("A label that the nodes of a gang must have.", flags=("node-label",), check=check_labels),
    ] = ()
    strategy: Annotated[
        Strategy,
        Setting(
            "Which nodes the workers of a gang run on: all on one node, on as few nodes as possible, or on as many.",
            flags=("placement",),
        ),
    ] = "strict-pack"
    router_resources: Annotated[
        Amounts,
        RESOURCE,
        Setting("A custom resource of Ray that each router needs.", flags=("router-resource",), check=check_resources),
    ] = ()


# Settings: how many gangs there are, and when.


class Scaling(SettingGroup, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Scaling."""

    min_gangs: Annotated[
        CountOrNone,
        Setting(
            "Copies of the base, each with its own memory. 0: none without requests.",
            "live",
            flags=("min-gangs", "gangs"),
        ),
    ] = 1
    max_gangs: Annotated[
        Count | None, Setting("The most copies under load.", "live", unset="as --min-gangs, at least 1")
    ] = None
    queued_tokens_per_gang: Annotated[
        Count | None,
        Setting(
            "Prompt tokens that may wait for each gang before another gang is started.",
            "live",
            unset="16 times --max-tokens-per-step, 8,192 where that is not given",
        ),
    ] = None
    pool_pressure: Annotated[
        Share,
        Setting(
            "Share of a gang's pages, or of its places for running sequences, that may be in use before another "
            "gang is started.",
            "live",
        ),
    ] = 0.8
    scale_down_after_s: Annotated[
        Seconds, Setting("Gangs stop when fewer would have been enough for this time.", "live")
    ] = 60.0
    scale_to_zero_after_s: Annotated[
        Seconds,
        Setting(
            "With --min-gangs 0: the last gang stops after this time without a request. At least two scaling windows.",
            "live",
        ),
    ] = 300.0
    tenant_scaling_share: Annotated[
        Share,
        Setting(
            "Share of --max-gangs that may be started for one tenant's backlog, so that one tenant does not start "
            "them all. 1: no limit.",
            "live",
        ),
    ] = 1.0
    scaling_window_s: Annotated[PositiveSeconds, Setting("The load is averaged over this time.", "live")] = 5.0
